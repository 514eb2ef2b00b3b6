"""The decision about a tool call, by the mode, the rules and the answers that hold for the session."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from crow_core.mcp.tool import ToolCall
from crow_core.session.options import Choice
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line

from crow_permissions.command_files import (
    find_own_file,
    find_protection_of_files,
    find_rule_for_files,
    find_rule_for_named_files,
    find_rule_for_unknown_files,
    may_write,
    writes_unknown_files,
)
from crow_permissions.compositions import Composition, SimpleCommand, read_composition
from crow_permissions.indirect_commands import may_run
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers, find_answer
from crow_permissions.known_readers import may_read
from crow_permissions.lasting import get_folder, list_covering_rules
from crow_permissions.protected import find_protection
from crow_permissions.rules import COMMAND_TOOL, Rule, Rules, Verdict
from crow_permissions.simple_commands import PLAIN_COMMAND, CommandLine, read_command_line
from crow_permissions.subjects import (
    find_own_folder,
    find_path,
    find_spellings,
    find_start,
    find_subject,
    from_root,
    has_posix_shell,
    is_below_any,
    is_for_terminal_session,
    only_polls_terminal,
    resolve,
    spell_paths,
)

Mode = Literal["ask", "accept-edits", "plan", "yolo"]

TEXT_LIMIT = 100_000
"""Characters of a command, or of the text of another call that runs something, that are compared with rules."""

MODES = (
    Choice("ask", "Ask", "Reads freely; asks before it changes a file or runs a command"),
    Choice(
        "accept-edits", "Accept edits", "Changes files in the project without asking; asks before it runs a command"
    ),
    Choice("plan", "Plan", "Changes nothing: edits are denied, and what commands in the sandbox change is discarded"),
    Choice("yolo", "Yolo", "Asks nothing", fleeting=True),
)


ONLY_READS = "it only reads"
YOLO = "mode yolo"
PLAN_MODE = "plan mode only reads. Describe the change instead"
STRICTNESS: dict[Verdict, int] = {"deny": 0, "ask": 1, "allow": 2}


@dataclass(frozen=True)
class Judgement:
    """The decision about one tool call, by rules, mode and earlier answers, or by the user."""

    verdict: Verdict
    reason: str = ""
    """The source of the decision, as a text that completes "This was not run: …"; not used with the verdict "ask"."""
    rules: Sequence[AnswerRule] = ()
    """With the verdict "ask": the rules that an answer for longer may store, the narrowest first."""
    answer: KeptAnswer | None = None
    """The answer for longer than once that decided."""
    by_pattern: bool = False
    """True if a rule with a pattern allows it, or would if commands had changed no variables."""
    command: str = ""
    """The command that the user wrote in place of the model's, and allowed."""
    advises: bool = False
    """With the verdict "deny": whether the user said why."""
    remark: str = ""
    """With the verdict "ask": a text that the question shows."""
    because: str = ""
    """With the verdict "ask": a sentence that a denial adds to its reason."""
    runs_edits: bool = False
    """With the verdict "ask": whether it is about a command that runs code which the session may have changed."""
    writes: bool = False
    """With the verdict "allow": whether it is about a command that is known to write files."""
    may_review: bool = False
    """True if no rule and no answer asks about the command or denies it. It may then run in the sandbox, and the user
    is asked about its changes."""


