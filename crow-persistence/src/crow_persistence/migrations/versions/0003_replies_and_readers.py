"""Add the reply of a model call, the copies of sessions whose database was lost, and the oldest revision that may use
the tables."""

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, String

revision = "0003"
down_revision = "0002"

Number = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    op.add_column("calls", Column("reply", Number))
    op.add_column("sessions", Column("copied", BigInteger))
    op.add_column("alembic_version", Column("oldest_reader", String(32)))
