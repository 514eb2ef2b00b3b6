"""Taint: a session that has read private data and untrusted content asks before data can leave.

An extension: `crow.use(permissions).use(taint)`. Use it right after `permissions`.

A page, a result of an MCP server or a file of a repository can hold instructions for the model, such as to send a key
away. So from the moment when a session has read both of these, every exit is asked about, whatever is allowed:

- *untrusted content*: a web page, results of a web search, an answer of an MCP server or another agent, a file or a
  command's output in an untrusted folder;
- *private data*: results of local tools with a secret in them; the files, variables and commands of
  private_data.toml; the user's `private` patterns; paths in rules that deny or ask. It counts whether a tool or a
  command reads it, a prompt attaches it, or a search of stored sessions finds a session that has read such.

Exits are `fetch`, `web_search`, calls of MCP servers with arguments, other agents and the commands of exits.toml
(network commands, `git push` …). Code in a command line, input for a running program and unparsable commands are exits,
too. The first command that runs the folder's own code (`pytest`, `make`) afterwards is asked about, too, once.

The question shows what would leave, and its answer holds for that call. No rule and no earlier answer skips it. Without
anybody to ask, the call is denied. In the mode `yolo` it runs, and a notice and a marker `exit` say so.

The markers `private` and `untrusted` in the log keep the taint after a load, a fork, a compaction, and a rewind to
before the reading, since copies may remain. A sub-agent has the taint of its parent, and passes its own on to it. A
fork from before the reading starts without it.

It does not cover:

- the endpoints of the models, which receive everything that a model reads, also the other model of a sub-agent;
- text, links and images of an answer, which a client may load;
- what an MCP server asks for by itself (sampling, forms);
- private data that no name shows and no result: `python send.py`, a program's own settings, an encoding of its own;
- data in the words of a command that is not an exit here, and files that something else synchronizes or uploads;
- code of the folder after the one question about it, and programs that were started before;
- what a session read before this extension was used.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, marker_kind, to_parts
from crow_core.messages.notes import Notes
from crow_core.models.model_call import ModelRequest
from crow_core.redaction import holds_secret
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import show_invisible, to_line
from crow_system.git import may_fetch_objects
from crow_system.shortening import leave_out

from crow_permissions.call_questions import to_question
from crow_permissions.exits import find_exit
from crow_permissions.private_data import find_private_file, is_private_path
from crow_permissions.protected import to_regex
from crow_permissions.review import REACHABLE
from crow_permissions.rules import Rule, parse_rules
from crow_permissions.simple_commands import read_command_line
from crow_permissions.subjects import (
    has_posix_shell,
    is_inside,
    path_from_root,
    relative_path,
    resolve,
    spell_paths,
)

Kind = Literal["private", "untrusted"]
CallKey = tuple[str, str, str]
"""A tool call: its id, its name, and its command, which the user may change."""

SOURCES_LIMIT = 10
"""Sources of a kind that have a marker in the log."""
SHOWN_LIMIT = 3_000
"""Characters of what would leave that a question shows."""
LINES_LIMIT = 2_000
"""Lines of a search's result that are looked at."""
SEARCH = re.compile(r"\b(?:[ef]?grep|rg|ag|ack)\b")
"""A program in a command that prints lines of files behind their names."""
NETWORK = re.compile(r"://|(?<![\w.-])(?:curl|wget|gh|glab|ssh|nc|pull|clone|lynx|w3m)(?![\w-])")
"""Texts in a command line that may bring untrusted content to its output."""
GIT = re.compile(r"(?<![\w.-])git(?![\w.])")
FOLDERS_LIMIT = 20
"""Words of a git command that are looked at as folders."""
RESOURCE = re.compile(r'<resource uri="([^"\n]*)">')
"""The beginning of what a user's message attaches."""


@dataclass(frozen=True)
class Reading:
    """The sources that a tool call reads; "" for none."""

    private: str = ""
    untrusted: str = ""
    in_folder: bool = False
    """True if `untrusted` is a folder that is not trusted. Most are, so it has a marker only together with private
    data."""