@dataclass
class SessionPermissions:
    """The permissions of one session."""

    mode: Mode
    rules: Rules
    own_folders: Sequence[str] = ()
    """Absolute folders of crow's own settings and data; each change in them is asked about."""
    protected: Sequence[str] = ()
    """Patterns of files whose changes are asked about, in addition to those of protected.toml."""
    has_edits: bool = False
    """True if the session has changed files."""
    runs_edits: bool = False
    """True if the user has allowed a command that runs the folder's code after such a change."""
    answers: list[KeptAnswer] = field(default_factory=list[KeptAnswer])
    """Answers for the rest of the session."""
    kept: KeptAnswers | None = None
    """Answers for longer; None if there are none."""
    environments: set[str] = field(default_factory=lambda: {""})
    """The environments that commands have made in which the user has allowed a command."""
    changed: dict[str, str] = field(default_factory=dict[str, str])
    """The commands that the user has written in place of the model's, by the ids of the tool calls."""
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is asked about: one at a time, in the order of the calls."""

    def find_answer(self, rules: Sequence[AnswerRule], folder: str) -> KeptAnswer | None:
        """Find the answer that decides a call which these rules cover; a rejection beats a permission."""
        return find_answer(self.list_answers(), rules, folder) if rules else None

    def list_answers(self) -> list[KeptAnswer]:
        """List the answers for the session and for longer."""
        return [*self.answers, *(self.kept.list_all() if self.kept else ())]


PERMISSIONS = StateKey[SessionPermissions | None]("permissions", lambda: None)


def find_permissions(session: Session) -> SessionPermissions | None:
    """Find the permissions of a session, which sub-agents share that have no mode of their own; None before they are
    set."""
    while session.parent and session.state[PERMISSIONS] is None:
        session = session.parent
    return session.state[PERMISSIONS]


@dataclass(frozen=True)
class JudgedCall:
    """A tool call and what the steps of its judgement need to know of it."""

    session: Session
    permissions: SessionPermissions
    tool_call: ToolCall
    subject: str
    path: str
    """The file or folder of a tool that works with one, absolute and without links; "" for another tool."""
    start: str
    """The folder in which a command starts."""
    line: CommandLine
    """The commands of a command line; none for another tool."""
    match: tuple[Verdict, Rule] | None
    """The strictest rule about the call or about a file that its command writes."""
    covering: list[AnswerRule]
    """The rules that an answer for longer than once may have, the narrowest first."""
    answer: KeptAnswer | None
    """The answer for longer than once that covers the call."""
    to_terminal: bool
    """True for input to a running terminal session."""
    may_compose: bool
    """True for a command line of a POSIX shell."""


def read_call(session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> JudgedCall:
    """Read a tool call for its judgement."""
    subject, kind, rules = find_subject(session, tool_call), tool_call.kind, permissions.rules
    start = find_start(session, tool_call)
    to_terminal = kind == "execute" and is_for_terminal_session(tool_call)
    one_line = kind == "execute" and not to_terminal and has_posix_shell(tool_call)
    simple = kind != "execute" or (one_line and PLAIN_COMMAND.fullmatch(subject) is not None)
    spellings = find_spellings(session, tool_call, subject)
    line = read_command_line(spell_paths(tool_call, subject)) if kind == "execute" else CommandLine()
    match = rules.find(tool_call.name, subject, [*spellings, *line.commands], simple=simple)
    about_file = find_rule_for_files(session, rules, line, start)
    match = min(filter(None, (match, about_file)), key=lambda found: STRICTNESS[found[0]], default=None)
    covering = list_covering_rules(session, tool_call)
    answer = permissions.find_answer(covering, get_folder(session))
    path = find_path(session, tool_call) if isinstance(tool_call.arguments.get("path"), str) else ""
    return JudgedCall(
        session, permissions, tool_call, subject, path, start, line, match, covering, answer, to_terminal, one_line
    )


def judge(session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> Judgement:
    """Judge a tool call by the rules, the mode and the answers that hold for the session.

    The first step that decides is the judgement; if none does, the user is asked.
    """
    if tool_call.kind == "execute" and len(find_subject(session, tool_call)) > TEXT_LIMIT:
        return judge_too_long(permissions, tool_call)
    call = read_call(session, permissions, tool_call)
    for step in JUDGEMENT_STEPS:
        if judgement := step(call):
            return judgement
    return Judgement("ask", rules=call.covering, remark=find_unlisted(call), may_review=True)


def judge_too_long(permissions: SessionPermissions, tool_call: ToolCall) -> Judgement:
    """Judge a call whose text is too long to be compared with rules; an answer holds once."""
    denying = [rule for rule in permissions.rules.deny if rule.covers(tool_call.name)]
    length = f"it is longer than {TEXT_LIMIT:,} characters"
    if rule := next((rule for rule in denying if rule.pattern is None), None):
        return Judgement("deny", f"the rule {str(rule)!r} says deny")
    if permissions.mode == "plan":
        return Judgement("deny", PLAN_MODE)
    if permissions.mode != "yolo":
        return Judgement("ask", remark=f"This is not compared with the rules, as {length}.")
    if denying:
        return Judgement("deny", f"{length}, so it cannot be compared with the rule {str(denying[0])!r}")
    return Judgement("allow", YOLO)


def judge_by_strict_rules(call: JudgedCall) -> Judgement | None:
    """Deny what a rule or an answer denies, and ask about what a rule asks about."""
    match, answer = call.match, call.answer
    if answer and not answer.allows and not (match and match[0] == "deny"):
        return to_judgement(answer)
    if match and match[0] != "allow":
        return Judgement(match[0], f"the rule {str(match[1])!r} says {match[0]}")
    return None


def judge_by_mode(call: JudgedCall) -> Judgement | None:
    """Decide what the modes `plan` and `yolo` decide, whatever allows a call or asks about it.

    In yolo, too, crow asks where a rule that denies or asks may be about what a command does.
    """
    kind, mode = call.tool_call.kind, call.permissions.mode
    if kind == "execute" and only_polls_terminal(call.tool_call):
        return Judgement("allow", "it only looks at what was started, or ends it")
    if mode == "plan" and kind not in ("read", "search", "think", "fetch"):
        may_review = kind == "execute" and not find_doubt(call)
        return Judgement("deny", PLAN_MODE, may_review=may_review)
    if mode != "yolo":
        return None
    remark = find_doubt(call)
    return Judgement("ask", remark=remark) if remark else Judgement("allow", YOLO)


def judge_by_protection(call: JudgedCall) -> Judgement | None:
    """Ask about what cannot be known and a strict rule may be about, about crow's own files and protected files."""
    session, permissions, line, start = call.session, call.permissions, call.line, call.start
    own_folders, protected, kind = permissions.own_folders, permissions.protected, call.tool_call.kind
    if remark := find_doubt(call):
        return Judgement("ask", remark=remark)
    path = call.path or resolve(session, call.subject)
    if kind == "edit" and is_below_any(path, own_folders, ignore_case=True):
        return Judgement("ask", remark="These are crow's own files.")
    if kind == "edit" and (protection := find_protection(from_root(session, path), protected)):
        paths = [rule for rule in call.covering if rule.kind == "path"]
        if found := permissions.find_answer(paths, get_folder(session)):
            return to_judgement(found)
        return Judgement("ask", remark=f"{to_line(protection.pattern)}: {protection.reason}.", rules=paths)
    if own := find_own_file(session, line, start, own_folders):
        return Judgement("ask", remark=f"This writes {to_line(own)}, one of crow's own files.")
    remark = find_protection_of_files(session, line, start, protected)
    return Judgement("ask", remark=remark, may_review=True) if remark else None


