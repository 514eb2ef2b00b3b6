"""Create the tables of evaluations and their cells."""

from alembic import op
from sqlalchemy import BigInteger, Column, Float, ForeignKey, Integer, String, Text, UniqueConstraint

revision = "0005"
down_revision = "0004"

Number = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "evaluations",
        Column("number", Number, primary_key=True, autoincrement=True),
        Column("id", String(64), nullable=False, unique=True),
        Column("dataset", Text, nullable=False),
        Column("settings", Text, nullable=False),
        Column("created", BigInteger, nullable=False),
        Column("ended", BigInteger),
    )
    op.create_table(
        "cells",
        Column("number", Number, primary_key=True, autoincrement=True),
        Column("evaluation", Number, ForeignKey("evaluations.number", ondelete="CASCADE"), nullable=False),
        Column("task", Text, nullable=False),
        Column("variant", Integer, nullable=False),
        Column("repetition", Integer, nullable=False),
        Column("session", String(64), nullable=False),
        Column("state", String(16), nullable=False),
        Column("started", BigInteger, nullable=False),
        Column("ended", BigInteger, nullable=False),
        Column("outcome", Text, nullable=False),
        Column("requests", Integer, nullable=False),
        Column("input", Integer, nullable=False),
        Column("output", Integer, nullable=False),
        Column("cached", Integer, nullable=False),
        Column("cost", Float),
        Column("currency", String(8)),
        Column("first", Float),
        Column("total", Float),
        UniqueConstraint("evaluation", "task", "variant", "repetition"),
    )
    op.create_index("ix_cells_session", "cells", ["session"])
