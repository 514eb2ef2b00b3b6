"""Create the first tables. `crow_persistence.tables` explains their columns."""

from alembic import op
from crow_persistence import search
from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)

revision = "0001"
down_revision = None

Number = BigInteger().with_variant(Integer, "sqlite")
Digest = String(64)


def upgrade() -> None:
    op.create_table(
        "sessions",
        Column("number", Number, primary_key=True, autoincrement=True),
        Column("id", String(64), nullable=False, unique=True),
        Column("cwd", Text, nullable=False),
        Column("roots", Text, nullable=False),
        Column("title", Text),
        Column("created", BigInteger, nullable=False),
        Column("updated", BigInteger, nullable=False),
        Column("options", Text, nullable=False),
        Column("head", Number),
        Column("origin", String(64)),
        Column("owner", Text),
        Column("beat", BigInteger),
        Column("deleted", BigInteger),
    )
    op.create_index("ix_sessions_cwd_updated", "sessions", ["cwd", "updated", "number"])
    op.create_index("ix_sessions_updated", "sessions", ["updated", "number"])
    op.create_table(
        "messages",
        Column("id", Number, primary_key=True, autoincrement=True),
        Column("session", Number, ForeignKey("sessions.number"), nullable=False),
        Column("parent", Number, ForeignKey("messages.id")),
        Column("at", BigInteger, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("body", Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_messages_session", "messages", ["session", "id"])
    op.create_index("ix_messages_parent", "messages", ["parent"])
    op.create_table(
        "blobs",
        Column("hash", Digest, primary_key=True),
        Column("data", LargeBinary, nullable=False),
    )
    op.create_table(
        "links",
        Column("message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
        Column("blob", Digest, ForeignKey("blobs.hash"), primary_key=True),
    )
    op.create_index("ix_links_blob", "links", ["blob"])
    op.create_table(
        "drafts",
        Column(
            "session", Number, ForeignKey("sessions.number", ondelete="CASCADE"), primary_key=True, autoincrement=False
        ),
        Column("at", BigInteger, nullable=False),
        Column("body", Text, nullable=False),
    )
    op.create_table(
        "prompts",
        Column("id", Number, primary_key=True, autoincrement=True),
        Column("name", Text, nullable=False),
        Column("number", Integer, nullable=False),
        Column("hash", Digest, nullable=False),
        Column("template", Text, nullable=False),
        Column("variables", Text, nullable=False),
        Column("first_seen", BigInteger, nullable=False),
        UniqueConstraint("name", "hash"),
        UniqueConstraint("name", "number"),
    )
    op.create_table(
        "renders",
        Column("message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
        Column("session", Number, ForeignKey("sessions.number"), nullable=False),
        Column("prompt", Number, ForeignKey("prompts.id"), nullable=False),
        Column("purpose", String(32), nullable=False),
        Column("variables", Text, nullable=False),
        Column("text", Digest, ForeignKey("blobs.hash"), nullable=False),
        Column("at", BigInteger, nullable=False),
    )
    op.create_index("ix_renders_prompt", "renders", ["prompt"])
    op.create_index("ix_renders_session", "renders", ["session"])
    op.create_index("ix_renders_text", "renders", ["text"])
    op.create_table(
        "calls",
        Column("id", String(64), primary_key=True),
        Column("session", Number, ForeignKey("sessions.number"), nullable=False),
        Column("purpose", String(32), nullable=False),
        Column("render", Number, ForeignKey("renders.message", ondelete="SET NULL")),
        Column("model", Text, nullable=False),
        Column("endpoint", Text, nullable=False),
        Column("crow", String(32), nullable=False),
        Column("started", BigInteger, nullable=False),
        Column("first", Float),
        Column("total", Float),
        Column("stop_reason", Text),
        Column("error", Text),
        Column("usage", Text),
        Column("input", Integer),
        Column("output", Integer),
        Column("cached", Integer),
        Column("cost", Float),
        Column("currency", String(8)),
        Column("head", Digest, ForeignKey("blobs.hash"), nullable=False),
        Column("tools", Digest, nullable=False),
        Column("sampling", Text, nullable=False),
        Column("before", String(64)),
        Column("messages", Text, nullable=False),
        Column("digest", Digest, nullable=False),
    )
    op.create_index("ix_calls_session", "calls", ["session", "started"])
    op.create_index("ix_calls_head", "calls", ["head"])
    op.create_index("ix_calls_render", "calls", ["render"])
    op.create_table(
        "decisions",
        Column("number", Number, primary_key=True, autoincrement=False),
        Column("at", BigInteger, nullable=False),
        Column("session", String(64), nullable=False),
        Column("call", Text, nullable=False),
        Column("tool", Text, nullable=False),
        Column("kind", String(16), nullable=False),
        Column("verdict", String(16), nullable=False),
        Column("by", Text, nullable=False),
        Column("scope", Text, nullable=False),
        Column("arguments", Digest, nullable=False),
        Column("result", Digest, nullable=False),
        Column("files", Text, nullable=False),
        Column("previous", Digest, nullable=False),
        Column("hash", Digest, nullable=False),
    )
    op.create_index("ix_decisions_session", "decisions", ["session"])
    search.create(op.get_bind())
