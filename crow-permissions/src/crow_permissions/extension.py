"""Permissions: whether a tool call runs, is asked about, or is denied, by mode, rules and the user's answers.

An extension like any other: `crow.use(permissions, mode="ask", allow=["terminal:git status"], deny=["terminal:rm *"])`.

`crow_permissions` decides: `rules` says what a rule is, `subjects` what it is compared with, `judgement` in which
order rules, mode and answers count.

A rule `*:PATH` that denies or asks covers every tool that names the path, or the folder in its pattern (`*:secrets/*`).
It does not see what a command does with files, nor what a search from a folder above finds.

Permissions guard against accidents. They are not a sandbox: a command that the user allows can do whatever the user
can.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec
from crow_core.acp.schema import BlockContent, DiffContent, StopReason, TextBlock, ToolCallContent, ToolCallFields
from crow_core.app import Crow
from crow_core.content import to_announcement, to_update
from crow_core.errors import ConfigError
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, find_markers_of_call, list_edits
from crow_core.messages.notes import Notes
from crow_core.session.options import Option
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import show_invisible, to_line
from crow_system.git import (
    find_foreign_settings,
    find_git_options,
    is_same_repository,
    make_git_environment,
    restore_variables,
)

from crow_permissions.command_files import list_folders
from crow_permissions.command_hosts import (
    HostsAnswer,
    any_named,
    ask_about_hosts,
    complains,
    find_host_patterns,
    list_asking,
    list_denied,
    list_hosts,
    list_offered,
)
from crow_permissions.judgement import (
    MODES,
    ONLY_READS,
    PERMISSIONS,
    YOLO,
    Judgement,
    Mode,
    SessionPermissions,
    find_composition,
    find_permissions,
    judge,
)
from crow_permissions.kept_answers import KeptAnswer, KeptAnswers
from crow_permissions.lasting import get_folder, list_offers
from crow_permissions.review import (
    REACHABLE,
    Review,
    ReviewedCommand,
    ReviewSettings,
    add_note,
    find_opened,
    finish_in_thread,
    is_own_command,
    return_to_start,
    settle_changes,
    take_names,
)
from crow_permissions.rules import Rules, parse_rules, suggest_tool
from crow_permissions.running import find_sign_of_crow
from crow_permissions.session_review import MISSES, change_hosts, end_session, settle_session
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import read_command_line
from crow_permissions.subjects import find_path, find_start, find_subject

VARIABLES_SHOWN = 10
"""Names of variables in a question."""
COMMAND_SHOWN = 1_000
"""Characters of a command that the user has changed, in the record of the decision."""
IN_SANDBOX = "it runs in the sandbox, and what it changes is decided afterwards"
WANTS_MORE = (
    "In the sandbox, this failed for want of the network or of a daemon. Allowed, it runs again, outside of it."
)
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
    review = Review(sandbox) if sandbox else None
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
            if await begin_review(session, tool_call):
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
                    because = judgement.because
                    judgement = await ask_user(session, get_permissions(session), tool_call, judgement)
                    if because and judgement.verdict == "deny":
                        judgement = replace(judgement, reason=f"{judgement.reason}. {because.rstrip('.')}")
        if judgement.command:  # which is decided anew; the user is not asked again, but what denies still denies it
            get_permissions(session).changed[tool_call.id] = judgement.command
            return tool_call.change_arguments(command=judgement.command)
        record(session, tool_call, judgement)
        get_permissions(session).has_edits |= judgement.writes
        if judgement.verdict == "allow" and (judgement.by_pattern or judgement.answer):
            session.folders.judged[tool_call.id] = environment
        if judgement.verdict == "deny":
            advice = "" if judgement.advises else " Do not try to reach the same by another way; ask."
            refusal = f"This was not run: {judgement.reason.rstrip('.')}.{advice}"
            return replace(ToolResult.error(refusal), meta={"crow/denied": judgement.reason})
        return None

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
        folders = [os.path.realpath(folder.replace(UNKNOWN, "?")) for folder in list_git_folders(session, tool_call)]
        return not trusted(Path(session.cwd)) or not all(is_same_repository(each, session.cwd) for each in folders)

    @crow.after_tool
    async def review_changes(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        """Apply or discard what a command in the sandbox changed, if this result tells that it has ended.

        So is what is new in a session of the terminal in the sandbox, if the result is about one.
        """
        if review and (used := review.take_used(session, tool_call, result)):
            return await look_at_session(session, tool_call, result, *used)
        command = review.take_ended(session, tool_call, result) if review else None
        if command is None:
            return None
        if command.run.policy.level == "workspace":
            await finish_in_thread(command.run.remove)
            return None
        permissions = get_permissions(session)
        because = ""
        may_repeat = command.tool_call.id == tool_call.id and permissions.mode != "plan"
        while may_repeat and (answer := await ask_for_hosts(session, command, result)):
            again = await run_again(session, command, answer.hosts) if answer.allowed else None
            if again is None:
                because = answer.by
                break
            ended, result = again
            if ended is None:  # it runs on
                return result
            command = ended
        if may_repeat and result.meta.get("crow/exit") and complains(result) and not command.list_refused():
            await finish_in_thread(command.run.remove)
            return return_to_start(session, command, await run_outside(session, tool_call, result))
        result = command.add_refused(result, because)
        result, found, decision = await settle_changes(session, permissions, command, result)
        if decision:
            if decision.answer and decision.choice:
                await keep(session, permissions, decision.answer)
            verdict = "allow" if decision.applies else "deny"
            decided = Judgement(verdict, decision.by, answer=decision.answer, writes=decision.applies)
            permissions.has_edits |= decision.applies
            record(session, command.tool_call, decided, take_names(found))
        return return_to_start(session, command, result)

    async def look_at_session(
        session: Session, tool_call: ToolCall, result: ToolResult, command: ReviewedCommand, has_ended: bool
    ) -> ToolResult | None:
        """Decide about what is new in a session of the terminal; discarding ends it."""
        assert review
        permissions, decision, found = get_permissions(session), None, None
        async with command.looking:
            if command.lasting:
                result = await ask_for_session(session, command, tool_call, result)
                result, found, decision = await settle_session(session, permissions, command, tool_call, result)
            ends = decision is not None and not decision.applies and not decision.failed
            if ends or has_ended:
                review.forget(session, command.tool_call.id)
                await (finish_in_thread(command.remove) if has_ended else end_session(session, command, tool_call))
        if ends and not has_ended:
            result = add_note(result, "The session has ended, as its programs have seen the discarded files")
        if decision and found:
            if decision.answer and decision.choice:
                await keep(session, permissions, decision.answer)
            verdict = "allow" if decision.applies else "deny"
            permissions.has_edits |= decision.applies
            decided = Judgement(verdict, decision.by, answer=decision.answer, writes=decision.applies)
            record(session, tool_call, decided, take_names(found))
        return result

    async def ask_for_session(
        session: Session, command: ReviewedCommand, tool_call: ToolCall, result: ToolResult
    ) -> ToolResult:
        """Ask about the hosts that a session was refused since the last look, and allow them to it from now on."""
        network, permissions = command.run.network, get_permissions(session)
        if network is None:
            return result
        refused, mark = command.list_refused(), network.mark()
        asked = replace(command, tool_call=tool_call)
        if not refused and result.meta.get("crow/exit") and complains(result):
            result = add_note(result, MISSES)
        answer = await ask_for_hosts(session, asked, result) if permissions.mode != "plan" else None
        command.decisions = mark
        if answer is None or not answer.allowed:
            return asked.add_refused(result, answer.by if answer else "")
        denied = [each for each in command.run.policy.denied if not any_named([each], answer.hosts)]
        change_hosts(command, [*(command.run.policy.hosts or ()), *answer.hosts], denied)
        names = ", ".join(each.where for each in refused)
        return add_note(result, f"It asked for {names}, which the user allows to this session now: try again")

    async def begin_review(session: Session, tool_call: ToolCall) -> bool:
        """Begin a command in the sandbox. If an extension asks before it may reach a host, it reaches none yet."""
        assert review
        permissions, folder = get_permissions(session), get_folder(session)
        hosts = list_hosts(permissions, folder, review.settings.hosts)
        if opened := find_opened(session, tool_call):
            hosts = [*(opened.run.policy.hosts or ())]
        session.state[REACHABLE][tool_call.id] = hosts
        if hosts and await crow.must_ask.run(session, tool_call):
            hosts = []
            if opened:
                change_hosts(opened, [], opened.run.policy.denied)
        denied = [*list_denied(permissions, folder), *find_host_patterns(permissions.rules.ask)]
        return await review.begin(session, permissions, tool_call, hosts, denied)

    async def ask_for_hosts(session: Session, command: ReviewedCommand, result: ToolResult) -> HostsAnswer | None:
        """Ask about the hosts that a command was refused; None if there is no question.

        There is none if the command succeeded and does not complain: what it asked for was of no importance.
        """
        assert review
        permissions, folder, tool_call = get_permissions(session), get_folder(session), command.tool_call
        refused = command.list_refused()
        if not refused or not (result.meta.get("crow/exit") or complains(result, refused)):
            return None
        try:
            async with permissions.queue:
                hosts = list_offered(permissions, folder, refused, command.run.policy)
                if not hosts or permissions.mode == "yolo":
                    return None
                session.state[REACHABLE][tool_call.id] = hosts
                reasons = [*await crow.must_ask.run(session, tool_call), *list_asking(permissions.rules.ask, hosts)]
                if not reasons and {*hosts} <= {*list_hosts(permissions, folder, review.settings.hosts)}:
                    return HostsAnswer(hosts, True, "an earlier answer")
                asked = ask_about_hosts(session, permissions, tool_call, hosts, reasons, goes_on=command.is_in_terminal)
                answer = await asked
                if answer.answer:
                    await keep(session, permissions, answer.answer)
        except BaseException:
            if not command.is_in_terminal:
                await finish_in_thread(command.run.remove)
            raise
        finally:
            session.state[REACHABLE].pop(tool_call.id, None)
        verdict, may = ("allow", "may") if answer.allowed else ("deny", "may not")
        by = f"it {may} reach {', '.join(hosts)}: {answer.by}"
        record(session, tool_call, Judgement(verdict, by, answer=answer.answer))
        return answer

    async def run_again(
        session: Session, command: ReviewedCommand, hosts: Sequence[str]
    ) -> tuple[ReviewedCommand | None, ToolResult] | None:
        """Discard what a command changed, and run it again with more hosts; None if it cannot begin.

        Return the command with its result; None for a command that has not ended.
        """
        assert review
        policy, tool_call = command.run.policy, command.tool_call
        denied = [each for each in policy.denied if not any_named([each], hosts)]
        more = [*(policy.hosts or ()), *hosts]
        if not await review.begin(session, get_permissions(session), tool_call, more, denied):
            return None
        await finish_in_thread(command.run.remove)
        result = await session.toolbox.call(tool_call, session.meta(tool_call), session)
        return review.take_ended(session, tool_call, result), result

    async def run_outside(session: Session, tool_call: ToolCall, result: ToolResult) -> ToolResult:
        """Ask whether a command that has failed for want of a network or a daemon runs outside of the sandbox."""
        permissions = get_permissions(session)
        async with permissions.queue:
            judgement = await judge_with_git(session, tool_call, reviews=False)
            if judgement.verdict == "ask":
                remark = "\n\n".join(filter(None, [WANTS_MORE, judgement.remark]))
                judgement = await ask_user(session, permissions, tool_call, replace(judgement, remark=remark))
        record(session, tool_call, judgement)
        if judgement.verdict == "deny":
            result.meta["crow/stays"] = []
            said = "It ran in the sandbox, which has no network; what it changed is discarded. Outside of it"
            return add_note(result, f"{said}: {judgement.reason}")
        changes = {"command": judgement.command} if judgement.command else {}
        outside = tool_call.change_arguments(**changes) if changes else tool_call
        return await session.toolbox.call(outside, session.meta(outside), session)

    @crow.after_tool
    async def renew_sessions(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        """Let the programs of sessions in the sandbox see what a tool has changed."""
        if review and (changes := result.meta.get("crow/changes")):
            await review.renew(session, [change["path"] for change in changes])

    @crow.turn_end
    async def note_applied(session: Session, outcome: StopReason | Exception) -> None:
        if review:
            await review.note_applied(session)

    @crow.turn_end
    async def drop_cancelled(session: Session, outcome: StopReason | Exception) -> None:
        if review:
            await review.drop_cancelled(session)

    @crow.session_end
    async def close_sandbox(session: Session) -> None:
        if review:
            await review.close(session)

    @crow.before_prompt
    async def finish_earlier(message: Message, session: Session) -> None:
        if review:
            await review.finish_earlier(session)
            await review.note_applied(session)
            await review.tell_level(session, get_permissions(session).mode)

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


def keep_places(session: Session, tool_call: ToolCall) -> None:
    """Keep the folder in which a command starts, and the file to which a call's path leads now.

    The call is judged for these, so it runs there, and the tool works with no other file.
    """
    session.folders.starts.setdefault(tool_call.id, session.folders.current or session.cwd)
    session.folders.paths.pop(tool_call.id, None)
    if isinstance(tool_call.arguments.get("path"), str):
        session.folders.paths[tool_call.id] = find_path(session, tool_call)


def record(session: Session, tool_call: ToolCall, judgement: Judgement, changed: Sequence[str] = ()) -> None:
    """Append a decision to the log, unless the last one on this call since the reply is the same.

    `changed` names the files that a command in the sandbox changed, if the decision is about these.
    """
    scope = to_scope(judgement.answer) if judgement.answer else "once"
    decision: Notes = {"kind": "decision", "is": judgement.verdict, "by": judgement.reason, "scope": scope}
    decision |= identify(tool_call)
    if judgement.writes:
        decision["writes"] = True
    if changed:
        decision["changed"] = [*changed]
    notes = find_markers_of_call(session.log, tool_call.id)
    last = next((note for note in notes if note.get("kind") == "decision"), None)
    if last is None or not decision.items() <= last.items():
        session.log.append({"crow": decision})


async def judge_git(session: Session, tool_call: ToolCall, judgement: Judgement) -> Judgement:
    """Judge a command that a rule allows, in a folder that is not trusted: git must not run the folder's programs.

    Those that can be switched off are; if the settings of the repository may name others, the user is asked.
    """
    composition = find_composition(session, tool_call)
    commands = composition.commands if composition else ()
    folders = list_git_folders(session, tool_call)
    words = [command.words for command in commands] or [find_subject(session, tool_call).split()]
    given = [option for each in words if (option := find_git_options(each)) is not None]
    if not given:
        return judgement
    options = next(filter(None, given), "")
    session.folders.environments[tool_call.id] = restore_variables(session.folders.variables) | make_git_environment()
    try:
        if any(UNKNOWN in folder for folder in folders):
            raise OSError("it is not known in which folder git runs")
        found = [await asyncio.to_thread(find_foreign_settings, folder) for folder in filter(os.path.isdir, folders)]
        foreign = list(dict.fromkeys(chain.from_iterable(found)))
        reason = f"its settings may run programs: {', '.join(foreign[:5])}" if foreign else ""
    except OSError as error:
        reason = f"its settings cannot be read: {error}"
    if options:
        reason = f"{options} may choose another repository, or programs"
    if len(commands) > 1 and not all(command.is_data_command for command in commands):
        reason = reason or "another command in the same line may change its settings"
    if not reason:
        return judgement
    source = f"the answer {str(judgement.answer)!r}" if judgement.answer else judgement.reason
    allows = "this only reads" if source == ONLY_READS else f"{source} allows this"
    remark = f"{allows}, but the repository is not trusted, and {to_line(reason[:500])}."
    return Judgement("ask", remark=remark[:1].upper() + remark[1:], may_review=True)


def list_git_folders(session: Session, tool_call: ToolCall) -> list[str]:
    """List the folders in which an allowed command may run git; a composition has one."""
    if composition := find_composition(session, tool_call):
        return [composition.folder]
    line = read_command_line(find_subject(session, tool_call))
    return list_folders(line, find_start(session, tool_call))


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
        title=show_invisible(to_line(subject[:200]) if moves else announcement.title),
        name=announcement.name,
        kind=tool_call.kind,
        status="pending",
        locations=announcement.locations,
        raw_input=announcement.raw_input,
        content=await preview(session, tool_call) if tool_call.kind == "edit" else msgspec.UNSET,
    )
    environment = session.folders.environment
    if tool_call.kind == "execute" and environment not in permissions.environments:
        remark = "\n\n".join(filter(None, [judgement.remark, describe_variables(session.folders.variables)]))
        judgement = replace(judgement, remark=remark)
    if judgement.remark:
        shown = [] if isinstance(about.content, msgspec.UnsetType) else about.content or []
        about.content = [BlockContent(content=TextBlock(text=judgement.remark)), *shown]
    offers = list_offers(judgement.rules, get_folder(session), kept=permissions.kept is not None)
    answer = await session.user.ask_allowed(about, [offer.to_option() for offer in offers])
    permissions.runs_edits |= judgement.runs_edits and answer.allowed
    permissions.environments |= {environment} if answer.allowed and tool_call.kind == "execute" else set()
    if answer.allowed and answer.choice.command and can_change(tool_call):
        return Judgement("allow", answer.reason, command=answer.choice.command)
    chosen = next((offer.answer for offer in offers if offer.option_id == answer.choice.option_id), None)
    if chosen:
        await keep(session, permissions, chosen)
    verdict = "allow" if answer.allowed else "deny"
    return Judgement(verdict, answer.reason, answer=chosen, advises=bool(answer.choice.reason) and not answer.allowed)


def describe_variables(names: Sequence[str]) -> str:
    """Describe the variables that commands have changed, for a question."""
    shown = ", ".join(to_line(name[:100]) for name in names[:VARIABLES_SHOWN])
    more = f" and {len(names) - VARIABLES_SHOWN} more" if len(names) > VARIABLES_SHOWN else ""
    what = f"Commands have changed variables for those that follow: {shown}{more}."
    return f"{what} What rules and earlier answers allow may be other programs with them. This is asked once."


def can_change(tool_call: ToolCall) -> bool:
    """Test whether a client may send another command with its answer."""
    return tool_call.kind == "execute" and isinstance(tool_call.arguments.get("command"), str)


async def keep(session: Session, permissions: SessionPermissions, answer: KeptAnswer) -> None:
    """Keep an answer, for the session at least."""
    if answer.scope != "session" and permissions.kept:
        try:
            if answer.allows and (sign := find_sign_of_crow(permissions.kept.file.parent)):
                raise ConfigError(f"another crow has started this one ({sign}), and its client may be a model.")
            await asyncio.to_thread(permissions.kept.add, answer)
            return
        except (ConfigError, OSError) as error:
            await session.notice(f"The answer holds for this session only: {error}", "warning")
    permissions.answers[:] = [*(each for each in permissions.answers if each.rule != answer.rule), answer]


def to_scope(answer: KeptAnswer) -> str:
    """Convert an answer to the scope of a decision in the log."""
    place = f"folder {to_line(answer.folder)}" if answer.scope == "folder" else answer.scope
    return f"{place}: {answer.rule.describe()}"


async def preview(session: Session, tool_call: ToolCall) -> "list[ToolCallContent] | msgspec.UnsetType":
    """Let the tool make the diff of an edit without writing it; UNSET if it cannot.

    A handler would write, so it does not run: it is not given a session. The file that another agent wants to write is
    shown as it will be.
    """
    server, text = tool_call.tool and tool_call.tool.server, tool_call.arguments.get("file_text")
    if server and server.source is None and isinstance(text, str):
        return [DiffContent(path=str(tool_call.arguments.get("path")), new_text=mask(text, session.secrets))]
    result = await session.toolbox.call(tool_call, session.meta(tool_call, **{"crow/dry_run": True}))
    content = to_update(result.mask(session.secrets), tool_call).content
    return msgspec.UNSET if result.is_error or content is None else content


def identify(tool_call: ToolCall) -> Notes:
    """Identify a tool call in a decision: its id, its tool, and a digest of its arguments, as they run."""
    use = tool_call.use
    name, arguments = use["function"]["name"], use["function"]["arguments"]
    if tool_call.is_changed:
        arguments = msgspec.json.encode(tool_call.arguments).decode()
    digest = hashlib.sha256(arguments.encode(errors="surrogatepass")).hexdigest()
    return {"call": use["id"], "tool": name, "arguments": digest}
