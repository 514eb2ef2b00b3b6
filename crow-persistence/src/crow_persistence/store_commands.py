"""The slash commands that read the store, /calls, /audit, /search and /prompts, and those that rate an answer.

Their answers are for the user: the model does not read them. Each is cut at MAX_LENGTH, and its secrets are masked.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from crow_core.errors import PromptError, StoreError
from crow_core.masking import mask
from crow_core.models.chat_model import encode_json
from crow_core.session.prompts import Prompt
from crow_core.session.session import Command, Session
from crow_core.text import to_line
from crow_system.shortening import describe_left_out, leave_out

from crow_persistence.commits import GroupCommit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from crow_persistence.audit import AuditRow

Answer = Callable[["Connection", Session, str], str]
"""Makes the answer of a command from the words after its name. Raises StoreError."""

RATINGS = ("good", "bad")

MAX_LENGTH = 20_000
"""Characters of an answer."""
MAX_ROWS = 20
"""Rows of a list."""
MAX_CELL = 200
"""Characters of a cell."""


def make_commands(commits: GroupCommit) -> Sequence[Command]:
    """Make the commands."""

    def make(name: str, description: str, answer: Answer, hint: str = "") -> Command:
        async def run(session: Session, words: str) -> str:
            await session.log.written()
            secrets = session.secrets

            def read(store: Any) -> str:
                with store.database.begin_read() as connection:
                    return answer(connection, session, words)

            try:
                return cut(hide(await commits.read(read), secrets))
            except StoreError as error:
                return str(error)

        return Command(name, description, run, hint=hint)

    show = make("prompts", "", show_prompts)

    async def answer_prompts(session: Session, words: str) -> Any:
        if words.startswith("use "):
            return await use_version(commits, session, words.removeprefix("use ").strip())
        return await show.run(session, words)

    return [
        make("calls", "The requests to the model: a list, or one exactly as it was sent", show_calls, "[last|ID]"),
        make(
            "audit",
            "The decisions about permissions in this session, or whether anybody changed them",
            show_audit,
            "[all]",
        ),
        make("search", "Search the sessions of all folders", search_all, "TEXT"),
        Command(
            "prompts",
            "The versions of the prompts of this session, and what changed in each; or use another version",
            answer_prompts,
            hint="[NAME | use NAME@N]",
        ),
        *(
            Command(name, f"Rate the last answer as {name}, with a word why", rate(name), hint="[WHY]")
            for name in RATINGS
        ),
    ]


def rate(rating: str) -> Callable[[Session, str], Awaitable[str]]:
    """Make a command that appends a marker with a rating of the last reply, and so of its prompt version."""

    async def run(session: Session, words: str) -> str:
        replies = [entry for entry in session.view.entries() if entry.get("role") == "assistant"]
        if not replies:
            return "There is no answer to rate yet."
        reply = replies[-1].get("crow", {}).get("id", "")
        session.log.append({"crow": {"kind": "rating", "reply": reply, "rating": rating, "why": words}})
        await session.log.written()
        return f"The last answer is rated as {rating}. `crow prompts stats` sums the ratings for each prompt version."

    return run


async def use_version(commits: GroupCommit, session: Session, reference: str) -> str:
    """Use a stored version of a prompt in a session, from the next request on, as long as it is open."""
    from crow_persistence.prompt_versions import find_version, render_again

    def read(store: Any) -> Any:
        with store.database.begin_read() as connection:
            version = find_version(connection, reference)
            render_again(connection, version)
            return version

    await session.log.written()
    try:
        version = await commits.read(read)
    except (StoreError, PromptError) as error:
        return f"{to_cell(reference)} cannot be used: {error}"
    if version.name not in session.prompts.templates:
        return f"This session has no prompt {to_cell(version.name)}."
    session.prompts.templates[version.name] = Prompt(version.name, version.template)
    if version.name == "system":
        session.prompts.system = None  # it is rendered again for the next request
    return f"{to_cell(version.name)}@{version.number} is used in this session from the next request on."


def hide(text: str, secrets: Collection[str]) -> str:
    """Mask the known secrets in a text, and what looks like one."""
    from crow_core.redaction import redact_text  # rarely needed

    return redact_text(str(mask(text, secrets)))


def cut(text: str) -> str:
    """Cut a text at MAX_LENGTH, and close a code block that is cut."""
    if len(text) <= MAX_LENGTH:
        return text
    fences = re.findall(r"(?m)^`{3,}", text)
    end = f"\n{fences[0]}" if fences else ""
    return f"{text[:MAX_LENGTH]}{end}\n\n{describe_left_out(len(text) - MAX_LENGTH, len(text))}"


def to_code(text: str, language: str = "") -> str:
    """Convert a text to a Markdown code block, whose fence is longer than every one in the text."""
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"


def to_cell(value: Any) -> str:
    """Convert a value to a cell of a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", to_line(str(value))[:MAX_CELL])


