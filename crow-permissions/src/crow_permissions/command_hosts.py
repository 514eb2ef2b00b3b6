"""The hosts that commands in the sandbox may reach, by the settings, the user's answers and the rules of `fetch`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.text import to_line

from crow_permissions.call_questions import ask, keep, to_question
from crow_permissions.decision_record import record
from crow_permissions.judgement import Judgement, SessionPermissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, now
from crow_permissions.lasting import Offer, get_folder, offer_rule
from crow_permissions.review import REACHABLE, Review, ReviewedCommand, find_opened, finish_in_thread
from crow_permissions.rules import COMMAND_TOOL, Rule

if TYPE_CHECKING:
    from crow_sandbox.policy import Policy
    from crow_sandbox.proxy import Decision

FETCH = "fetch"
URL_PATTERN = re.compile(r"(?:[a-z*?]+://)?([^/]+)(/.*)?", re.IGNORECASE)
"""The pattern of a rule about URLs: a scheme, a host with a port, a path."""
HOSTS_LIMIT = 10
"""The most hosts that a question names; the next one names others."""
SEPARATOR = ", "
"""Stands between the hosts of an answer."""
COMPLAINTS = re.compile(
    r"could not resolve host|temporary failure in name resolution|name or service not known|network is unreachable"
    r"|no address associated|failed to lookup address|dns error|getaddrinfo|ENOTFOUND|EAI_AGAIN|ENETUNREACH"
    r"|connection refused|could not connect to server|couldn't connect to server|proxy (?:connect|error|refused)"
    r"|docker daemon|tunnel (?:connection )?failed|tunnel error",
    re.IGNORECASE,
)
"""Finds complaints of programs that did not reach a network, a server of this machine or a daemon."""


def list_hosts(permissions: SessionPermissions, folder: str, hosts: Iterable[str]) -> list[str]:
    """List the patterns of the hosts that commands may reach: those of the settings, and those of answers."""
    answered = [host for answer in list_answers(permissions, folder) if answer.allows for host in to_hosts(answer)]
    return list(dict.fromkeys([*hosts, *answered]))


def list_answers(permissions: SessionPermissions, folder: str) -> list[KeptAnswer]:
    """List the answers about hosts of commands that hold in a folder: in the mode plan, those for the session."""
    answers = [each for each in permissions.list_answers() if each.scope == "session" or permissions.mode != "plan"]
    return [each for each in answers if each.rule.kind == "reach" and each.folder in ("", folder)]


def to_hosts(answer: KeptAnswer) -> list[str]:
    """Return the hosts that an answer is about."""
    return answer.rule.value.split(SEPARATOR)


def list_denied(permissions: SessionPermissions, folder: str) -> list[str]:
    """List the patterns of the hosts that are denied to `fetch`, by rules and answers: no command reaches them."""
    answers = [
        each.rule.value
        for each in permissions.list_answers()
        if each.rule.kind == "host" and not each.allows and each.folder in ("", folder)
    ]
    return [*find_host_patterns(permissions.rules.deny), *answers]


def find_host_patterns(rules: Iterable[Rule]) -> list[str]:
    """Find the hosts that rules about URLs name, as shell patterns of HOST or HOST:PORT.

    A rule that names no host, but paths or the whole tool, says nothing about the hosts of commands.
    """
    found: list[str] = []
    for rule in rules:
        pattern = rule.pattern or ""
        is_about_urls = rule.covers(FETCH) and (rule.tool == FETCH or "://" in pattern)
        if is_about_urls and (parts := URL_PATTERN.fullmatch(pattern)):
            host, path = parts[1].lower(), parts[2] or ""
            if host.strip("*?") or not path.strip("/*"):
                found.append(host)
    return found


def list_asking(rules: Iterable[Rule], hosts: Sequence[str]) -> list[str]:
    """Say which rules ask about these hosts."""
    return [f"The rule {str(rule)!r} says ask." for rule in rules if any_named(find_host_patterns([rule]), hosts)]


def any_named(patterns: Iterable[str], hosts: Sequence[str]) -> bool:
    """Test whether shell patterns name one of these hosts, which may have a port."""
    names = {name for host in hosts for name in (host, host.partition(":")[0])}
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


@dataclass(frozen=True)
class HostsAnswer:
    """The user's answer about the hosts that a command asked for."""

    hosts: Sequence[str]
    """The hosts that the question named."""
    allowed: bool
    by: str
    answer: KeptAnswer | None = None
    """The answer, if it holds for longer than once."""