def judge_by_allowing_rules(call: JudgedCall) -> Judgement | None:
    """Allow what rules allow and what only reads, unless it is the first command after edits that may run code."""
    allowing = find_allowing(call)
    if allowing is None:
        return None
    names = " and ".join(repr(str(rule)) for rule in allowing)
    reason = (f"the rule {names}" if len(allowing) == 1 else f"the rules {names}") if allowing else ONLY_READS
    by_pattern = not allowing or any(rule.pattern is not None for rule in allowing)
    if by_pattern and has_unknown_environment(call):
        return Judgement("ask", reason, by_pattern=True, may_review=True)
    if program := find_runner_after_edits(call.permissions, call.tool_call, call.line):
        return ask_about_runner(program)
    if not allowing:
        return Judgement("allow", reason, by_pattern=True)
    if "" in call.line.unclear and (rule := next((rule for rule in allowing if rule.is_open), None)):
        return Judgement(
            "ask",
            remark=f"What this runs cannot be known, and the rule {str(rule)!r} only says how it begins.",
            may_review=True,
        )
    if (rule := next((rule for rule in allowing if rule.is_open), None)) and writes_unknown_files(call.line):
        return Judgement(
            "ask",
            remark=f"Which files this writes cannot be known, and the rule {str(rule)!r} only says how it begins.",
            may_review=True,
        )
    return Judgement("allow", reason, by_pattern=by_pattern, writes=bool(call.line.writes))


