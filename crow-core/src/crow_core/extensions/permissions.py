"""Permissions: whether a tool call runs, is asked about, or is denied, by mode, rules and the user's answers.

An extension like any other: `crow.use(permissions, mode="ask", allow=["terminal:git status"], deny=["terminal:rm *"])`.

`crow_core.settings.rules` says what a rule is. The subject of a call of `terminal` is `cd FOLDER && COMMAND` if the
command does not start in the working directory, and the text that is typed if it goes to a terminal session. Paths are
relative to the working directory.

`*:PATH` that denies or asks covers every tool that names that path, or the folder it describes (`*:secrets/*`). It does
not see what a command does with files, nor what a search from a folder above finds.

Permissions guard against accidents. They are not a sandbox: a command that the user allows can do whatever the user
can.
"""

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Literal, cast

import msgspec

from crow_core.acp.schema import BlockContent, TextBlock, ToolCallContent, ToolCallFields
from crow_core.app import Crow
from crow_core.content import path_from_uri, to_announcement, to_update
from crow_core.git import find_foreign_settings, find_git_options, make_git_environment
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages import ToolUse
from crow_core.options import Choice, Option
from crow_core.session import Session
from crow_core.settings.protected import find_protection
from crow_core.settings.rules import Rules, Verdict, parse_rules
from crow_core.simple_commands import CommandLine, read_command_line
from crow_core.text import to_line

Mode = Literal["ask", "accept-edits", "plan", "yolo"]

MODES = (
    Choice("ask", "Ask", "Reads freely; asks before it changes a file or runs a command"),
    Choice(
        "accept-edits", "Accept edits", "Changes files in the project without asking; asks before it runs a command"
    ),
    Choice("plan", "Plan", "Only reads: changes nothing and runs nothing"),
    Choice("yolo", "Yolo", "Asks nothing", fleeting=True),
)

OPERATORS = re.compile(r"[;&|\n\r`()<>]|\$\(")
"""Joins commands, substitutes or redirects: a command with any of these is more than one simple command."""
PLAIN_COMMAND = re.compile(r"(?!\w+\+?=)[\w ./:=@,+%-]*", re.ASCII)
"""A command of these characters alone that sets no variable: the shell runs it as it is written."""
SHELL_QUOTES = re.compile(r"\\\n|[\"'\\]")
"""Characters that the shell removes from a word."""
COMMAND_PREFIXES = re.compile(
    r"((\w+\+?=\S*|[{!]|if|then|elif|else|while|until|do|time|command|builtin|exec|eval|nohup|nice|timeout|xargs|sudo"
    r"|doas|env|(\S*/)?(ba|da|z|k)?sh)( -\S+| [\d.]+[smhd]?)* )*(\S*/)?"
)
"""Words that may stand before the command that really runs."""


@dataclass(frozen=True)
class Judgement:
    """The decision about one tool call, by rules, mode and earlier answers, or by the user."""

    verdict: Verdict
    reason: str = ""
    """The source of the decision, as a text that completes "This was not run: …"; not used with the verdict "ask"."""
    may_last: bool = False
    """With the verdict "ask": whether the user may answer for the rest of the session."""
    lasts: bool = False
    """Whether it comes from an answer for the rest of the session."""
    by_pattern: bool = False
    """Whether a rule with a pattern allows it."""
    remark: str = ""
    """With the verdict "ask": a text that the question shows."""
    runs_edits: bool = False
    """With the verdict "ask": whether it is about a command that runs code which the session may have changed."""