def to_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Convert rows to a Markdown table."""
    lines = [heads, ["---"] * len(heads), *([to_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_time(at: int) -> str:
    """Format milliseconds since 1970 as local time."""
    return f"{datetime.fromtimestamp(at / 1000, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def show_calls(connection: "Connection", session: Session, words: str) -> str:
    """List the model calls of a session, or show the request of one."""
    from crow_core.redaction import redact_data

    from crow_persistence.loader import find_session_by_id
    from crow_persistence.requests import find_model_call, list_model_calls, rebuild_request

    row = find_session_by_id(connection, session.id)
    found: Sequence[Any] = list_model_calls(connection, row.number, MAX_ROWS) if row is not None else []
    if not found:
        return "The model has not been asked in this session."
    if not words:
        rows = [
            (
                one.id[:8],
                to_time(one.started),
                one.purpose,
                "" if one.input is None else f"{one.input:,}",
                "" if one.cached is None else f"{one.cached:,}",
                "" if one.output is None else f"{one.output:,}",
                "" if one.cost is None else f"{one.cost:.4f} {one.currency}",
                f"failed: {one.error}" if one.error else one.model,
            )
            for one in found
        ]
        heads = ("id", "started", "purpose", "in", "cached", "out", "cost", "model")
        return f"{to_table(heads, rows)}\n\n`/calls last` or `/calls ID` shows the request."
    wanted: Any = found[0] if words == "last" else find_model_call(connection, words)
    body, exact = rebuild_request(connection, wanted.id)
    tokens = "" if wanted.input is None else f", {wanted.input:,} tokens in, {wanted.cached or 0:,} of them cached"
    how = "as it was sent" if exact else "not quite as it was sent: a secret in it was masked, or a part is lost"
    text = format_request(redact_data(mask(body, session.secrets)))
    head = f"The request of {to_time(wanted.started)} to {to_cell(wanted.model)}, {how}{tokens}."
    return f"{head}\n\n{to_code(leave_out(text, MAX_LENGTH - 1000, tail=MAX_LENGTH * 2 // 3), 'json')}"


def format_request(body: Any) -> str:
    """Format a request over several lines, for reading."""
    return msgspec.json.format(encode_json(body), indent=2).decode("utf-8", "replace")


def show_audit(connection: "Connection", session: Session, words: str) -> str:
    """List the decisions about permissions, of the session or of all."""
    from crow_persistence.audit import list_decisions
    from crow_persistence.audited_calls import describe_calls

    if words not in ("", "all"):
        return (
            f"/audit {words} is not understood. `/audit` lists those of this session, `/audit all` the latest of all."
        )
    found = list_decisions(connection, "" if words else session.id, MAX_ROWS)
    if not found:
        return "Nothing has been decided in this session yet."
    about = describe_calls(connection, found)
    lines = [describe_decision(one, text) for one, text in zip(found, about, strict=True)]
    return "\n".join(lines) + "\n\n`crow audit verify`, in a terminal, checks that nobody has changed them."


def describe_decision(row: "AuditRow", about: str) -> str:
    """Describe a decision in an entry of a Markdown list: a table has no room for a command and a reason."""
    tool, by = to_cell(row["tool"]), to_cell(f"{row['by']} ({row['scope']})" if row["scope"] else row["by"])
    subject = f"{tool}: {to_cell(about)}" if about else tool
    return f"- #{row['number']}, {to_time(row['at'])}, **{to_cell(row['verdict'])}** {subject} · by {by}"


def search_all(connection: "Connection", session: Session, words: str) -> str:
    """Search the messages of the sessions of all folders."""
    from crow_persistence.search import MATCH_END, MATCH_START, search

    if not words:
        return 'Name the words: `/search docker compose`, or `/search "docker compose"` for a phrase.'
    hits = search(connection, words, cwd="", limit=MAX_ROWS)

    def lines() -> Iterator[str]:
        for hit in hits:
            who = hit.tool or {"user": "you", "assistant": "crow"}.get(hit.kind, hit.kind)
            here = "this session" if hit.session == session.id else f"session {hit.session[:8]} in {to_cell(hit.cwd)}"
            snippet = to_cell(hit.snippet).replace(MATCH_START, "**").replace(MATCH_END, "**")
            yield f"- {to_time(hit.at)}, {to_cell(who)}, {here} ({to_cell(hit.title or 'no title')}): {snippet}"

    return "\n".join(lines()) or f"No stored message holds all of these words: {to_cell(words)}."


def show_prompts(connection: "Connection", session: Session, words: str) -> str:
    """Tell which versions of prompts speak in a session, and what each changed."""
    from crow_persistence.prompt_versions import diff_versions, find_version, list_session_versions

    used: list[Any] = [one for one in list_session_versions(connection, session.id) if words in ("", one.name)]
    if not used:
        about = f"the prompt {to_cell(words)}" if words else "a prompt"
        return f"Nothing made from {about} has been sent in this session yet. `/prompt` shows what will be."
    parts: list[str] = []
    for one in used:
        version: Any = find_version(connection, f"{one.name}@{one.number}")
        since = f"version {one.number}, known since {to_time(version.first_seen)}"
        parts.append(f"**{to_cell(one.name)}**, {since}, for {to_cell(one.purpose)}.")
        if one.number > 1:
            before = f"{one.name}@{one.number - 1}"
            parts.append(to_code(diff_versions(connection, before, f"{one.name}@{one.number}"), "diff"))
        else:
            parts.append("It is the first version.")
    return "\n\n".join(parts)
