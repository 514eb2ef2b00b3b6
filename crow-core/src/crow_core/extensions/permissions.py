"""Who may do what: modes, rules, and the question to the person.

An extension like any other: `crow.use(permissions, mode="ask", allow=["terminal:git status"], deny=["terminal:rm *"])`.

A rule is `TOOL` or `TOOL:PATTERN`. The pattern is matched (as in a shell: `*`, `?`) against the command of `terminal`
(`cd FOLDER && COMMAND` where it does not begin in the working directory; what is typed, where it goes to a session),
the path of a tool that reads, edits or searches files (relative to the working directory), the URL of `fetch`, or the
whole arguments of any other tool. Deny beats ask, ask beats allow, and both beat what the mode would have allowed.

`*:PATH` that denies or asks holds for every tool that names that path, or a folder of which it speaks (`*:secrets/*`).
What a command does with files, and what a search from a folder above comes across, it does not see.

This is a guard against accidents, not a sandbox: a person who lets a command run lets it do whatever it can.
"""

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from crow_core.acp.schema import PermissionOption, ToolCallContent, ToolCallFields
from crow_core.app import Crow
from crow_core.content import path_from_uri, to_announcement, to_update
from crow_core.errors import ElicitationError
from crow_core.extensions.masking import without_secrets
from crow_core.mcp.tool import ToolResult
from crow_core.messages import ToolUse, parse_arguments
from crow_core.options import Choice, Option
from crow_core.session import Session
from crow_core.text import to_line

Mode = Literal["ask", "accept-edits", "plan", "yolo"]
Verdict = Literal["allow", "ask", "deny"]

MODES = (
    Choice("ask", "Ask", "Reads freely; asks before it changes a file or runs a command"),
    Choice(
        "accept-edits", "Accept edits", "Changes files in the project without asking; asks before it runs a command"
    ),
    Choice("plan", "Plan", "Only reads: changes nothing and runs nothing"),
    Choice("yolo", "Yolo", "Asks nothing", fleeting=True),
)

OPERATORS = re.compile(r"[;&|\n\r`()<>]|\$\(")
"""What joins commands, substitutes or redirects: a command with any of it is more than one simple command."""
SIMPLE = re.compile(r"(?!\w+\+?=)[\w ./:=@,+%-]*", re.ASCII)
"""A command made of these alone, and that sets no variable, does what its words say."""
QUOTING = re.compile(r"\\\n|[\"'\\]")
"""What the shell takes out of a word before it looks at it."""
WRAPPING = re.compile(
    r"((\w+\+?=\S*|[{!]|if|then|elif|else|while|until|do|time|command|builtin|exec|eval|nohup|nice|timeout|xargs|sudo"
    r"|doas|env|(\S*/)?(ba|da|z|k)?sh)( -\S+| [\d.]+[smhd]?)* )*(\S*/)?"
)
"""What may stand before the command that is really meant."""
TOUCHY = re.compile(
    r"(^|/)(\.git|\.crow|\.config/crow|\.local/share/crow|\.vscode|\.idea|\.zed|\.fleet|\.cursor|\.claude|\.agents"
    r"|\.devcontainer|\.ssh|\.github|\.husky|\.config/(fish|autostart|systemd)|LaunchAgents)(/|$)"
    r"|(^|/)(\.(bashrc|bash_profile|bash_login|bash_logout|bash_aliases|profile|zshrc|zshenv|zprofile|zlogin|xprofile"
    r"|envrc|env|mcp\.json|gitconfig|gitmodules|npmrc|pypirc|pre-commit-config\.yaml|gitlab-ci\.yml)|crontab)$",
    re.IGNORECASE,
)
"""Files that change what runs later (shells, hooks, editors, this agent): always asked for, in every mode but yolo."""
TOOL = re.compile(r"[\w*?\[\]!-]+")
"""A tool's name, or a pattern of names."""
TYPED = "what a terminal that stays makes of it depends on what happened there"
"""A reason to ask each time."""
UNDECIDED = "nobody has decided yet"
"""The only reason to ask that an answer for the whole session takes away."""
ANSWERED = "the user answered so for this session"