@dataclass
class SessionPermissions:
    """The permissions of one session."""

    mode: Mode
    rules: Rules
    own_folders: Sequence[str] = ()
    """Absolute folders of crow's own settings and data; each change in them is asked about."""
    protected: Sequence[str] = ()
    """Patterns of files whose changes are asked about, beside those of protected.toml."""
    has_edits: bool = False
    """Whether the session has changed files."""
    runs_edits: bool = False
    """Whether the user has allowed a command that runs the folder's code after such a change."""
    answers: dict[tuple[str, str, str], bool] = field(default_factory=dict[tuple[str, str, str], bool])
    """Answers for the rest of the session: (tool, digest of its definition, scope) to allowed or not."""
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is asked about: one at a time, in the order of the calls."""


def permissions(
    crow: Crow,
    *,
    mode: Mode = "ask",
    allow: Sequence[str] = (),
    ask: Sequence[str] = (),
    deny: Sequence[str] = (),
    own: Sequence[str] = (),
    protected: Sequence[str] = (),
    project: Callable[[str], tuple[Sequence[str], Sequence[str]]] | None = None,
    trusted: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Ask before tools act.

    `own` are the folders of crow's own settings and data, in which each change is asked about, as are changes of files
    that run later or instruct an agent; `protected` are patterns of further such files. `project` returns the `ask` and
    `deny` rules of a trusted folder, which can only tighten. In a folder that is not `trusted`, git runs no
    programs of the folder when a rule allows it. Raises ValueError for an invalid rule.
    """
    allowed, asked, denied = parse_rules(allow), parse_rules(ask), parse_rules(deny)

    def get_permissions(session: Session) -> SessionPermissions:
        if session.parent:
            return get_permissions(session.parent)  # a sub-agent shares the mode, the rules and the answers
        known: SessionPermissions | None = session.state.get("permissions")
        if known is None:
            more_ask, more_deny = project(session.cwd) if project else ((), ())
            rules = Rules(allowed, [*asked, *parse_rules(more_ask)], [*denied, *parse_rules(more_deny)])
            known = session.state["permissions"] = SessionPermissions(mode, rules, own, protected)
            known.has_edits = any(entry.get("crow", {}).get("changes") for entry in session.log)
        return known

    @crow.options
    def mode_option(session: Session) -> Option:
        def choose(value: str) -> None:
            get_permissions(session).mode = cast(Mode, value)

        return Option("mode", "Mode", "mode", MODES, lambda: get_permissions(session).mode, choose)

    @crow.before_announcement
    def decide_at_once(session: Session, tool_call: ToolCall) -> None:
        """Record a decision that needs neither git nor the user, so that it is stored together with the reply."""
        if session.toolbox.reject(tool_call) is None:
            keep_start(session, tool_call)
            judgement = judge(session, get_permissions(session), tool_call)
            if judgement.verdict != "ask" and not may_run_git(session, tool_call, judgement):
                record(session, tool_call, judgement)

    @crow.before_tool
    @crow.permission
    async def decide(session: Session, tool_call: ToolCall) -> ToolResult | None:
        keep_start(session, tool_call)
        judgement = await judge_with_git(session, tool_call)
        if judgement.verdict == "ask":
            async with get_permissions(session).queue:
                # The answer to the call before may have settled this one, or the mode may have changed.
                judgement = await judge_with_git(session, tool_call)
                if judgement.verdict == "ask":
                    judgement = await ask_user(session, get_permissions(session), tool_call, judgement)
        record(session, tool_call, judgement)
        if judgement.verdict == "deny":
            refusal = f"This was not run: {judgement.reason}. Do not try to reach the same by another way; ask."
            return replace(ToolResult.error(refusal), meta={"crow/denied": judgement.reason})
        return None

    async def judge_with_git(session: Session, tool_call: ToolCall) -> Judgement:
        judgement = judge(session, get_permissions(session), tool_call)
        if may_run_git(session, tool_call, judgement):
            return await judge_git(session, tool_call, judgement)
        return judgement

    def may_run_git(session: Session, tool_call: ToolCall, judgement: Judgement) -> bool:
        """Test whether a rule allows a command that may be a git command, in a folder that is not trusted."""
        return judgement.by_pattern and tool_call.kind == "execute" and not trusted(Path(session.cwd))

    @crow.after_tool
    def follow_folder(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        session.folders.starts.pop(tool_call.id, None)
        session.folders.environments.pop(tool_call.id, None)
        if folder := result.meta.get("crow/folder"):
            session.folders.current = folder
        if result.meta.get("crow/changes"):
            get_permissions(session).has_edits = True


def keep_start(session: Session, tool_call: ToolCall) -> None:
    """Keep the folder in which a command starts: it is judged for this folder, so it runs there."""
    session.folders.starts.setdefault(tool_call.id, session.folders.current or session.cwd)


def record(session: Session, tool_call: ToolCall, judgement: Judgement) -> None:
    """Append a decision to the log, unless the last one on this call since the reply is the same."""
    scope = f"session: {describe_scope(session, tool_call)}" if judgement.lasts else "once"
    named = {"kind": "decision", "is": judgement.verdict, "by": judgement.reason, "scope": scope}
    decision = {**named, **identify(tool_call.use)}
    since_reply = takewhile(lambda entry: entry.get("role") != "assistant", reversed(session.log))
    notes = (entry.get("crow", {}) for entry in since_reply)
    last = next((note for note in notes if (note.get("kind"), note.get("call")) == ("decision", tool_call.id)), None)
    if last is None or not decision.items() <= last.items():
        session.log.append({"crow": decision})


def judge(session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> Judgement:
    """Judge a tool call by the rules, the mode and the answers that hold for the session."""
    subject, kind, mode = find_subject(session, tool_call), tool_call.kind, permissions.mode
    to_terminal = kind == "execute" and is_for_terminal_session(tool_call)
    simple = kind != "execute" or (not to_terminal and PLAIN_COMMAND.fullmatch(subject) is not None)
    spellings = find_spellings(session, tool_call, subject)
    strict = [rule for rule in (*permissions.rules.deny, *permissions.rules.ask) if rule.covers(tool_call.name)]
    line = read_command_line(subject) if kind == "execute" and strict else CommandLine()
    match = permissions.rules.find(tool_call.name, subject, [*spellings, *line.commands], simple=simple)
    if match and match[0] != "allow":
        return Judgement(match[0], f"the rule {str(match[1])!r} says {match[0]}")
    if kind == "execute" and only_polls_terminal(tool_call):
        return Judgement("allow", "it only looks at what was started, or ends it")
    if mode == "plan" and kind not in ("read", "search", "think", "fetch"):
        return Judgement("deny", "plan mode only reads. Describe the change instead")
    if mode == "yolo":
        return Judgement("allow", "mode yolo")
    if rule := next((rule for rule in strict if line.may_match(rule.pattern)), None):
        return Judgement("ask", remark=f"What this runs cannot be known, and the rule {str(rule)!r} may be about it.")
    if kind == "edit" and is_inside(session, subject, permissions.own_folders):
        return Judgement("ask", remark="These are crow's own files.")
    if kind == "edit" and (protection := find_protection(path_from_root(session, subject), permissions.protected)):
        return Judgement("ask", remark=f"{to_line(protection.pattern)}: {protection.reason}.")
    if match and (program := find_runner_after_edits(permissions, tool_call, subject)):
        why = f"{to_line(program)} runs code of this folder, where this session has changed files."
        return Judgement("ask", remark=f"{why} This is asked once in a session.", runs_edits=True)
    if match:
        return Judgement("allow", f"the rule {str(match[1])!r}", by_pattern=match[1].pattern is not None)
    if tool_call.tool and tool_call.tool.destroys:
        return Judgement("ask")
    if to_terminal:  # what a running terminal session makes of it depends on what happened there
        return Judgement("ask")
    if (answer := permissions.answers.get(answer_key(session, tool_call))) is not None:
        return Judgement("allow" if answer else "deny", "the user answered so for this session", lasts=True)
    if kind in ("read", "search", "think"):
        return Judgement("allow", "reading is allowed")
    if kind == "edit" and mode == "accept-edits" and is_inside(session, subject, session.folders.roots):
        return Judgement("allow", "mode accept-edits")
    return Judgement("ask", may_last=True)


def find_runner_after_edits(permissions: SessionPermissions, tool_call: ToolCall, subject: str) -> str:
    """Find the program in an allowed command that runs the folder's code, in a session that has changed files without a
    question and was not asked about that yet; "" if there is none."""
    if tool_call.kind != "execute" or permissions.mode != "accept-edits":
        return ""
    if not permissions.has_edits or permissions.runs_edits:
        return ""
    return read_command_line(subject).find_project_runner()


async def judge_git(session: Session, tool_call: ToolCall, judgement: Judgement) -> Judgement:
    """Judge a command that a rule allows, in a folder that is not trusted: git must not run the folder's programs.

    Those that can be switched off are; if the settings of the repository may name others, the user is asked.
    """
    options = find_git_options(find_subject(session, tool_call).split())
    if options is None:
        return judgement
    session.folders.environments[tool_call.id] = make_git_environment()
    try:
        foreign = await asyncio.to_thread(find_foreign_settings, session.cwd)
        reason = f"its settings may run programs: {', '.join(foreign[:5])}" if foreign else ""
    except OSError as error:
        reason = f"its settings cannot be read: {error}"
    if options:
        reason = f"{options} may choose another repository, or programs"
    if not reason:
        return judgement
    remark = f"{judgement.reason} allows this, but the repository is not trusted, and {to_line(reason[:500])}."
    return Judgement("ask", remark=remark[:1].upper() + remark[1:])


async def ask_user(
    session: Session, permissions: SessionPermissions, tool_call: ToolCall, judgement: Judgement
) -> Judgement:
    """Ask the user about a tool call; without an answer it is denied.

    Raises EndTurn if the client answers that the turn is cancelled.
    """
    announcement = to_announcement(tool_call, session.cwd)
    subject = find_subject(session, tool_call)
    moves = tool_call.kind == "execute" and subject.startswith("cd ")
    about = ToolCallFields(
        tool_call_id=tool_call.id,
        title=to_line(subject[:200]) if moves else announcement.title,
        name=announcement.name,
        kind=tool_call.kind,
        status="pending",
        locations=announcement.locations,
        raw_input=announcement.raw_input,
        content=await preview(session, tool_call) if tool_call.kind == "edit" else msgspec.UNSET,
    )
    if judgement.remark:
        shown = [] if isinstance(about.content, msgspec.UnsetType) else about.content or []
        about.content = [BlockContent(content=TextBlock(text=judgement.remark)), *shown]
    may_last = judgement.may_last
    answer = await session.user.ask_allowed(about, describe_scope(session, tool_call), may_last=may_last)
    permissions.runs_edits |= judgement.runs_edits and answer.allowed
    if answer.lasts:
        permissions.answers[answer_key(session, tool_call)] = answer.allowed
    return Judgement("allow" if answer.allowed else "deny", answer.reason, lasts=answer.lasts)


async def preview(session: Session, tool_call: ToolCall) -> "list[ToolCallContent] | msgspec.UnsetType":
    """Let the tool make the diff of an edit without writing it; UNSET if the edit cannot succeed."""
    result = await session.toolbox.call(tool_call, session.meta(tool_call, **{"crow/dry_run": True}))
    content = to_update(result.mask(session.secrets), tool_call).content
    return msgspec.UNSET if result.is_error or content is None else content


def find_subject(session: Session, tool_call: ToolCall) -> str:
    """Find the text that the patterns of rules are matched against."""
    arguments, kind = tool_call.arguments, tool_call.kind
    command, path = arguments.get("command"), arguments.get("path")
    if isinstance(path, str) and kind in ("read", "edit", "search"):
        return relative_path(session, path)
    if isinstance(command, str) and command and kind == "execute":
        start = str(arguments.get("cwd") or session.folders.starts.get(tool_call.id, session.cwd))
        moves = resolve(session, start) != os.path.realpath(session.cwd)
        return f"cd {start} && {command}" if moves else command.strip(" \t\n")
    if isinstance(url := arguments.get("url"), str) and kind == "fetch":
        return parse_url(url)[0]
    if kind in ("read", "fetch") and len(arguments) == 1 and isinstance(uri := arguments.get("uri"), str):
        return uri
    if kind == "execute" and is_for_terminal_session(tool_call):
        return " ".join(str(arguments[name]) for name in ("input", "keys") if arguments.get(name) is not None)
    return msgspec.json.encode(arguments).decode()  # one spelling, whatever the model escaped


def is_for_terminal_session(tool_call: ToolCall) -> bool:
    """Whether a call goes to a running terminal session, where functions and programs decide what the input means."""
    return bool(tool_call.arguments.get("session"))


def only_polls_terminal(tool_call: ToolCall) -> bool:
    """Whether a call only polls or kills a running terminal session."""
    arguments = tool_call.arguments
    given = {name for name, value in arguments.items() if value or (name == "input" and value is not None)}
    if arguments.get("keys") == "kill":
        given.discard("keys")
    return is_for_terminal_session(tool_call) and given <= {"session", "wait"}


def find_spellings(session: Session, tool_call: ToolCall, subject: str) -> list[str]:
    """Find further forms of a call's subject, for rules that deny or ask.

    For a path: relative, absolute, and each as a folder. For a command: its parts, with and without quotes and the
    words that may stand before a command.
    """
    if tool_call.kind != "execute":
        match tool_call.arguments:
            case {"path": str(path)}:
                pass
            case {"uri": str(uri)} if uri.startswith("file:"):
                path = path_from_uri(uri.partition("#")[0])
            case _:
                return []
        paths = relative_path(session, path), resolve(session, path)
        return [*paths, *(f"{path}/" for path in paths)]
    # Coarser than `read_command_line`, and needed where that cannot read a command and nobody is asked (mode yolo).
    pieces = [piece for text in (subject, SHELL_QUOTES.sub("", subject)) for piece in OPERATORS.split(text)]
    commands = [" ".join(piece.split()) for piece in pieces]
    return [*commands, *(COMMAND_PREFIXES.sub("", command, count=1) for command in commands)]


def resolve(session: Session, path: str) -> str:
    """Make a path absolute, from the working directory, and resolve symbolic links."""
    return os.path.realpath(os.path.join(session.cwd, os.path.expanduser(path.replace("\0", "?"))))


def relative_path(session: Session, path: str) -> str:
    """Make a path relative to the working directory if it leads into it, else absolute."""
    cwd, full = os.path.realpath(session.cwd), resolve(session, path)
    return os.path.relpath(full, cwd) if full.startswith(cwd + os.sep) else full


def path_from_root(session: Session, path: str) -> str:
    """Make a path relative to the innermost root that it leads into, else absolute without the first slash."""
    full = resolve(session, path)
    roots = [root for root in map(os.path.realpath, session.folders.roots) if os.path.commonpath([root, full]) == root]
    return os.path.relpath(full, max(roots, key=len)) if roots else full.lstrip(os.sep)


def is_inside(session: Session, path: str, folders: Sequence[str]) -> bool:
    """Whether a path leads into one of these folders."""
    full = resolve(session, path)
    return any(os.path.commonpath([folder, full]) == folder for folder in map(os.path.realpath, folders))


def answer_key(session: Session, tool_call: ToolCall) -> tuple[str, str, str]:
    """Make the key of an answer for the session. A tool whose definition changes counts as another tool."""
    return tool_call.name, tool_call.tool.digest if tool_call.tool else "", find_scope(session, tool_call)


def parse_url(url: str) -> tuple[str, str]:
    """Spell a URL as `fetch` does, and find its host and port."""
    import httpx2  # imported here: it takes 80 ms, and few sessions fetch

    try:
        parsed = httpx2.URL(url.strip())
    except (httpx2.InvalidURL, ValueError):
        return url, url
    return str(parsed), parsed.netloc.decode("ascii", "replace")


def find_scope(session: Session, tool_call: ToolCall) -> str:
    """Find what an answer for the session covers: this command, all edits, a host, or the kind of the tool."""
    kind = tool_call.kind
    if kind == "fetch" and isinstance(url := tool_call.arguments.get("url"), str):
        return parse_url(url)[1]
    return find_subject(session, tool_call) if kind == "execute" else kind


def describe_scope(session: Session, tool_call: ToolCall) -> str:
    """Describe what an answer for the session covers."""
    name, kind = tool_call.name, tool_call.kind
    if kind == "fetch" and (scope := find_scope(session, tool_call)) != kind:
        return f"{name} from {scope}"
    return {"execute": "this command", "edit": "changes to files here"}.get(kind, name)


def identify(use: ToolUse) -> dict[str, str]:
    """Identify a tool call in a decision: its id, its tool, and a digest of its arguments."""
    name, arguments = use["function"]["name"], use["function"]["arguments"]
    digest = hashlib.sha256(arguments.encode(errors="surrogatepass")).hexdigest()
    return {"call": use["id"], "tool": name, "arguments": digest}
