"""Add the signatures of decisions. A version of crow that does not sign may not append to a signed chain."""

from alembic import op
from sqlalchemy import Column, String

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("decisions", Column("key_id", String(16)))
    op.add_column("decisions", Column("mac", String(64)))