def has_unknown_environment(call: JudgedCall) -> bool:
    """Test whether commands have changed variables and the user has allowed no command since.

    With such variables, an allowed name may start another program.
    """
    environment = call.session.folders.environment
    return call.tool_call.kind == "execute" and environment not in call.permissions.environments


def judge_by_answer(call: JudgedCall) -> Judgement | None:
    """Allow what an answer for longer than once allows, but no tool that destroys and no terminal input."""
    answer, permissions, tool = call.answer, call.permissions, call.tool_call.tool
    if tool and tool.destroys:
        return Judgement("ask")
    if call.to_terminal:  # what a running terminal session makes of it depends on what happened there
        return Judgement("ask", may_review=True)
    if answer is None or (answer.scope != "session" and permissions.mode == "plan"):
        return None
    if has_unknown_environment(call):
        return replace(to_judgement(answer), verdict="ask", answer=None, may_review=answer.allows)
    if answer.scope != "session" and (program := find_runner_after_edits(permissions, call.tool_call, call.line)):
        return ask_about_runner(program)
    if answer.allows and answer.rule.kind == "subcommand" and writes_unknown_files(call.line):
        return Judgement("ask", remark="Which files this writes cannot be known.", may_review=True)
    return replace(to_judgement(answer), writes=answer.allows and bool(call.line.writes))


def judge_by_kind(call: JudgedCall) -> Judgement | None:
    """Allow reading, and edits below the roots in the mode `accept-edits`."""
    kind = call.tool_call.kind
    if kind in ("read", "search", "think"):
        return Judgement("allow", "reading is allowed")
    if kind == "edit" and call.permissions.mode == "accept-edits":
        path = call.path or resolve(call.session, call.subject)
        in_roots = is_below_any(path, call.session.folders.roots)
        return Judgement("allow", "mode accept-edits") if in_roots else None
    return None


JUDGEMENT_STEPS = (
    judge_by_strict_rules,
    judge_by_mode,
    judge_by_protection,
    judge_by_allowing_rules,
    judge_by_answer,
    judge_by_kind,
)


def find_doubt(call: JudgedCall) -> str:
    """Find the sentence about a rule that may be about a part of a command that is not known; "" if there is none."""
    rules, line = call.permissions.rules, call.line
    strict = [rule for rule in (*rules.deny, *rules.ask) if rule.covers(call.tool_call.name)]
    if rule := next((rule for rule in strict if rule.pattern and may_run(call.subject, line, rule.pattern)), None):
        return f"What this runs cannot be known, and the rule {str(rule)!r} may be about it."
    if found := find_rule_for_named_files(call.session, rules, line, call.start):
        return f"This names {to_line(found[0])}, and the rule {str(found[1])!r} is about it."
    if rule := find_rule_for_unknown_files(rules, line, call.start):
        return f"Which files this works with cannot be known, and the rule {str(rule)!r} may be about them."
    return ""


def find_composition(session: Session, tool_call: ToolCall) -> Composition | None:
    """Read a command as a composition of simple ones, if they all run in one folder below a root, and that is certain.

    Its folder becomes absolute, without links.
    """
    command = tool_call.arguments.get("command")
    if tool_call.name != COMMAND_TOOL or not isinstance(command, str):
        return None
    composition = read_composition(command)
    folder = find_own_folder(session, tool_call, composition.folder) if composition else ""
    return replace(composition, folder=folder) if composition and folder else None


