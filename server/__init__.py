"""The service: ingest, store, query, decide, expose. Never imports torch."""