@dataclass
class Taint:
    """The taint of a session and of its sub-agents."""

    sources: dict[Kind, list[str]] = field(default_factory=lambda: {"private": [], "untrusted": []})
    has_run_code: bool = False
    """True if the user has allowed a command that runs the folder's code since the session has read both."""
    trusted: dict[tuple[str, ...], Sequence[str]] = field(default_factory=dict[tuple[str, ...], Sequence[str]])
    """The trusted roots among some roots."""
    readings: dict[str, dict[CallKey, Reading]] = field(default_factory=dict[str, dict[CallKey, Reading]])
    """The readings of the calls of each session's last reply, by session and reply."""
    collected: set[tuple[str, CallKey]] = field(default_factory=set[tuple[str, CallKey]])
    """The calls about which a reason was returned to the extension that asks, by session."""
    read_upto: dict[str, int] = field(default_factory=dict[str, int])
    """The number of entries in the logs whose prompts were looked at, by session."""
    rules: Sequence[Rule] = ()
    """The rules whose paths are private."""


TAINT = StateKey[Taint | None]("taint", lambda: None)


def taint(
    crow: Crow,
    *,
    private: Sequence[str] = (),
    rules: Sequence[str] = (),
    own: Sequence[str] = (),
    project: Callable[[str], tuple[Sequence[str], Sequence[str]]] | None = None,
    trusted: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Ask before data leaves, once a session has read private data and untrusted content.

    `private` are patterns of private files, relative to a root of the session, in addition to those of
    private_data.toml. `rules` are the permission rules that deny or ask, whose paths are private, too; `project`
    returns those of a trusted folder. `own` are crow's own files that hold keys or sessions. Raises ValueError for an
    invalid rule.
    """
    patterns, known_rules = [to_regex(pattern) for pattern in private], parse_rules(rules)
    own_folders = tuple(path.rstrip(os.sep) + os.sep for each in own for path in {each, os.path.realpath(each)})

    def get_taint(session: Session) -> Taint:
        if session.parent:
            return get_taint(session.parent)
        known = session.state[TAINT]
        if known is None:
            more = [rule for rules in project(session.cwd) for rule in rules] if project else []
            known = session.state[TAINT] = Taint()
            known.rules = [rule for rule in (*known_rules, *parse_rules(more)) if names_files(rule)]
            for entry in session.log:
                if (kind := to_kind(entry)) and len(known.sources[kind]) < SOURCES_LIMIT:
                    known.sources[kind].append(str(entry.get("crow", {}).get("source", "")))
        return known

    def is_named(session: Session, path: str) -> bool:
        """True if an absolute path is private for the user: by a pattern, a rule, or as a file of crow's own."""
        normal, found = os.path.normpath(path), get_taint(session)
        if (normal + os.sep).startswith(own_folders):
            return True
        if patterns and any(pattern.fullmatch(path_from_root(session, path)) for pattern in patterns):
            return True
        if not found.rules:
            return False
        forms = [form for name in (relative_path(session, path), resolve(session, path)) for form in (name, f"{name}/")]
        return any(fnmatchcase(form, str(rule.pattern)) for rule in found.rules for form in forms)

    def is_private(session: Session, path: str) -> bool:
        full = resolve(session, path)
        return is_private_path(path) or is_private_path(full) or is_named(session, full)

    def find_trusted_roots(session: Session) -> Sequence[str]:
        """Find the roots of a session that are trusted; they are looked up once."""
        known, roots = get_taint(session).trusted, tuple(session.folders.roots)
        if roots not in known:
            known[roots] = [os.path.realpath(root) for root in roots if trusted(Path(root))]
        return known[roots]

    def find_untrusted_folder(session: Session, path: str) -> Reading:
        """Find out whether a path is in no trusted root; then it is untrusted, or the working directory for it."""
        roots = find_trusted_roots(session)
        if not roots:
            return Reading(untrusted=session.cwd, in_folder=True)
        full = resolve(session, path)
        if any(is_below(full, root) for root in roots):
            return Reading()
        return Reading(untrusted=full, in_folder=is_inside(session, full, session.folders.roots))

    def find_untrusted_root(session: Session) -> str:
        """Find a root that is not trusted; "" if all are."""
        readings = (find_untrusted_folder(session, root) for root in session.folders.roots)
        return next((reading.untrusted for reading in readings if reading.untrusted), "")

    def find_reading(session: Session, tool_call: ToolCall) -> Reading:
        """Find what a tool call reads, as far as its arguments show."""
        arguments, kind = tool_call.arguments, tool_call.kind
        if tool_call.tool is None:
            return Reading()
        if tool_call.tool.server is None or not tool_call.tool.server.built_in:
            return Reading(untrusted=f"the MCP tool {tool_call.name}")
        if kind == "fetch":
            return Reading(untrusted=str(arguments.get("url") or tool_call.name))
        if kind == "read" and "uri" in arguments:
            return Reading(untrusted=str(arguments["uri"]))
        if kind == "execute":
            command = arguments.get("command") or arguments.get("input")
            if not isinstance(command, str) or not command:
                return Reading() if "prompt" not in arguments else Reading(untrusted=f"the agent {tool_call.name}")
            start = session.folders.starts.get(tool_call.id) or session.folders.current or session.cwd
            folder = resolve(session, str(arguments.get("cwd") or start))
            spelled, is_posix = spell_paths(tool_call, command), has_posix_shell(tool_call)
            found = find_private_file(spelled, folder, lambda path: is_named(session, path), is_posix=is_posix)
            place = find_untrusted_folder(session, folder)
            return merge(found, place if place.untrusted or not NETWORK.search(command) else Reading(untrusted=command))
        if kind in ("read", "search", "edit") and isinstance(path := arguments.get("path", session.cwd), str):
            name = str(arguments.get("glob") or (arguments.get("pattern") if tool_call.name == "glob" else "") or "")
            reads = arguments.get("command") != "create"
            found = path if reads and is_private(session, path) else name if name and is_private_path(name) else ""
            return merge(found, find_untrusted_folder(session, path))
        return Reading()

    def get_readings(session: Session, tool_call: ToolCall) -> dict[CallKey, Reading]:
        """Return the readings of a call that is about to run, and of the others in the last reply, which may run at the
        same time."""
        reply = next((entry for entry in reversed(session.log) if entry.get("role") == "assistant"), Message())
        readings, id = get_taint(session).readings, f"{session.id} {reply.get('crow', {}).get('id', '')}"
        if id not in readings:
            forget(session)
            uses = reply.get("tool_calls", [])
            calls = [session.toolbox.parse(use) for use in uses] if len(uses) > 1 else []  # else it is the one at hand
            readings[id] = {to_key(call): find_reading(session, call) for call in calls}
        found, key = readings[id], to_key(tool_call)
        if key not in found:  # the only call of a reply, one of a tool of crow's own, or changed by the user
            found[key] = find_reading(session, tool_call)
        return found

    @crow.session_end
    def forget(session: Session) -> None:
        """Forget what is known of a session's last reply."""
        if (found := (session.parent or session).state[TAINT]) is None:
            return
        for old in [old for old in found.readings if old.startswith(session.id)]:
            del found.readings[old]
        found.collected = {key for key in found.collected if key[0] != session.id}

    def mark(session: Session, kind: Kind, source: str, call: str = "") -> None:
        """Append a marker to the log, and to those of the parents, unless they have it."""
        known = get_taint(session).sources[kind]
        if source in known or len(known) >= SOURCES_LIMIT:
            return
        known.append(source)
        notes: Notes = {"kind": kind, "source": source}
        if call:
            notes["call"] = call
        each: Session | None = session
        while each is not None:
            each.log.append({"crow": notes.copy()})
            each = each.parent

    def mark_reading(session: Session, reading: Reading, call: str = "") -> None:
        found = get_taint(session)
        if reading.private:
            mark(session, "private", to_line(reading.private)[:500], call)
            untrusted = reading.untrusted or find_untrusted_root(session)
            reading = Reading(reading.private, untrusted)
        if reading.untrusted and (found.sources["private"] or not reading.in_folder):
            mark(session, "untrusted", to_line(reading.untrusted)[:500], call)

    def find_reason(session: Session, tool_call: ToolCall) -> str:
        """Find out why a tool call must be asked about, with what would leave; "" if it need not."""
        found, readings = get_taint(session), get_readings(session, tool_call).values()
        hosts = session.state[REACHABLE].get(tool_call.id)
        if hosts is not None and not hosts:
            return ""
        private = next(iter(found.sources["private"]), "") or next((r.private for r in readings if r.private), "")
        if not private:
            return ""
        untrusted = next(iter(found.sources["untrusted"]), "")
        untrusted = untrusted or find_untrusted_root(session)  # what is being read cannot have led to this call
        reached = f"it may reach {to_line(', '.join(hosts))}" if hosts else ""
        if not untrusted or not (
            why := reached or find_exit(tool_call) or find_fetch(session, tool_call) or find_code(session, tool_call)
        ):
            return ""
        read = f"This session has read private data ({to_line(private)}) and untrusted content ({to_line(untrusted)})"
        return f"{read}, and this may send data away: {why}.\n\n{describe_call(tool_call)}"

    def find_fetch(session: Session, tool_call: ToolCall) -> str:
        """Find out why a git command may ask a remote for objects that a partial clone lacks."""
        command = tool_call.arguments.get("command")
        if tool_call.kind != "execute" or not isinstance(command, str) or not GIT.search(command):
            return ""
        start = resolve(session, session.folders.starts.get(tool_call.id) or session.folders.current or session.cwd)
        folders = [os.path.join(start, word) for word in command.split()[:FOLDERS_LIMIT] if not word.startswith("-")]
        found = any(may_fetch_objects(folder) for folder in (start, *filter(os.path.isdir, folders)))
        return "git may ask a remote for objects that this partial clone lacks" if found else ""

    def find_code(session: Session, tool_call: ToolCall) -> str:
        """Find out why a command that runs the folder's code must be asked about."""
        command = tool_call.arguments.get("command")
        if tool_call.kind != "execute" or not isinstance(command, str) or get_taint(session).has_run_code:
            return ""
        program = read_command_line(command).find_project_runner()
        return f"{to_line(program)} runs code of this folder (asked once)" if program else ""

    @crow.before_model
    def look_at_prompts(request: ModelRequest, session: Session) -> None:
        """Mark what the user's messages attach, and give the log of a sub-agent the markers of its parent."""
        found = get_taint(session)
        if session.parent and session.id not in found.read_upto:
            for kind, source in sorted(list_markers(session.parent.log) - list_markers(session.log)):
                session.log.append({"crow": {"kind": kind, "source": source}})
        for entry in session.log[found.read_upto.get(session.id, 0) :]:
            if entry.get("role") == "user":
                for reading in find_prompt_readings(session, entry):
                    mark_reading(session, reading)
        found.read_upto[session.id] = len(session.log)

    def find_prompt_readings(session: Session, entry: Message) -> list[Reading]:
        texts = [part["text"] for part in to_parts(entry.get("content")) if part.get("type") == "text"]
        found = [Reading("a secret in a prompt")] if any(map(holds_secret, texts)) else []
        for name in list_attached(texts):
            if "://" in name:
                found.append(Reading(untrusted=name))
            else:
                found.append(merge(name if is_private(session, name) else "", find_untrusted_folder(session, name)))
        return found

    @crow.message
    def keep(session: Session, entry: Message) -> None:
        """Append the markers again behind a rewind that drops them."""
        if marker_kind(entry) != "rewind" or session.parent:
            return
        kept = list_markers(session.view.entries())
        for kind, sources in get_taint(session).sources.items():
            for source in sources:
                if (kind, source) not in kept:
                    session.log.append({"crow": {"kind": kind, "source": source}})

    @crow.must_ask
    def collect(session: Session, tool_call: ToolCall) -> str | None:
        if reason := find_reason(session, tool_call):
            get_taint(session).collected.add((session.id, to_key(tool_call)))
        return reason or None

    @crow.before_tool.last
    async def guard(session: Session, tool_call: ToolCall) -> ToolResult | None:
        """Ask where no other extension does, tell the user in the mode yolo, and mark what is about to be read."""
        found, key = get_taint(session), (session.id, to_key(tool_call))
        if reason := find_reason(session, tool_call):
            mode = session.options.find_mode()
            if mode and mode.get() == "yolo":
                session.log.append({"crow": {"kind": "exit", "call": tool_call.id, "why": reason[:SHOWN_LIMIT]}})
                await session.notice(
                    f"{reason.partition(chr(10))[0]} Yolo runs it: {to_line(tool_call.title)}", "warning"
                )
            elif key not in found.collected and (refusal := await ask(session, tool_call, reason)):
                return refusal
            found.has_run_code |= not find_exit(tool_call)
        mark_reading(session, get_readings(session, tool_call)[key[1]], tool_call.id)
        return None

    @crow.after_tool
    def look_at_result(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        """Mark what a result shows to be read: files that a search found, sessions that a search of sessions found."""
        for source in result.meta.get("crow/private", ()):
            mark(session, "private", to_line(str(source))[:500], tool_call.id)
        for source in result.meta.get("crow/untrusted", ()):
            mark(session, "untrusted", to_line(str(source))[:500], tool_call.id)
        texts = (str(block.get("text", "")) for block in result.content if block.get("type") == "text")
        is_page = tool_call.kind == "fetch"  # it holds examples, and no secrets of the user
        if not get_taint(session).sources["private"] and not is_page and any(map(holds_secret, texts)):
            mark_reading(session, Reading(f"a secret in the result of {tool_call.title}"), tool_call.id)
        if is_search(tool_call):
            for path in list_paths(result):
                if is_private_path(path):
                    mark_reading(session, merge(path, find_untrusted_folder(session, session.cwd)), tool_call.id)


async def ask(session: Session, tool_call: ToolCall, reason: str) -> ToolResult | None:
    """Ask the user about a tool call; return the refusal if it is denied."""
    answer = await session.user.ask_allowed(to_question(session, tool_call, reason))
    if answer.allowed:
        return None
    why = f"{answer.reason}. {reason.partition(chr(10))[0]}"
    refusal = ToolResult.error(f"This was not run: {why} Do not try to reach the same by another way; ask.")
    refusal.meta["crow/denied"] = why
    return refusal


def describe_call(tool_call: ToolCall) -> str:
    """Describe all that a tool call would send, cut at SHOWN_LIMIT."""
    match tool_call.arguments:
        case {"command": str(text)} if tool_call.kind == "execute":
            pass
        case {"url": str(text)} | {"query": str(text)} if tool_call.kind == "fetch":
            pass
        case arguments:
            text = msgspec.json.encode(arguments).decode()
    text = to_line(show_invisible(text))
    return f"{to_line(tool_call.name)}: {leave_out(text, SHOWN_LIMIT, space=' ')}"


def to_key(tool_call: ToolCall) -> CallKey:
    return tool_call.id, tool_call.name, str(tool_call.arguments.get("command", ""))


def merge(private: str, untrusted: Reading) -> Reading:
    """Make a reading of a private file, or of none, and of an untrusted place."""
    return Reading(private, untrusted.untrusted, untrusted.in_folder)


def to_kind(entry: Message) -> Kind | None:
    """Return the kind of a marker of the taint; None for any other entry."""
    match marker_kind(entry):
        case "private" | "untrusted" as kind:
            return kind
        case _:
            return None


def list_markers(log: Sequence[Message]) -> set[tuple[Kind, str]]:
    """List the markers of the taint: kind and source of each."""
    return {(kind, str(entry.get("crow", {}).get("source"))) for entry in log if (kind := to_kind(entry))}


def names_files(rule: Rule) -> bool:
    """True if a rule that denies or asks names files: a pattern with more than wildcards, for a tool that reads."""
    return bool(rule.pattern and rule.pattern.strip("*?/. ")) and any(map(rule.covers, ("file_editor", "grep")))


def is_below(path: str, folder: str) -> bool:
    """True if an absolute path is a folder, or leads into it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def list_attached(texts: Sequence[str]) -> list[str]:
    """List what the texts of a user's message contain: the paths of files, and URIs of resources."""
    names = [name for text in texts for name in RESOURCE.findall(text)]
    return [name if "://" in name else name.partition("#")[0] for name in names]


def is_search(tool_call: ToolCall) -> bool:
    """True if a tool call may find lines of files that it does not name."""
    if tool_call.kind == "search":
        return "pattern" in tool_call.arguments and tool_call.name != "glob"
    command = tool_call.arguments.get("command")
    return tool_call.kind == "execute" and isinstance(command, str) and bool(SEARCH.search(command))


def list_paths(result: ToolResult) -> set[str]:
    """List the words at the beginning of a result's lines that may be paths of files whose lines were found."""
    texts = [str(block.get("text", "")) for block in result.content if block.get("type") == "text"]
    lines = [line for text in texts for line in text.split("\n", LINES_LIMIT)[:LINES_LIMIT]]
    names = {line.partition(":")[0].strip() for line in lines if not line[:1].isdigit()}
    return {name for name in names if not {"/", "."}.isdisjoint(name)}