@dataclass(frozen=True)
class Rule:
    """One line of the configuration."""

    tool: str
    pattern: str | None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Raises ValueError for what could never match: it would only look as if it forbade something."""
        tool, colon, pattern = text.partition(":")
        if not TOOL.fullmatch(tool.strip()):
            raise ValueError(f"{text!r} is no rule: write TOOL or TOOL:PATTERN, such as 'terminal:rm *'")
        return cls(tool.strip(), pattern.strip() if colon else None)

    def matches(self, name: str, subject: str) -> bool:
        return fnmatchcase(name, self.tool) and (self.pattern is None or fnmatchcase(subject, self.pattern))


@dataclass
class Rules:
    """The rules of one session; a project's rules may tighten them."""

    allow: list[Rule] = field(default_factory=list[Rule])
    ask: list[Rule] = field(default_factory=list[Rule])
    deny: list[Rule] = field(default_factory=list[Rule])

    def verdict(self, name: str, subject: str, others: Sequence[str], *, simple: bool) -> tuple[Verdict, Rule] | None:
        """What the rules say of a call, and which rule; None when none matches.

        `others` are further spellings of the subject, which are looked at to forbid, never to allow. A call that is
        not `simple` is allowed only by a rule without a pattern.
        """
        everywhere = [subject, *others]
        for rule in self.deny:
            if any(rule.matches(name, spelling) for spelling in everywhere):
                return "deny", rule
        for rule in self.ask:
            if any(rule.matches(name, spelling) for spelling in everywhere):
                return "ask", rule
        for rule in self.allow:
            if rule.matches(name, subject) and (simple or rule.pattern is None):
                return "allow", rule
        return None


@dataclass
class Desk:
    """What permissions keeps for one session."""

    mode: Mode
    rules: Rules
    own: Sequence[str] = ()
    """Absolute folders of crow's own, where every change is asked for."""
    always: dict[tuple[str, str, str], bool] = field(default_factory=dict[tuple[str, str, str], bool])
    """Answers that hold for the rest of the session: (tool, digest of its definition, scope) to allowed or not."""
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One question at a time, in the order of the calls."""


def permissions(
    crow: Crow,
    *,
    mode: Mode = "ask",
    allow: Sequence[str] = (),
    ask: Sequence[str] = (),
    deny: Sequence[str] = (),
    own: Sequence[str] = (),
    project: Callable[[str], tuple[Sequence[str], Sequence[str]]] | None = None,
) -> None:
    """Ask before tools act. `own` are the folders of crow's own settings and data, where each change is asked for;
    `project` gives a trusted folder's own `ask` and `deny` rules, which can only tighten. Raises ValueError."""
    allowed, asked, denied = parse_rules(allow), parse_rules(ask), parse_rules(deny)

    def desk(session: Session) -> Desk:
        found: Desk | None = session.state.get("permissions")
        if found is None:
            more_ask, more_deny = project(session.cwd) if project else ((), ())
            rules = Rules(allowed, [*asked, *parse_rules(more_ask)], [*denied, *parse_rules(more_deny)])
            found = session.state["permissions"] = Desk(mode, rules, own)
        return found

    @crow.options
    def mode_option(session: Session) -> Option:
        def choose(value: str) -> None:
            desk(session).mode = value  # pyright: ignore[reportAttributeAccessIssue] - an option takes only its choices

        return Option("mode", "Mode", "mode", MODES, lambda: desk(session).mode, choose)

    @crow.before_tool
    async def gate(session: Session, call: ToolUse) -> ToolResult | None:
        folders(session)[call["id"]] = session.state.get("folder", session.cwd)  # as it is judged, so it will be run
        (verdict, why), lasts = judge(session, desk(session), call), False
        if verdict == "ask":
            async with desk(session).queue:
                # The answer before this one may have settled it, or the mode may have changed meanwhile.
                verdict, why = judge(session, desk(session), call)
                if verdict == "ask":
                    verdict, why, lasts = await question(session, desk(session), call, lasting=why == UNDECIDED)
        scope = f"session: {reach(session, call)}" if lasts or why == ANSWERED else "once"
        session.append({"crow": {"kind": "decision", "is": verdict, "by": why, "scope": scope, **identity(call)}})
        if verdict == "deny":
            return ToolResult.error(f"This was not run: {why}. Do not try to reach the same by another way; ask.")
        return None

    @crow.after_tool
    def follow(result: ToolResult, session: Session, call: ToolUse) -> None:
        folders(session).pop(call["id"], None)
        if folder := result.meta.get("crow/folder"):
            session.state["folder"] = folder


def parse_rules(rules: Sequence[str]) -> list[Rule]:
    """Raises ValueError."""
    return [Rule.parse(rule) for rule in rules]