def find_allowing(call: JudgedCall) -> list[Rule] | None:
    """Find the rules that allow a call; none of them if its commands only read. None if it is not allowed."""
    session, permissions, tool_call = call.session, call.permissions, call.tool_call
    is_command = tool_call.name == COMMAND_TOOL and tool_call.kind == "execute"
    if call.match:
        rule = call.match[1]
        writes = rule.read_usage(call.subject.split()).writes if is_command else ()
        return [rule] if may_write_files(call, writes, call.start) else None
    composition = find_composition(session, tool_call) if call.may_compose else None
    if composition is None:
        return None
    is_elsewhere = composition.folder != os.path.realpath(session.cwd)
    found = [
        (command, permissions.rules.find_for_command(tool_call.name, command, is_elsewhere=is_elsewhere))
        for command in composition.commands
    ]
    readers = tuple(command for command, rule in found if rule is None)
    if not all(command.only_reads and not command.writes for command in readers):
        return None
    start = composition.folder
    if readers and not may_read(
        session, permissions.rules, permissions.own_folders, call.subject, Composition(readers), start
    ):
        return None
    written = [path for command, rule in found if rule for path in list_written(command, rule)]
    # A command before could make a link of a file that is written, and one after it could run it.
    if written and len(found) > 1 and not composition.is_data:
        return None
    return list(dict.fromkeys(rule for _, rule in found if rule)) if may_write_files(call, written, start) else None


def list_written(command: SimpleCommand, rule: Rule) -> list[str]:
    """List the files that a command writes, by redirections and by options that the rule does not write out."""
    return [*command.writes, *rule.read_usage(command.words).writes]


def may_write_files(call: JudgedCall, paths: Sequence[str], start: str) -> bool:
    """Test whether files that an allowed command, which starts in a folder, writes may be edited without a question."""
    accept_edits = call.permissions.mode == "accept-edits"
    full = [os.path.join(start, path) for path in paths]
    return may_write(call.session, call.permissions.rules, full, accept_edits=accept_edits)


def find_unlisted(call: JudgedCall) -> str:
    """Find the sentence about a word for which a rule does not allow a command; "" if there is none."""
    composition = find_composition(call.session, call.tool_call) if call.may_compose else None
    for command in composition.commands if composition else ():
        if found := call.permissions.rules.find_unlisted(call.tool_call.name, command):
            return (
                f"The rule {str(found[0])!r} does not cover {to_line(found[1])!r}; a rule for the whole command does."
            )
    return ""


def find_runner_after_edits(permissions: SessionPermissions, tool_call: ToolCall, line: CommandLine) -> str:
    """Find the program in an allowed command that may run code that the session changed unasked. Return "" if there is
    none, or if the session was asked about it already. Commands that are known to only read are none."""
    if tool_call.kind != "execute" or permissions.mode != "accept-edits":
        return ""
    if permissions.runs_edits:
        return ""
    command = tool_call.arguments.get("command")
    composition = read_composition(command) if isinstance(command, str) else None
    writes_before = line.writes and (composition is None or len(composition.commands) > 1)
    if not (permissions.has_edits or writes_before):
        return ""
    if composition is None:
        return tool_call.name
    return next((each.words[0] for each in composition.commands if not each.only_reads), "")


def ask_about_runner(program: str) -> Judgement:
    """Ask about a program that runs code which the session may have changed."""
    why = f"{to_line(program)} may run code of this folder, where this session has changed files."
    return Judgement("ask", remark=f"{why} This is asked once in a session.", runs_edits=True)


def to_judgement(answer: KeptAnswer) -> Judgement:
    """Convert an answer for longer than once to a judgement. A command that it allows in every session runs git without
    the programs of the folder, as one that a rule allows."""
    reason = f"the user answered so {answer.place}"
    by_pattern = answer.allows and answer.scope != "session"
    return Judgement("allow" if answer.allows else "deny", reason, answer=answer, by_pattern=by_pattern)
