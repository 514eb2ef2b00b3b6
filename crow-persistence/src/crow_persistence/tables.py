"""The tables. Rows are not changed once written, except sessions, drafts, model calls and evaluations that end, and the
settings of searches for a prompt.

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
Number = BigInteger().with_variant(Integer, "sqlite")  # the type that SQLite increments automatically
Digest = String(64)

sessions = Table(
    "sessions",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),  # 128 random bits; the id that clients use
    Column("cwd", Text, nullable=False),
    Column("roots", Text, nullable=False),  # JSON list of absolute folders; the first is cwd
    Column("title", Text),
    Column("created", BigInteger, nullable=False),
    Column("updated", BigInteger, nullable=False),
    Column("options", Text, nullable=False),  # JSON object: option id to chosen value
    Column("head", Number),  # the messages row at the end of its path; no foreign key, as messages refer to sessions
    Column("origin", String(64)),  # id of the session that it was forked from
    Column("owner", Text),  # the process that has the session open: "machine:pid:started:random"
    Column("beat", BigInteger),  # time of the owner's last heartbeat, by the database's clock
    Column("deleted", BigInteger),  # time of deletion; of its messages, only those that forks use are left
    Column(
        "copied", BigInteger
    ),  # time when entries were last written without model calls: its database was lost, or they were imported
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
    ),  # the previous entry; for the first entry of a fork, a row of another session
    Column("at", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),  # a message's role, or a marker's kind
    Column("body", Text, nullable=False),  # the entry of the log as JSON, with large strings stored in blobs
    sqlite_autoincrement=True,  # ids are never reused
)
Index("ix_messages_session", messages.c.session, messages.c.id)
Index("ix_messages_parent", messages.c.parent)

blobs = Table(
    "blobs",  # images, file contents, tool lists, rendered texts: each is stored once
    metadata,
    Column("hash", Digest, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

links = Table(
    "links",  # the blobs that a message's body refers to
    metadata,
    Column("message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True),
    Column("blob", Digest, ForeignKey("blobs.hash"), primary_key=True),
)
Index("ix_links_blob", links.c.blob)

drafts = Table(
    "drafts",  # the beginning of a reply that is still streaming; deleted when the complete reply is written
    metadata,
    Column("session", Number, ForeignKey("sessions.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)

draft_parts = Table(
    "draft_parts",  # the later parts of that reply, so that no part is written twice
    metadata,
    Column("session", Number, ForeignKey("drafts.session", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),  # 1, 2, 3 …
    Column("body", Text, nullable=False),  # JSON object: the texts that are added to those of the reply
)

prompts = Table(
    "prompts",  # every version of every template that was used
    metadata,
    Column("id", Number, primary_key=True, autoincrement=True),
    Column("name", Text, nullable=False),
    Column("number", Integer, nullable=False),  # version number, per name: 1, 2, 3 …
    Column("hash", Digest, nullable=False),  # of the template
    Column("template", Text, nullable=False),
    Column("variables", Text, nullable=False),  # JSON list of the names of its variables
    Column("first_seen", BigInteger, nullable=False),
    UniqueConstraint("name", "hash"),
    UniqueConstraint("name", "number"),
)

renders = Table(
    "renders",  # texts that prompts were rendered to
    metadata,
    Column(
        "message", Number, ForeignKey("messages.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    ),  # the marker
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
    "calls",  # model calls: requests to a model and their outcomes
    metadata,
    Column("id", String(64), primary_key=True),  # id of the reply
    Column("session", Number, ForeignKey("sessions.number"), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column(
        "render", Number, ForeignKey("renders.message", ondelete="SET NULL")
    ),  # the render of its own prompt, or of the system prompt
    Column("model", Text, nullable=False),  # name of the model at the endpoint
    Column("endpoint", Text, nullable=False),  # address without the parts that may be secret
    Column("crow", String(32), nullable=False),  # version of crow
    Column("started", BigInteger, nullable=False),
    Column("first", Float),  # milliseconds until the first delta
    Column("total", Float),  # milliseconds until the end, without pauses by crow; null after a crash
    Column("stop_reason", Text),
    Column("error", Text),
    Column("usage", Text),  # JSON, as the provider reported it
    Column("input", Integer),  # tokens
    Column("output", Integer),
    Column("cached", Integer),
    Column("cost", Float),
    Column("currency", String(8)),
    # The body that was sent is `head` with `messages` in its list:
    Column("head", Digest, ForeignKey("blobs.hash"), nullable=False),  # the body with an empty list of messages
    Column("tools", Digest, nullable=False),  # digest of the tool list as JSON
    Column("sampling", Text, nullable=False),  # JSON: every other key of the body but model, tools and messages
    Column("before", String(64)),  # the model call whose messages it begins with
    Column(
        "messages", Text, nullable=False
    ),  # JSON: [number of those messages, then for each further one a reference …]
    Column("digest", Digest, nullable=False),  # digest of the whole body as JSON
    Column("reply", Number),  # the messages row of the reply; null if none was appended to the log
)
Index("ix_calls_session", calls.c.session, calls.c.started)
Index("ix_calls_head", calls.c.head)
Index("ix_calls_render", calls.c.render)

decisions = Table(
    "decisions",  # permission decisions and tool results: append-only, each row holds the hash of the one before
    metadata,
    Column("number", Number, primary_key=True, autoincrement=False),  # 1, 2, 3 … without gaps
    Column("at", BigInteger, nullable=False),
    Column("session", String(64), nullable=False),  # the session's id; stays when the session is deleted
    Column("call", Text, nullable=False),  # the tool call's id
    Column("tool", Text, nullable=False),
    Column(
        "kind", String(16), nullable=False
    ),  # "decision" before the tool runs, "result" after; "repair" of a broken chain
    Column("verdict", String(16), nullable=False),  # allow or deny; for a result, completed or failed
    Column("by", Text, nullable=False),  # the person or the rule that decided
    Column("scope", Text, nullable=False),  # how long the decision applies
    Column("arguments", Digest, nullable=False),  # digest of the arguments that were executed
    Column("result", Digest, nullable=False),  # digest of the tool's result; "" in a decision
    Column(
        "files", Text, nullable=False
    ),  # JSON list of {path, before, after}: digests of the files' contents, null for no file
    Column("previous", Digest, nullable=False),
    Column("hash", Digest, nullable=False),
    Column("key_id", String(16)),  # of the key that signed the row; null in rows from before there were keys
    Column("mac", Digest),  # HMAC-SHA256 of the hash with that key
)
Index("ix_decisions_session", decisions.c.session)

evaluations = Table(
    "evaluations",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("dataset", Text, nullable=False),  # the file or folder of the tasks, or the name of a suite
    Column("settings", Text, nullable=False),  # JSON object: tasks with their digests, prompts, models, repetitions …
    Column("created", BigInteger, nullable=False),
    Column("ended", BigInteger),  # time when the last cell had its outcome; null before
)

cells = Table(
    "cells",  # the outcome of one run of one task by one prompt and one model; an error is replaced by a later outcome
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("evaluation", Number, ForeignKey("evaluations.number", ondelete="CASCADE"), nullable=False),
    Column("task", Text, nullable=False),
    Column("variant", Integer, nullable=False),  # number of the combination of prompt and model, from 0
    Column("repetition", Integer, nullable=False),  # 1, 2, 3 …
    Column("session", String(64), nullable=False),  # the session's id; stays when the session is deleted
    Column("state", String(16), nullable=False),  # passed, failed or error
    Column("started", BigInteger, nullable=False),
    Column("ended", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),  # JSON object: the checks, the answer, the error …
    Column("requests", Integer, nullable=False),
    Column("input", Integer, nullable=False),  # tokens
    Column("output", Integer, nullable=False),
    Column("cached", Integer, nullable=False),
    Column("cost", Float),
    Column("currency", String(8)),
    Column("first", Float),  # milliseconds until the first delta of the first model call
    Column("total", Float),  # milliseconds of the turn
    UniqueConstraint("evaluation", "task", "variant", "repetition"),
)
Index("ix_cells_session", cells.c.session)
