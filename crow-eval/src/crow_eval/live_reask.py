"""Ask stored sessions again with tools that run: in a copy of the folder as it was when the session began.

The user's prompts are sent again, turn by turn, to a session of its own in the copy. While its replies call the same
tools with the same arguments as the stored ones, they agree; the session goes on after the first that does not.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import msgspec
from crow_agent.agent import Agent
from crow_agent.budget import Budget
from crow_agent.errors import AgentError
from crow_core.acp.schema import ContentBlock
from crow_core.app import Crow
from crow_core.content import to_blocks
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, find_prompts, marker_kind
from crow_core.messages.notes import Notes
from crow_core.messages.worktree import WorkTree, find_recorded
from crow_core.models.chat_model import ChatModel
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_extensions.folder_state import FolderStateError, check_restorable, restore_state
from crow_extensions.spending import Spending
from crow_persistence.database import Database
from crow_persistence.loader import find_session_by_id

from crow_eval.compared_prompts import PromptVersion, check_prompt, replace_prompts
from crow_eval.meter import Meter, SessionCounts, measure
from crow_eval.reask import (
    END_KIND,
    KIND,
    Changes,
    Departure,
    Reasked,
    StoredSession,
    add_sums,
    match_calls,
    read_log,
    strip,
)
from crow_eval.runs import run_together

OTHER_FOLDER = (
    "Not run: {} is the folder of the session that is asked again, and this one works in a copy of it. The copy is {}."
)


@dataclass(frozen=True)
class LiveSettings:
    """The settings of `crow reask --tools live`, the same for all its sessions."""

    changes: Changes
    mode: Any
    max_requests: int
    """The most model calls of a session."""
    env: Mapping[str, str]
    budget: Budget | None = None


def find_faults(sessions: Sequence[StoredSession]) -> list[str]:
    """Return a sentence for each session whose start cannot be restored."""
    return [f"Session {one.id[:8]} cannot be restored: {why}." for one in sessions if (why := find_fault(one))]


def find_fault(stored: StoredSession) -> str:
    """Return why the start of a session cannot be restored; empty if it can be."""
    if any(marker_kind(entry) == "imported" for entry in stored.log):
        return "it is imported from another agent, so its start is not known"
    if (tree := find_recorded(stored.log)) is None:
        return "its start was not recorded, as it was in no git work tree, or crow did not record it then"
    try:
        check_restorable(tree)
    except FolderStateError as error:
        return str(error)
    return ""


async def reask_all_live(
    database: Database,
    sessions: Sequence[StoredSession],
    choose_model: Callable[[StoredSession], str],
    settings: LiveSettings,
    at_once: int,
    report: Callable[[Reasked], None],
) -> list[Reasked]:
    """Ask sessions again, `at_once` at a time, and return the outcomes in their order.

    A session that was asked again to its end is not asked once more with the same changes. `choose_model` returns the
    name of a session's model. Raises ConfigError, before anything is asked, for a prompt that cannot be rendered;
    StoreError.
    """
    for stored in sessions:
        if prompt := find_prompt(stored, settings.changes):
            check_prompt(PromptVersion(f"{prompt.name} {prompt.version[:8]}", "system", prompt.template))
    outcomes: dict[str, Reasked] = {}
    by_id = {stored.id: stored for stored in sessions}
    models = {stored.id: choose_model(stored) for stored in sessions}
    waiting = iter(by_id.values())

    async def work() -> None:
        for stored in waiting:
            outcomes[stored.id] = outcome = await reask_live(database, stored, models[stored.id], settings)
            report(outcome)

    await run_together(work() for _ in range(at_once))
    return [outcomes[id] for id in by_id]


def find_prompt(stored: StoredSession, changes: Changes) -> Prompt | None:
    """Return the template of the system prompt: that of the changes, else the stored one; None if none is stored."""
    if changes.prompt:
        return Prompt("system", changes.prompt.template)
    for entry in reversed(stored.log):
        match entry.get("crow"):
            case {"kind": "render", "purpose": "system", "template": str(template)}:
                return Prompt("system", template)
            case _:
                pass
    return None


async def reask_live(database: Database, stored: StoredSession, model: str, settings: LiveSettings) -> Reasked:
    """Ask one session again in a copy of its folder. A failure is in the outcome.

    A session that did not reach its end begins anew, with an id of its own: the folder that it worked in is gone.
    """
    tree = find_recorded(stored.log)
    assert tree is not None
    error, attempt = "", 0
    while True:
        id, attempt = stored.derive_id(settings.changes, f"live {attempt}"), attempt + 1
        log = await asyncio.to_thread(read_log, database, id)
        if not log or any(marker_kind(entry) == END_KIND for entry in log):
            break
    if not log:
        try:
            with TemporaryDirectory(prefix="crow-reask-", ignore_cleanup_errors=True) as folder:
                await ask_in(await asyncio.to_thread(Path(folder).resolve), stored, tree, id, model, settings)
        except (AgentError, FolderStateError, OSError) as failure:
            error = str(failure)
        log = await asyncio.to_thread(read_log, database, id)
    return await asyncio.to_thread(read_outcome, database, stored, tree, id, log, error)


async def ask_in(
    folder: Path, stored: StoredSession, tree: WorkTree, id: str, model: str, settings: LiveSettings
) -> None:
    """Send the prompts of a session to a new one in a copy of its folder.

    Raises AgentError, FolderStateError, OSError.
    """
    (top := folder / (Path(tree.top).name or "root")).mkdir()
    cwd = await asyncio.to_thread(restore_state, tree, top)
    meter, opened = Meter(), dict[str, Session]()
    prompt, changes = find_prompt(stored, settings.changes), settings.changes
    notes: Notes = {"kind": KIND, "origin": stored.id, **changes.describe(), "tools": "live"}

    def use(crow: Crow) -> None:
        if prompt:
            crow.use(replace_prompts, prompts={"system": prompt})
        crow.use(measure, meter=meter)
        crow.use(keep_out, originals=find_paths(stored, tree), copy=str(top))
        set_parameters(crow, changes.sampling)

        @crow.session_start
        def begin(session: Session) -> None:
            if session.id == id:
                opened[id] = session
                session.log.append({"crow": notes.copy()})
                session.log.title = f"Asked again: {stored.title}" if stored.title else ""

    to_copy = partial(replace_paths, find_paths(stored, tree), str(top))
    async with Agent(model, mode=settings.mode, extensions=[use], budget=settings.budget, env=settings.env) as agent:
        session = await agent.make_session(id, cwd)
        counts = meter.counts[id] = SessionCounts(Spending(requests=settings.max_requests))
        denied: list[str] = []
        try:
            for at in find_prompts(stored.log):
                result = await session.prompt(map_texts(to_blocks(stored.log[at]), to_copy))
                denied += [call.title for call in result.denied]
                if counts.reached:
                    break
            end: Notes = {"kind": END_KIND, "stopped": counts.reached, "denied": denied}
            opened[id].log.append({"crow": end})
            await opened[id].log.written()
        finally:
            await session.close()


def find_paths(stored: StoredSession, tree: WorkTree) -> list[str]:
    """Return the paths of a session's top folder: git's, and the one in use, which may lead there by a link."""
    used = stored.cwd.removesuffix(f"/{tree.folder}") if tree.folder else stored.cwd
    return list(dict.fromkeys([tree.top, used]))


def keep_out(crow: Crow, *, originals: Sequence[str], copy: str) -> None:
    """Refuse tool calls that name the original folder, in every mode."""

    @crow.before_tool
    def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
        found: list[str] = []
        map_values(tool_call.arguments, lambda text: leads_to(originals, text) and found.append(text))
        return ToolResult.error(OTHER_FOLDER.format(originals[0], copy)) if found else None


def leads_to(originals: Sequence[str], text: str) -> bool:
    """Return whether a text contains one of the original paths, or is a path that leads to the first by links."""
    if replace_paths(originals, "", text) != text:
        return True
    return os.path.isabs(text) and "\0" not in text and Path(os.path.realpath(text)).is_relative_to(originals[0])


def set_parameters(crow: Crow, sampling: Mapping[str, Any]) -> None:
    """Set parameters of every request to the models of an app; None removes one."""
    for model in crow.models.values():
        if isinstance(model, ChatModel):
            given = {**model.parameters, **sampling}
            model.parameters = {name: value for name, value in given.items() if value is not None}


def replace_paths(old: Sequence[str], new: str, text: str) -> str:
    """Replace the paths of a folder in a text, but not where they are the beginning of another name."""
    for path in old:
        text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-])", lambda _: new, text)
    return text


def map_texts(blocks: Sequence[ContentBlock], change: Callable[[str], str]) -> list[ContentBlock]:
    """Change the texts and addresses of content blocks."""

    def map_block(value: Any, key: str = "") -> Any:
        match value:
            case str() if key in ("text", "uri"):
                return change(value)
            case dict():
                return {name: map_block(inner, name) for name, inner in cast(dict[str, Any], value).items()}
            case list():
                return [map_block(inner) for inner in cast(list[Any], value)]
            case _:
                return value

    return msgspec.convert(map_block(msgspec.to_builtins(list(blocks))), list[ContentBlock])


def map_values(value: Any, see: Callable[[str], object]) -> None:
    """Call a function with each string of a JSON value."""
    match value:
        case str():
            see(value)
        case dict():
            for inner in cast(dict[str, Any], value).values():
                map_values(inner, see)
        case list():
            for inner in cast(list[Any], value):
                map_values(inner, see)
        case _:
            pass


def read_outcome(
    database: Database, stored: StoredSession, tree: WorkTree, id: str, log: Sequence[Message], error: str
) -> Reasked:
    """Compare a session with the one that asked it again, whose paths are those of the copy."""
    outcome = Reasked(stored.id, id if log else "", len(stored.requests), error=error)
    with database.begin_read() as connection:
        row = find_session_by_id(connection, id)
    copy = row.cwd.removesuffix(f"/{tree.folder}") if row and tree.folder else row.cwd if row else ""
    old = [(count_turns(stored.log, one.entry), stored.log[one.entry]) for one in stored.requests]
    new = [(count_turns(log, at), entry) for at, entry in enumerate(log) if entry.get("role") == "assistant"]
    for number in range(max(len(old), len(new))):
        nothing: tuple[int, Message] = (0, {"role": "assistant", "content": ""})
        turn, was = old[number] if number < len(old) else nothing
        was = change_arguments(was, partial(replace_paths, find_paths(stored, tree), tree.top))
        turn_now, reply = new[number] if number < len(new) else nothing
        now = change_arguments(reply, partial(replace_paths, [copy], tree.top)) if copy else reply
        if turn != turn_now or match_calls(was, now) is None:
            if number < len(new):
                outcome.departure = Departure(number + 1, strip(was), strip(now))
                outcome.went_on = len(new) - number - 1
            break
        outcome.agreed += 1
        outcome.reworded += (was.get("content") or "") != (now.get("content") or "")
    outcome.not_asked = max(0, outcome.requests - outcome.agreed - (outcome.departure is not None))
    for entry in log:
        if marker_kind(entry) == END_KIND:
            notes = entry.get("crow", {})
            outcome.stopped, outcome.denied = notes.get("stopped", ""), len(notes.get("denied", []))
    add_sums(database, outcome, [one.model_call for one in stored.requests if one.model_call])
    return outcome


def count_turns(log: Sequence[Message], at: int) -> int:
    """Return the number of prompts before an entry."""
    return len(find_prompts(log[:at]))


def change_arguments(reply: Message, change: Callable[[str], str]) -> Message:
    """Change the arguments of a reply's tool calls."""
    calls = [
        {**use, "function": {**use["function"], "arguments": change(use["function"]["arguments"])}}
        for use in reply.get("tool_calls", [])
    ]
    return cast(Message, {**reply, "tool_calls": calls}) if calls else reply
