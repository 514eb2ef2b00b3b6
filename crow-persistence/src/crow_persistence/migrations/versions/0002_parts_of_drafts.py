"""Create the table of the parts of a streaming reply, so that each part is written once."""

from alembic import op
from sqlalchemy import BigInteger, Column, ForeignKey, Integer, Text

revision = "0002"
down_revision = "0001"

Number = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "draft_parts",
        Column(
            "session", Number, ForeignKey("drafts.session", ondelete="CASCADE"), primary_key=True, autoincrement=False
        ),
        Column("number", Integer, primary_key=True, autoincrement=False),
        Column("body", Text, nullable=False),
    )
