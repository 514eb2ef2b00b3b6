"""The tables. What is written is never changed, but for a session's own row, drafts, and calls that come to their end.

Times are whole milliseconds since 1970 (UTC). Digests are SHA-256 in hexadecimal.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_N_label)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
Number = BigInteger().with_variant(Integer, "sqlite")  # what SQLite can count up by itself
Digest = String(64)

sessions = Table(
    "sessions",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),  # 128 random bits; what clients know
    Column("cwd", Text, nullable=False),
    Column("roots", Text, nullable=False),  # JSON list of absolute folders; the first is cwd
    Column("title", Text),
    Column("created", BigInteger, nullable=False),
    Column("updated", BigInteger, nullable=False),
    Column("options", Text, nullable=False),  # JSON object: model, mode and the like, as last chosen
    Column("head", Number),  # the messages row at the tip of its path; no foreign key, as it is written before it
    Column("origin", String(64)),  # id of the session it was forked from
    Column("owner", Text),  # the process that has it open: "machine:pid:started:random"
    Column("beat", BigInteger),  # when the owner was last heard of, by the database's clock
    Column("deleted", BigInteger),  # a tombstone: what it held is gone but for what a fork uses
)
Index("ix_sessions_cwd_updated", sessions.c.cwd, sessions.c.updated, sessions.c.number)
Index("ix_sessions_updated", sessions.c.updated, sessions.c.number)

messages = Table(
    "messages",
    metadata,
    Column("id", Number, primary_key=True, autoincrement=True),
    Column("session", Number, ForeignKey("sessions.number"), nullable=False),
    Column(
        "parent", Number, ForeignKey("messages.id")
    ),  # what came before it; a fork's first points into another session
    Column("at", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),  # a message's role, or a marker's kind
    Column("body", Text, nullable=False),  # the entry of the log as JSON, what is large in it put into blobs
    sqlite_autoincrement=True,  # an id is never used again
)
Index("ix_messages_session", messages.c.session, messages.c.id)
Index("ix_messages_parent", messages.c.parent)

blobs = Table(
    "blobs",  # images, file contents, tool lists, rendered texts: each once
    metadata,
    Column("hash", Digest, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

links = Table(
    "links",  # which blobs a message's body names
    metadata,
    Column("message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
    Column("blob", Digest, ForeignKey("blobs.hash"), primary_key=True),
)
Index("ix_links_blob", links.c.blob)

drafts = Table(
    "drafts",  # a reply while it streams; gone when the whole is written
    metadata,
    Column("session", Number, ForeignKey("sessions.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)

prompts = Table(
    "prompts",  # every version of every template that was ever used
    metadata,
    Column("id", Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False),
    Column("number", Integer, nullable=False),  # 1, 2, 3 … of its name, as they were first seen
    Column("hash", Digest, nullable=False),  # of the template
    Column("template", Text, nullable=False),
    Column("variables", Text, nullable=False),  # JSON list of the names it asks for
    Column("first_seen", BigInteger, nullable=False),
    UniqueConstraint("name", "hash"),
    UniqueConstraint("name", "number"),
)

renders = Table(
    "renders",
    metadata,
    Column(
        "message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),  # its marker
    Column("session", Number, ForeignKey("sessions.number"), nullable=False),
    Column("prompt", Number, ForeignKey("prompts.id"), nullable=False),
    Column("purpose", String(32), nullable=False),  # system, compaction, skill, title, command …
    Column("variables", Text, nullable=False),  # JSON object
    Column("text", Digest, ForeignKey("blobs.hash"), nullable=False),
    Column("at", BigInteger, nullable=False),
)
Index("ix_renders_prompt", renders.c.prompt)
Index("ix_renders_session", renders.c.session)
Index("ix_renders_text", renders.c.text)

calls = Table(
    "calls",  # every request to a model
    metadata,
    Column("id", String(64), primary_key=True),  # of the reply it brought
    Column("session", Number, ForeignKey("sessions.number"), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column(
        "render", Number, ForeignKey("renders.message", ondelete="SET NULL")
    ),  # of its system prompt, or its own prompt
    Column("model", Text, nullable=False),  # what the endpoint calls it
    Column("endpoint", Text, nullable=False),  # without what may be secret in an address
    Column("crow", String(32), nullable=False),  # the version that asked
    Column("started", BigInteger, nullable=False),
    Column("first", Float),  # milliseconds until the first fragment
    Column("total", Float),  # milliseconds of the endpoint until the end; null for one that a crash cut off
    Column("stop_reason", Text),
    Column("error", Text),
    Column("usage", Text),  # JSON, as the provider counted
    Column("input", Integer),  # tokens
    Column("output", Integer),
    Column("cached", Integer),
    Column("cost", Float),
    Column("currency", String(8)),
    # The body as it was sent is `head`, with the messages in their place:
    Column("head", Digest, ForeignKey("blobs.hash"), nullable=False),  # the body with an empty list of messages
    Column("tools", Digest, nullable=False),  # of the tool list as JSON
    Column("sampling", Text, nullable=False),  # JSON: every other key of the body but model, tools and messages
    Column("before", String(64)),  # the call with whose messages it begins
    Column("messages", Text, nullable=False),  # JSON: [how many of those, then a messages row's id or a message each …]
    Column("digest", Digest, nullable=False),  # of the whole body as JSON
)
Index("ix_calls_session", calls.c.session, calls.c.started)
Index("ix_calls_head", calls.c.head)
Index("ix_calls_render", calls.c.render)

decisions = Table(
    "decisions",  # permissions and what came of them: append-only, each row holds the hash of the one before
    metadata,
    Column("number", Number, primary_key=True, autoincrement=False),  # 1, 2, 3 … without a gap
    Column("at", BigInteger, nullable=False),
    Column("session", String(64), nullable=False),  # the session's id; it outlives the session
    Column("call", Text, nullable=False),  # the tool call's id
    Column("tool", Text, nullable=False),
    Column("kind", String(16), nullable=False),  # "decision" before the tool runs, "result" after
    Column("verdict", String(16), nullable=False),  # allow, deny; of a result: completed, failed
    Column("by", Text, nullable=False),  # who, or which rule
    Column("scope", Text, nullable=False),  # how far the answer reaches
    Column("arguments", Digest, nullable=False),  # digest of the arguments as they were executed
    Column("result", Digest, nullable=False),  # digest of what the tool answered; "" in a decision
    Column(
        "files", Text, nullable=False
    ),  # JSON list of {path, before, after}: digests of the files' bytes, null for none
    Column("previous", Digest, nullable=False),
    Column("hash", Digest, nullable=False),
)
Index("ix_decisions_session", decisions.c.session)