def judge(session: Session, desk: Desk, call: ToolUse) -> tuple[Verdict, str]:
    """What rules, earlier answers and the mode say of a call, and which of them said it."""
    name, subject, kind = call["function"]["name"], subject_of(session, call), session.toolbox.kind(call)
    typed, looks = kind == "execute" and is_typed(call), kind == "execute" and only_looks(call)
    simple = kind != "execute" or (not typed and SIMPLE.fullmatch(subject) is not None)
    found = desk.rules.verdict(name, subject, spellings(session, call, subject), simple=simple)
    if found and found[0] != "allow":
        return found[0], f"the rule {text_of(found[1])!r} says {found[0]}"
    if looks:
        return "allow", "it only looks at what was started, or ends it"
    if desk.mode == "plan" and kind not in ("read", "search", "think", "fetch"):
        return "deny", "plan mode only reads. Describe the change instead"
    if desk.mode == "yolo":
        return "allow", "mode yolo"
    if kind == "edit" and (TOUCHY.search(subject) or is_inside(session, subject, desk.own)):
        return "ask", "it changes what runs later"
    if found:
        return "allow", f"the rule {text_of(found[1])!r}"
    if session.toolbox.destroys(call):
        return "ask", "its server says that it may destroy something"
    if typed:
        return "ask", TYPED
    if (answered := desk.always.get(key_of(session, call))) is not None:
        return ("allow" if answered else "deny"), ANSWERED
    if kind in ("read", "search", "think"):
        return "allow", "reading is allowed"
    if kind == "edit" and desk.mode == "accept-edits" and is_inside(session, subject, session.roots):
        return "allow", "mode accept-edits"
    return "ask", UNDECIDED


async def question(session: Session, desk: Desk, call: ToolUse, *, lasting: bool) -> tuple[Verdict, str, bool]:
    """Ask the person; without an answer the call is denied. `lasting` offers answers for the whole session; the last of
    what is given tells whether that was chosen.

    Raises EndTurn when the client answers that the turn is cancelled.
    """
    kind = session.toolbox.kind(call)
    start = to_announcement(call, kind, session.cwd, session.toolbox.title(call))
    subject = subject_of(session, call)
    preview = await dry_run(session, call) if kind == "edit" else msgspec.UNSET
    fields = ToolCallFields(
        tool_call_id=call["id"],
        title=to_line(subject[:200]) if kind == "execute" and subject.startswith("cd ") else start.title,
        name=start.name,
        kind=kind,
        status="pending",
        locations=start.locations,
        raw_input=start.raw_input,
        content=preview,
    )
    what = reach(session, call)
    options = [
        PermissionOption(option_id="allow", name="Allow", kind="allow_once"),
        PermissionOption(option_id="always", name=f"Allow {what} for this session", kind="allow_always"),
        PermissionOption(option_id="reject", name="Reject", kind="reject_once"),
        PermissionOption(option_id="never", name=f"Reject {what} for this session", kind="reject_always"),
    ]
    offered = options if lasting else [option for option in options if option.kind.endswith("_once")]
    try:
        answer = await session.ask_permission(fields, offered)
    except ElicitationError:
        return "deny", "it needs a permission, and nobody is there to give it", False
    if lasts := answer in ("always", "never"):
        desk.always[key_of(session, call)] = answer == "always"
    if answer in ("allow", "always"):
        return "allow", "the user", lasts
    return "deny", "the user rejected it", lasts


async def dry_run(session: Session, call: ToolUse) -> "list[ToolCallContent] | msgspec.UnsetType":
    """The diff that an edit would make, worked out by the tool itself; nothing when the edit cannot succeed."""
    result = await session.toolbox.call(call, session.meta(call, **{"crow/dry_run": True}))
    result = without_secrets(result, session)
    content = to_update(result, call, "edit").content
    return msgspec.UNSET if result.is_error or content is None else content


def subject_of(session: Session, call: ToolUse) -> str:
    """What a rule's pattern is matched against."""
    arguments, kind = parse_arguments(call) or {}, session.toolbox.kind(call)
    command, path = arguments.get("command"), arguments.get("path")
    if isinstance(path, str) and kind in ("read", "edit", "search"):
        return place(session, path)
    if isinstance(command, str) and command and kind == "execute":
        elsewhere = str(arguments.get("cwd") or folders(session).get(call["id"], session.cwd))
        moves = resolved(session, elsewhere) != os.path.realpath(session.cwd)
        return f"cd {elsewhere} && {command}" if moves else command.strip(" \t\n")
    if isinstance(url := arguments.get("url"), str) and kind == "fetch":
        return address(url)[0]
    if kind == "execute" and is_typed(call):
        return " ".join(str(arguments[name]) for name in ("input", "keys") if arguments.get(name) is not None)
    return msgspec.json.encode(arguments).decode()  # in one spelling, whatever the model escaped


