"""Permissions: whether a tool call runs, is asked about, or is denied, by mode, rules and the user's answers.

An extension like any other: `crow.use(permissions, mode="ask", allow=["terminal:git status"], deny=["terminal:rm *"])`.

`crow_permissions` decides: `rules` says what a rule is, `subjects` what it is compared with, `judgement` in which
order rules, mode and answers count.

A rule `*:PATH` that denies or asks covers every tool that names the path, or the folder in its pattern (`*:secrets/*`).
It does not see what a command does with files, nor what a search from a folder above finds.

Permissions guard against accidents. They are not a sandbox: a command that the user allows can do whatever the user
can.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, list_edits
from crow_core.session.options import Option
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line

from crow_permissions.call_questions import ask_about_call
from crow_permissions.command_hosts import begin_review
from crow_permissions.command_review import review_commands
from crow_permissions.decision_record import record
from crow_permissions.git_judgement import judge_git, may_leave_repository
from crow_permissions.judgement import (
    MODES,
    PERMISSIONS,
    YOLO,
    Judgement,
    Mode,
    SessionPermissions,
    find_permissions,
    judge,
)
from crow_permissions.kept_answers import KeptAnswers
from crow_permissions.review import REACHABLE, Review, ReviewSettings, is_own_command
from crow_permissions.rules import Rules, parse_rules, suggest_tool
from crow_permissions.subjects import find_path, find_subject

COMMAND_SHOWN = 1_000
"""Characters of a command that the user has changed, in the record of the decision."""
IN_SANDBOX = "it runs in the sandbox, and what it changes is decided afterwards"
IN_YOLO = (
    "In yolo, commands run unasked, outside of the sandbox, with all that you may do. "
    "To limit them: crow config set sandbox.yolo workspace"
)
IN_YOLO_LIMITED = "In yolo, commands run unasked; they write only to the folders of the session and see no credentials."
YOLO_IS_TOLD = StateKey("yolo_is_told", bool)
RULES_ARE_CHECKED = StateKey("rules_are_checked", bool)
ANSWERS_FAULT = StateKey("answers_fault", str)
"""The last fault of the kept answers that the user was told."""


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
    answers: KeptAnswers | None = None,
    sandbox: ReviewSettings | None = None,
) -> None:
    """Ask before tools act, or, for commands in the `sandbox`, before what they changed is applied.

    `own` are the folders of crow's own settings and data. crow asks about each change in them, and about each change to
    files that run later or instruct an agent; `protected` are patterns of further such files. `project` returns the
    `ask` and `deny` rules of a trusted folder, which can only tighten. In a folder that is not `trusted`, git runs no
    programs of the folder when a rule allows it. `answers` keeps the user's answers for longer than a session; without
    it, none can be given. Raises ValueError for an invalid rule.
    """
    crow.takes_permission_answers = True
    review = Review(sandbox, crow.must_ask) if sandbox else None
    allowed, asked, denied = parse_rules(allow, allows=True), parse_rules(ask), parse_rules(deny)

    def get_permissions(session: Session) -> SessionPermissions:
        known = find_permissions(session)
        if known is None:
            while session.parent:
                session = session.parent
            more_ask, more_deny = project(session.cwd) if project else ((), ())
            rules = Rules(allowed, [*asked, *parse_rules(more_ask)], [*denied, *parse_rules(more_deny)])
            known = session.state[PERMISSIONS] = SessionPermissions(mode, rules, own, protected, kept=answers)
            known.has_edits = any(list_edits(entry) or entry.get("crow", {}).get("writes") for entry in session.log)
        return known

    @crow.before_prompt
    async def warn_of_misspelt_rules(message: Message, session: Session) -> None:
        if session.parent or session.state[RULES_ARE_CHECKED]:
            return
        session.state[RULES_ARE_CHECKED] = True
        tools = {str(each["name"]) for server in session.toolbox.servers for each in server.definitions or ()}
        rules = get_permissions(session).rules
        for rule in (*rules.allow, *rules.ask, *rules.deny):
            if meant := suggest_tool(rule, tools):
                text = f"The permission rule {str(rule)!r} never matches: no tool has this name. Is {meant} meant?"
                await session.notice(to_line(text), "warning")

    @crow.options
    def mode_option(session: Session) -> Option:
        def choose(value: str) -> None:
            if session.parent:  # its mode is its own from now on
                session.state[PERMISSIONS] = replace(get_permissions(session), mode=cast(Mode, value))
            get_permissions(session).mode = cast(Mode, value)

        return Option("mode", "Mode", "mode", MODES, lambda: get_permissions(session).mode, choose)

    @crow.before_announcement
    async def decide_at_once(session: Session, tool_call: ToolCall) -> None:
        """Record a decision that needs neither git nor the user, so that it is stored together with the reply."""
        if session.toolbox.reject(tool_call) is None:
            keep_places(session, tool_call)
            judgement = await collect_reasons(session, tool_call, judge(session, get_permissions(session), tool_call))
            may_review = review is not None and judgement.may_review
            may_review = may_review or is_limited(tool_call, judgement)
            if judgement.verdict != "ask" and not may_review and not may_run_git(session, tool_call, judgement):
                record(session, tool_call, judgement)

    @crow.before_tool.last
    async def decide(session: Session, tool_call: ToolCall) -> ToolResult | ToolCall | None:
        keep_places(session, tool_call)
        environment = session.folders.environment
        if review and is_own_command(tool_call):
            await review.renew(session)
        judgement = await judge_with_git(session, tool_call)
        if is_changed_by_user(get_permissions(session), tool_call):
            judgement = to_changed(judgement, find_subject(session, tool_call))
        elif judgement.may_review and review:
            if await begin_review(review, session, get_permissions(session), tool_call):
                record(session, tool_call, Judgement("allow", IN_SANDBOX))
                return None
            judgement = await judge_with_git(session, tool_call, reviews=False)
        fault = ""
        if review and is_limited(tool_call, judgement):
            fault = await review.begin_limited(session, get_permissions(session), tool_call)
            judgement = Judgement("ask", remark=fault, because=fault) if fault else judgement
        if judgement.verdict == "ask":
            async with get_permissions(session).queue:
                # The answer to the call before may have settled this one, or the mode may have changed.
                environment = session.folders.environment
                judgement = judgement if fault else await judge_with_git(session, tool_call, reviews=False)
                if judgement.verdict == "ask":
                    judgement = await ask_about_call(session, get_permissions(session), tool_call, judgement)
        if judgement.command:  # which is decided anew; the user is not asked again, but what denies still denies it
            get_permissions(session).changed[tool_call.id] = judgement.command
            return tool_call.change_arguments(command=judgement.command)
        record(session, tool_call, judgement)
        get_permissions(session).has_edits |= judgement.writes
        if judgement.verdict == "allow" and (judgement.by_pattern or judgement.answer):
            session.folders.judged[tool_call.id] = environment
        return to_refusal(judgement) if judgement.verdict == "deny" else None

    async def judge_with_git(session: Session, tool_call: ToolCall, *, reviews: bool = True) -> Judgement:
        """Judge a call. `may_review` of the judgement says whether its command runs in the sandbox."""
        judgement = judge(session, get_permissions(session), tool_call)
        if may_run_git(session, tool_call, judgement):
            judgement = await judge_git(session, tool_call, judgement)
        session.state[REACHABLE].pop(tool_call.id, None)
        may_review = reviews and judgement.may_review
        mode = get_permissions(session).mode
        may_review = may_review and review is not None and await review.may_begin(session, mode, tool_call)
        judgement = replace(judgement, may_review=may_review)
        return await collect_reasons(session, tool_call, judgement)

    def is_limited(tool_call: ToolCall, judgement: Judgement) -> bool:
        """Test whether a command that the mode yolo allows writes only to the folders."""
        limits = review is not None and review.settings.limits_yolo
        return limits and judgement.reason == YOLO and is_own_command(tool_call)

    async def collect_reasons(session: Session, tool_call: ToolCall, judgement: Judgement) -> Judgement:
        """Ask where an extension says so, whatever allows the call; the answer holds once."""
        denies = judgement.verdict == "deny"
        if (denies and not judgement.may_review) or get_permissions(session).mode == "yolo":
            return judgement
        if not (reasons := await crow.must_ask.run(session, tool_call)):
            return judgement
        if denies:
            return replace(judgement, may_review=False)
        remark = "\n\n".join(filter(None, [judgement.remark, *reasons]))
        because = reasons[0].partition("\n")[0]
        return replace(
            judgement, verdict="ask", rules=(), answer=None, remark=remark, because=because, may_review=False
        )

    def may_run_git(session: Session, tool_call: ToolCall, judgement: Judgement) -> bool:
        """Test whether a rule allows a command that may be a git command, in a repository that is not trusted."""
        if not judgement.by_pattern or tool_call.kind != "execute":
            return False
        return not trusted(Path(session.cwd)) or may_leave_repository(session, tool_call)

    if review:
        review_commands(crow, review, get_permissions, partial(judge_with_git, reviews=False))

    @crow.before_prompt
    async def tell_of_yolo(message: Message, session: Session) -> None:
        """Say once in a session what its commands may do in the mode yolo."""
        if session.parent or get_permissions(session).mode != "yolo" or session.state[YOLO_IS_TOLD]:
            return
        session.state[YOLO_IS_TOLD] = True
        is_limited = review is not None and review.settings.limits_yolo
        await session.notice(IN_YOLO_LIMITED if is_limited else IN_YOLO)

    @crow.after_tool
    def follow_shell(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        session.folders.starts.pop(tool_call.id, None)
        session.folders.paths.pop(tool_call.id, None)
        session.folders.environments.pop(tool_call.id, None)
        session.folders.judged.pop(tool_call.id, None)
        if shell := result.meta.get("crow/shell"):
            session.folders.variables = shell.get("variables", ())
            session.folders.environment = shell.get("environment", "")
        if folder := result.meta.get("crow/folder"):
            session.folders.current = folder
        if result.meta.get("crow/changes"):
            get_permissions(session).has_edits = True
        changed = get_permissions(session).changed.pop(tool_call.id, None)
        if changed is not None and changed == tool_call.arguments.get("command"):
            note = ToolResult.text(f"The user changed the command. It was: {changed}")
            return replace(result, content=[*note.content, *result.content])
        return None

    @crow.before_prompt
    async def warn(message: Message, session: Session) -> None:
        """Say once that kept answers cannot be read."""
        if answers and not session.parent:
            answers.list_all()
            if answers.fault and session.state[ANSWERS_FAULT] != answers.fault:
                session.state[ANSWERS_FAULT] = answers.fault
                await session.notice(answers.fault, "warning")


def is_changed_by_user(permissions: SessionPermissions, tool_call: ToolCall) -> bool:
    """Return whether the command of a tool call is the one that the user wrote in place of the model's."""
    command = permissions.changed.get(tool_call.id)
    return command is not None and command == tool_call.arguments.get("command")


def to_changed(judgement: Judgement, command: str) -> Judgement:
    """Convert the judgement about a command that the user wrote and allowed."""
    if judgement.verdict == "deny":
        return judgement
    return Judgement("allow", f"the user, who changed the command to: {to_line(command[:COMMAND_SHOWN])}")


def to_refusal(judgement: Judgement) -> ToolResult:
    """Convert a denial to the result of its tool call."""
    advice = "" if judgement.advises else " Do not try to reach the same by another way; ask."
    refusal = f"This was not run: {judgement.reason.rstrip('.')}.{advice}"
    return replace(ToolResult.error(refusal), meta={"crow/denied": judgement.reason})


def keep_places(session: Session, tool_call: ToolCall) -> None:
    """Keep the folder in which a command starts, and the file to which a call's path leads now.

    The call is judged for these, so it runs there, and the tool works with no other file.
    """
    session.folders.starts.setdefault(tool_call.id, session.folders.current or session.cwd)
    session.folders.paths.pop(tool_call.id, None)
    if isinstance(tool_call.arguments.get("path"), str):
        session.folders.paths[tool_call.id] = find_path(session, tool_call)
