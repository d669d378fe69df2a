"""Schema migrations of the service's store."""
