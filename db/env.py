"""Alembic's entry point. The program hands over its own connection; there is no alembic.ini."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy import Connection, TypeDecorator
from sqlalchemy.sql.schema import SchemaItem

from autotune.store.models import Base
from autotune.store.sqlite import VERSION_TABLE


def include_object(
    item: SchemaItem, name: str | None, kind: str, reflected: bool, compare_to: SchemaItem | None
) -> bool:
    """Ours only: Optuna's tables lie in the same database, and on a server those of others may."""
    return not (kind == "table" and reflected and name not in Base.metadata.tables)


def render_item(kind: str, item: Any, autogen_context: AutogenContext) -> str | Literal[False]:
    """Drafts name SQLAlchemy's own types: a migration must not change when ours do."""
    return f"sa.{item.impl_instance!r}" if isinstance(item, TypeDecorator) else False


def run(connection: Connection) -> None:
    """Run the wanted steps in the transaction that the caller has begun."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,  # Optuna has alembic_version
        include_object=include_object,
        render_item=render_item,
        # SQLite cannot alter most of a table: copy it
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
