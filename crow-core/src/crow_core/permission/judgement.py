"""The decision about a tool call, by the mode, the rules and the answers that hold for the session."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from crow_core.mcp.tool import ToolCall
from crow_core.options import Choice
from crow_core.permission.kept_answers import AnswerRule, KeptAnswer, KeptAnswers, find_answer
from crow_core.permission.lasting import get_folder, list_covering_rules
from crow_core.permission.protected import find_protection
from crow_core.permission.rules import Rules, Verdict
from crow_core.permission.simple_commands import CommandLine, read_command_line
from crow_core.permission.subjects import (
    find_spellings,
    find_subject,
    is_for_terminal_session,
    is_inside,
    only_polls_terminal,
    path_from_root,
)
from crow_core.session import Session
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

PLAIN_COMMAND = re.compile(r"(?!\w+\+?=)[\w ./:=@,+%-]*", re.ASCII)
"""A command of these characters alone that sets no variable: the shell runs it as it is written."""


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
    """Whether a rule with a pattern allows it."""
    command: str = ""
    """The command that the user wrote in place of the model's, and allowed."""
    advises: bool = False
    """With the verdict "deny": whether the user said why."""
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
    answers: list[KeptAnswer] = field(default_factory=list[KeptAnswer])
    """Answers for the rest of the session."""
    kept: KeptAnswers | None = None
    """Answers for longer; None if there are none."""
    changed: set[str] = field(default_factory=set[str])
    """The ids of the tool calls whose command the user has changed and allowed."""
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a call is asked about: one at a time, in the order of the calls."""

    def find_answer(self, rules: Sequence[AnswerRule], folder: str) -> KeptAnswer | None:
        """Find the answer that decides a call which these rules cover; a rejection beats a permission."""
        if not rules:
            return None
        return find_answer([*self.answers, *(self.kept.list_all() if self.kept else ())], rules, folder)


def judge(session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> Judgement:
    """Judge a tool call by the rules, the mode and the answers that hold for the session."""
    subject, kind, mode = find_subject(session, tool_call), tool_call.kind, permissions.mode
    to_terminal = kind == "execute" and is_for_terminal_session(tool_call)
    simple = kind != "execute" or (not to_terminal and PLAIN_COMMAND.fullmatch(subject) is not None)
    spellings = find_spellings(session, tool_call, subject)
    strict = [rule for rule in (*permissions.rules.deny, *permissions.rules.ask) if rule.covers(tool_call.name)]
    line = read_command_line(subject) if kind == "execute" and strict else CommandLine()
    match = permissions.rules.find(tool_call.name, subject, [*spellings, *line.commands], simple=simple)
    covering = list_covering_rules(session, tool_call)
    answer = permissions.find_answer(covering, get_folder(session))
    if answer and not answer.allows and not (match and match[0] == "deny"):
        return to_judgement(answer)
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
        paths = [rule for rule in covering if rule.kind == "path"]
        if found := permissions.find_answer(paths, get_folder(session)):
            return to_judgement(found)
        return Judgement("ask", remark=f"{to_line(protection.pattern)}: {protection.reason}.", rules=paths)
    if match and (program := find_runner_after_edits(permissions, tool_call, subject)):
        return ask_about_runner(program)
    if match:
        return Judgement("allow", f"the rule {str(match[1])!r}", by_pattern=match[1].pattern is not None)
    if tool_call.tool and tool_call.tool.destroys:
        return Judgement("ask")
    if to_terminal:  # what a running terminal session makes of it depends on what happened there
        return Judgement("ask")
    if answer and (answer.scope == "session" or mode != "plan"):
        if answer.scope != "session" and (program := find_runner_after_edits(permissions, tool_call, subject)):
            return ask_about_runner(program)
        return to_judgement(answer)
    if kind in ("read", "search", "think"):
        return Judgement("allow", "reading is allowed")
    if kind == "edit" and mode == "accept-edits" and is_inside(session, subject, session.folders.roots):
        return Judgement("allow", "mode accept-edits")
    return Judgement("ask", rules=covering)


def find_runner_after_edits(permissions: SessionPermissions, tool_call: ToolCall, subject: str) -> str:
    """Find the program in an allowed command that runs the folder's code, in a session that has changed files without a
    question and was not asked about that yet; "" if there is none."""
    if tool_call.kind != "execute" or permissions.mode != "accept-edits":
        return ""
    if not permissions.has_edits or permissions.runs_edits:
        return ""
    return read_command_line(subject).find_project_runner()


def ask_about_runner(program: str) -> Judgement:
    """Ask about a program that runs code which the session may have changed."""
    why = f"{to_line(program)} runs code of this folder, where this session has changed files."
    return Judgement("ask", remark=f"{why} This is asked once in a session.", runs_edits=True)


def to_judgement(answer: KeptAnswer) -> Judgement:
    """Convert an answer for longer than once to a judgement. A command that it allows in every session runs git without
    the programs of the folder, as one that a rule allows."""
    reason = f"the user answered so {answer.place}"
    by_pattern = answer.allows and answer.scope != "session"
    return Judgement("allow" if answer.allows else "deny", reason, answer=answer, by_pattern=by_pattern)