def folders(session: Session) -> dict[str, str]:
    """Where the commands of open calls begin, by the calls' ids: `Session.meta` tells the tool."""
    return session.state.setdefault("folders", {})


def is_typed(call: ToolUse) -> bool:
    """Whether a call goes to a terminal that stays, where functions and running programs give words their meaning."""
    return bool((parse_arguments(call) or {}).get("session"))


def only_looks(call: ToolUse) -> bool:
    """Whether a call gives a terminal nothing to do, but to end."""
    arguments = parse_arguments(call) or {}
    given = {name for name, value in arguments.items() if value or (name == "input" and value is not None)}
    if arguments.get("keys") == "kill":
        given.discard("keys")
    return is_typed(call) and given <= {"session", "wait"}


def spellings(session: Session, call: ToolUse, subject: str) -> list[str]:
    """What a rule that forbids is matched against too: the path that is named, whole and as a folder; the pieces that a
    command joins, and the same without quotes and without what only wraps a command."""
    if session.toolbox.kind(call) != "execute":
        match parse_arguments(call):
            case {"path": str(path)}:
                pass
            case {"uri": str(uri)} if uri.startswith("file:"):
                path = path_from_uri(uri.partition("#")[0])
            case _:
                return []
        paths = place(session, path), resolved(session, path)
        return [*paths, *(f"{path}/" for path in paths)]
    pieces = [piece for text in (subject, QUOTING.sub("", subject)) for piece in OPERATORS.split(text)]
    words = [" ".join(piece.split()) for piece in pieces]
    return [*words, *(WRAPPING.sub("", piece, count=1) for piece in words)]


def resolved(session: Session, path: str) -> str:
    """Where a path leads from the working directory, symbolic links resolved."""
    return os.path.realpath(os.path.join(session.cwd, os.path.expanduser(path.replace("\0", "?"))))


def place(session: Session, path: str) -> str:
    """The same as rules have it: relative where it leads into the working directory."""
    here, full = os.path.realpath(session.cwd), resolved(session, path)
    return os.path.relpath(full, here) if full.startswith(here + os.sep) else full


def is_inside(session: Session, path: str, folders: Sequence[str]) -> bool:
    """Whether a path leads into one of these folders."""
    full = resolved(session, path)
    return any(os.path.commonpath([folder, full]) == folder for folder in map(os.path.realpath, folders))


def key_of(session: Session, call: ToolUse) -> tuple[str, str, str]:
    """What an answer for the whole session is bound to: a tool that its server describes otherwise is another one."""
    return call["function"]["name"], session.toolbox.digest(call), scope_of(session, call)


def address(url: str) -> tuple[str, str]:
    """A URL as our own `fetch` spells it, and the host and port that it leads to."""
    import httpx2  # not at the top: 80 ms, and few sessions fetch

    try:
        parsed = httpx2.URL(url.strip())
    except (httpx2.InvalidURL, ValueError):
        return url, url
    return str(parsed), parsed.netloc.decode("ascii", "replace")


def scope_of(session: Session, call: ToolUse) -> str:
    """How far an "always" reaches: this very command, all edits in the project, a host, or the tool."""
    kind = session.toolbox.kind(call)
    if kind == "fetch" and isinstance(url := (parse_arguments(call) or {}).get("url"), str):
        return address(url)[1]
    return subject_of(session, call) if kind == "execute" else kind


def reach(session: Session, call: ToolUse) -> str:
    """The same in words."""
    name, kind = call["function"]["name"], session.toolbox.kind(call)
    if kind == "fetch" and (scope := scope_of(session, call)) != kind:
        return f"{name} from {scope}"
    return {"execute": "this command", "edit": "changes to files here"}.get(kind, name)


def identity(call: ToolUse) -> dict[str, str]:
    """Which call it is, and a digest of what it was asked to do."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    digest = hashlib.sha256(arguments.encode(errors="surrogatepass")).hexdigest()
    return {"call": call["id"], "tool": name, "arguments": digest}


def text_of(rule: Rule) -> str:
    return rule.tool if rule.pattern is None else f"{rule.tool}:{rule.pattern}"
