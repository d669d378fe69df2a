"""Alembic's entry: runs on the connection that the service hands over."""

from alembic import context

from fp8_safeguard.server.tables import metadata


def run() -> None:
    """Migrate inside the caller's transaction, so that a failure leaves nothing behind."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        raise RuntimeError("migrations run through fp8-safeguard itself: use `fp8-safeguard db upgrade`")
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


# Alembic executes this file under the name env_py; an ordinary import does nothing.
if __name__ == "env_py":
    run()