def list_offered(
    permissions: SessionPermissions, folder: str, refused: "Sequence[Decision]", policy: "Policy"
) -> list[str]:
    """List the hosts about which the user may be asked, of those that a command was refused.

    These are public, and not denied by a rule or an answer; the `policy` of the command did not allow them already.
    """
    from crow_sandbox.hosts import names_host  # imported here: a session may run no command

    denied = list_denied(permissions, folder)
    allowed = [host for host in policy.hosts or () if not any_named(policy.denied, [host])]
    rejected = {host for each in list_answers(permissions, folder) if not each.allows for host in to_hosts(each)}
    hosts = [
        each.pattern
        for each in refused
        if each.pattern not in ("", *allowed) and not names_host(denied, each.host, each.port)
    ]
    return [host for host in dict.fromkeys(hosts) if host not in rejected][:HOSTS_LIMIT]


def complains(result: ToolResult, refused: "Sequence[Decision]" = ()) -> bool:
    """Test whether a command says that it has not reached a network, a server or a daemon, or names a refused host."""
    texts = [str(block.get("text", ""))[-20_000:] for block in result.content]
    return any(COMPLAINTS.search(text) or any(each.host in text for each in refused) for text in texts)


async def begin_review(review: Review, session: Session, permissions: SessionPermissions, tool_call: ToolCall) -> bool:
    """Begin a command in the sandbox. If an extension asks before it may reach a host, it reaches none yet."""
    folder = get_folder(session)
    hosts = list_hosts(permissions, folder, review.settings.hosts)
    if opened := find_opened(session, tool_call):
        hosts = [*(opened.run.policy.hosts or ())]
    session.state[REACHABLE][tool_call.id] = hosts
    if hosts and await review.must_ask.run(session, tool_call):
        hosts = []
        if opened:
            opened.change_hosts([], opened.run.policy.denied)
    denied = [*list_denied(permissions, folder), *find_host_patterns(permissions.rules.ask)]
    return await review.begin(session, permissions, tool_call, hosts, denied)


async def ask_for_hosts(
    review: Review, session: Session, permissions: SessionPermissions, command: ReviewedCommand, result: ToolResult
) -> HostsAnswer | None:
    """Ask about the hosts that a command was refused; None if there is no question.

    There is none if the command succeeded and does not complain: what it asked for was of no importance.
    """
    folder, tool_call = get_folder(session), command.tool_call
    refused = command.list_refused()
    if not refused or not (result.meta.get("crow/exit") or complains(result, refused)):
        return None
    try:
        async with permissions.queue:
            hosts = list_offered(permissions, folder, refused, command.run.policy)
            if not hosts or permissions.mode == "yolo":
                return None
            session.state[REACHABLE][tool_call.id] = hosts
            reasons = [*await review.must_ask.run(session, tool_call), *list_asking(permissions.rules.ask, hosts)]
            if not reasons and {*hosts} <= {*list_hosts(permissions, folder, review.settings.hosts)}:
                return HostsAnswer(hosts, True, "an earlier answer")
            goes_on = command.is_in_terminal
            answer = await ask_about_hosts(session, permissions, tool_call, hosts, reasons, goes_on=goes_on)
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


async def ask_about_hosts(
    session: Session,
    permissions: SessionPermissions,
    tool_call: ToolCall,
    hosts: Sequence[str],
    reasons: Sequence[str],
    *,
    goes_on: bool,
) -> HostsAnswer:
    """Ask the user whether a command may reach hosts; without an answer it may not.

    `goes_on` says that it is a session of the terminal, which does not run again. `reasons` say why the answer can only
    hold once. Raises EndTurn if the client answers that the turn is cancelled.
    """
    text = f"In the sandbox, this asked for {SEPARATOR.join(hosts)}, which it may not reach. "
    them = "it" if len(hosts) == 1 else "them"
    again = f"Allowed, it runs again and may reach {them}; what it changed is discarded."
    text += f"Allowed, its session may reach {them} from now on." if goes_on else again
    about = to_question(session, tool_call, "\n\n".join([text, *filter(None, reasons)]))
    offers = [] if reasons else list_offers(permissions, get_folder(session), hosts)
    yes = f"Allow for this {'session' if goes_on else 'command'}"
    answer, chosen = await ask(session, about, offers, yes=yes)
    if answer.allowed and answer.choice.command:  # another command asks for its own hosts
        return HostsAnswer(hosts, False, "the user wants another command: " + to_line(answer.choice.command))
    return HostsAnswer(hosts, answer.allowed, answer.reason, chosen)


def list_offers(permissions: SessionPermissions, folder: str, hosts: Sequence[str]) -> list[Offer]:
    """List the answers for longer than once: for the session, in this folder, and never in this session."""
    rule = AnswerRule("reach", COMMAND_TOOL, SEPARATOR.join(sorted(hosts)))
    offers = offer_rule(rule, folder, kept=permissions.kept is not None)
    return [*offers, Offer("reject-session", KeptAnswer(False, rule, "session", "", now()))]
