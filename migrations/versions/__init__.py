"""One file a schema revision, oldest first."""
