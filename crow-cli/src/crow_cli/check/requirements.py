"""What an ACP agent has to do, version 1: the requirements of the protocol's test kit, under its ids.

Each is judged by one exchange; where something has to hold everywhere, a flaw in any other conversation breaks it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import msgspec
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    METHOD_NOT_FOUND,
    BooleanConfigOption,
    InitializeResponse,
    ListSessionsResponse,
    NewSessionResponse,
    PromptResponse,
    SelectConfigOption,
    SessionConfigOption,
    SessionModeState,
    SetSessionConfigOptionResponse,
)

from crow_cli.check import exchanges
from crow_cli.check.exchanges import FUTURE, Exchange, choices
from crow_cli.check.talk import Line, Message, Step, Talk, is_update, kind, of_turn, told
from crow_cli.check.validity import at, brief, listed, read

Level = Literal["mandatory", "capability", "advisory", "informational"]
Word = Literal["pass", "fail", "not tested", "skipped"]
T = TypeVar("T")

BUSY = "give --cancel-prompt with something that keeps the agent busy for some seconds"
HISTORY = {"user_message_chunk", "agent_message_chunk", "agent_thought_chunk"}


class Judged(Exception):
    """A verdict other than a pass; the message is the reason."""

    word: Word

    def __init__(self, why: str, *lines: Line) -> None:
        super().__init__(why)
        self.lines = lines
        """What shows it."""


class Failed(Judged):
    word = "fail"


class NotTested(Judged):
    """The agent could not be brought to it."""

    word = "not tested"


class Skipped(Judged):
    """It does not concern this agent."""

    word = "skipped"


@dataclass(frozen=True)
class Requirement:
    """One thing an agent has to do."""

    id: str
    level: Level
    sentence: str
    exchange: Exchange
    judge: Callable[[Talk], str | None]
    """Reads the exchange; gives a remark on a pass. Raises Judged."""
    capability: str
    """The dotted path of what the agent has to advertise for it."""


REQUIREMENTS: dict[str, Requirement] = {}
"""All of them by id, in the order of the report."""


def requirement(
    id: str, level: Level, sentence: str, exchange: Exchange, *, capability: str = ""
) -> Callable[[Callable[[Talk], str | None]], Callable[[Talk], str | None]]:
    """Judge an exchange by a function."""

    def declare(judge: Callable[[Talk], str | None]) -> Callable[[Talk], str | None]:
        REQUIREMENTS[id] = Requirement(id, level, sentence, exchange, judge, capability)
        return judge

    return declare


# Reading a conversation


def step(talk: Talk, method: str, nth: int = -1) -> Step:
    """A request that was made. Raises NotTested where it did not come to that."""
    steps = [step for step in talk.steps if step.method == method]
    if len(steps) < (nth + 1 if nth >= 0 else -nth):
        raise NotTested(talk.stopped or f"{method} was not called")
    return steps[nth]


def succeeded(talk: Talk, method: str, nth: int = -1, *, see: str = "") -> Step:
    """A request with a result. Raises Judged: where the fault is another requirement's, `see` is its id."""
    asked = step(talk, method, nth)
    if wanted := talk.login_wanted(asked):
        raise NotTested(wanted)
    if asked.answer is None:
        raise at_fault(see, asked, asked.missing)
    if asked.error or "result" not in asked.message:
        raise at_fault(see, asked, f"{method} was refused: {told(asked.error or {})}")
    return asked


def result(talk: Talk, method: str, type: type[T], nth: int = -1, *, see: str = "") -> T:
    """A request's valid result. Raises Judged, as `succeeded`."""
    asked = succeeded(talk, method, nth, see=see)
    return valid(asked, asked.result, type, see=see)


def valid(asked: Step, value: Any, type: type[T], *, see: str = "") -> T:
    try:
        return cast("T", read(value, cast("Any", type)))
    except msgspec.ValidationError as error:
        raise at_fault(see, asked, f"the result of {asked.method} is invalid: {error}") from error
    except RecursionError as error:
        raise at_fault(see, asked, f"the result of {asked.method} is nested too deeply") from error


def at_fault(see: str, asked: Step, why: str) -> Judged:
    return NotTested(f"{why}; see {see}") if see else Failed(why, *shown(asked))


def shown(asked: Step) -> Sequence[Line]:
    return [line for line in (asked.sent, asked.answer) if line]


def member(talk: Talk, name: str, type: type[T]) -> T:
    """A member of what `session/new` gave. Raises Skipped where it gave none."""
    asked = succeeded(talk, "session/new", 0, see="SESSION-001")
    if (value := asked.member(name)) is None:
        raise Skipped(f"session/new gave no `{name}`")
    return valid(asked, value, type)


def whole(talk: Talk) -> None:
    """Nothing was wrong, which says something if the conversation came to its end."""
    if talk.stopped:
        raise NotTested(talk.stopped)


def stop_reason(talk: Talk) -> str:
    return result(talk, "session/prompt", PromptResponse).stop_reason


# The wire

requirement("TRANSPORT-001", "mandatory", "Every line on standard output is one JSON-RPC message.", exchanges.everyday)(
    whole
)
requirement("TRANSPORT-002", "mandatory", "Standard output is UTF-8.", exchanges.everyday)(whole)


@requirement("JSONRPC-001", "mandatory", "An answer has the id of its request, number or text.", exchanges.ids)
def echoes_ids(talk: Talk) -> None:
    for method in ("initialize", "session/new"):
        if (asked := step(talk, method)).answer is None:
            raise NotTested(asked.missing) if asked.lost else Failed(asked.missing, asked.sent)


@requirement(
    "JSONRPC-002",
    "mandatory",
    "An answer has either a result, or an error with an integer code and a text.",
    exchanges.mistake,
)
def answers_wrong_parameters(talk: Talk) -> str:
    asked = step(talk, "session/new", 0)
    if asked.answer is None:
        raise Failed(f"without `cwd`, {asked.missing}", asked.sent)
    return f"session/new without `cwd`: {told(asked.error)}" if asked.error else ""


@requirement("JSONRPC-003", "mandatory", "A notification is never answered.", exchanges.notifications)
def leaves_notifications_unanswered(talk: Talk) -> None:
    step(talk, "session/new")
    if talk.stopped:
        raise NotTested(talk.stopped)
    said = [line for line in talk.lines if line.sender == "client"]
    first = next(line for line in said if line.message and "id" not in line.message)
    answers = [line for line in after(talk, first) if line.message and "method" not in line.message]
    if answers:
        raise Failed("a notification was answered", first, *answers)


@requirement("JSONRPC-004", "advisory", "An unknown method is refused with -32601.", exchanges.extension)
def refuses_unknown_methods(talk: Talk) -> None:
    asked = step(talk, exchanges.UNKNOWN_METHOD)
    if asked.answer is None:
        raise NotTested(asked.missing)
    if not asked.error or asked.error.get("code") != METHOD_NOT_FOUND:
        raise Failed("the answer is not the error -32601", *shown(asked))


@requirement("JSONRPC-005", "advisory", "After a refused request the next one works.", exchanges.mistake)
def works_after_an_error(talk: Talk) -> None:
    step(talk, "session/new", 1)
    succeeded(talk, "session/new", 1)


# initialize


@requirement("INIT-001", "mandatory", "initialize succeeds, and its result is valid.", exchanges.greeting)
def initializes(talk: Talk) -> None:
    asked = succeeded(talk, "initialize")
    if talk.speaks_ours(asked):
        result(talk, "initialize", InitializeResponse)


@requirement("INIT-002", "mandatory", "Asked for version 1, the agent answers 1.", exchanges.greeting)
def speaks_version_1(talk: Talk) -> None:
    asked = succeeded(talk, "initialize", see="INIT-001")
    version: object = asked.member("protocolVersion")
    if type(version) is not int or version != 1:
        raise Failed(f"it answers {brief(version)}", *shown(asked))


@requirement(
    "INIT-003", "mandatory", f"Asked for a version it cannot know ({FUTURE}), it answers its own.", exchanges.future
)
def offers_its_own_version(talk: Talk) -> str:
    asked = succeeded(talk, "initialize")
    match asked.member("protocolVersion"):
        case int(version) if not isinstance(version, bool) and 1 <= version < FUTURE:
            return f"it answers {version}"
        case other:
            raise Failed(f"it answers {brief(other)}", *shown(asked))


@requirement("INIT-004", "advisory", "initialize gives the agent's name and version.", exchanges.greeting)
def says_who_it_is(talk: Talk) -> str:
    info = result(talk, "initialize", InitializeResponse, see="INIT-001").agent_info
    if not info:
        raise Failed("there is no `agentInfo`", *shown(step(talk, "initialize")))
    return f"{info.name} {info.version}"


requirement("SCHEMA-001", "mandatory", "Every message of the agent is valid by the schema.", exchanges.everyday)(whole)
requirement(
    "SCHEMA-002",
    "advisory",
    "The protocol's objects have no keys of the agent's own; those go into `_meta`.",
    exchanges.everyday,
)(whole)

# Authentication


@requirement("AUTH-001", "advisory", "Authentication methods have different ids.", exchanges.greeting)
def tells_methods_apart(talk: Talk) -> None:
    ids = [method.id for method in result(talk, "initialize", InitializeResponse, see="INIT-001").auth_methods]
    if len(ids) != len(set(ids)):
        raise Failed(f"the ids are {', '.join(ids)}", *shown(step(talk, "initialize")))


@requirement(
    "AUTH-002",
    "mandatory",
    "No method of the type `terminal` is offered to a client that cannot do it.",
    exchanges.greeting,
)
def offers_no_terminal_login(talk: Talk) -> None:
    methods = result(talk, "initialize", InitializeResponse, see="INIT-001").auth_methods
    if "terminal" in [method.type for method in methods]:
        why = "there is one, and `clientCapabilities.auth.terminal` was not set"
        raise Failed(why, *shown(step(talk, "initialize")))


@requirement("AUTH-003", "capability", "After authenticate, session/new wants no login.", exchanges.logging_in)
def lets_in_who_logged_in(talk: Talk) -> None:
    offered = [method.id for method in result(talk, "initialize", InitializeResponse, see="INIT-001").auth_methods]
    if not offered:
        raise Skipped("there are no methods")
    if not talk.options.auth_method:
        raise NotTested(f"give --auth-method with one of: {', '.join(offered)}")
    login = step(talk, "authenticate")
    if login.answer is None or login.error:
        raise NotTested(talk.stopped or login.missing)
    asked = step(talk, "session/new")
    if asked.error and asked.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new still wants a login", *shown(login), *shown(asked))
    succeeded(talk, "session/new")


@requirement("AUTH-004", "capability", "logout succeeds.", exchanges.logging_out, capability="auth.logout")
def logs_out(talk: Talk) -> None:
    if not talk.options.allow_logout:
        raise NotTested("it may cost you your login; --allow-logout allows it")
    result(talk, "logout", cast("Any", AGENT_METHODS["logout"].result))


@requirement("AUTH-005", "advisory", "Who offers no authentication method wants no login.", exchanges.sessions)
def wants_no_impossible_login(talk: Talk) -> None:
    if step(talk, "initialize").member("authMethods"):
        raise Skipped("there are methods")
    asked = step(talk, "session/new", 0)
    if asked.error and asked.error.get("code") == AUTH_REQUIRED:
        raise Failed("session/new wants a login, and no method is offered", *shown(asked))


# Sessions


@requirement("SESSION-001", "mandatory", "session/new gives an id that is not empty.", exchanges.sessions)
def opens_a_session(talk: Talk) -> None:
    if not result(talk, "session/new", NewSessionResponse, 0).session_id:
        raise Failed("`sessionId` is empty", *shown(step(talk, "session/new", 0)))


@requirement("SESSION-002", "mandatory", "Two sessions have two ids.", exchanges.sessions)
def tells_sessions_apart(talk: Talk) -> None:
    one, other = (succeeded(talk, "session/new", nth, see="SESSION-001").member("sessionId") for nth in (0, 1))
    if one == other:
        raise Failed(
            f"both are {brief(one)}", *shown(step(talk, "session/new", 0)), *shown(step(talk, "session/new", 1))
        )


@requirement("PROMPT-001", "mandatory", "A prompt is answered with a stop reason.", exchanges.everyday)
def ends_a_turn(talk: Talk) -> str:
    return f"stopReason {stop_reason(talk)}"


@requirement(
    "PROMPT-002", "mandatory", "Updates during a turn are valid, and of the session it runs in.", exchanges.everyday
)
def updates_its_session(talk: Talk) -> str:
    turn = step(talk, "session/prompt")
    during = [line for line in between(talk, turn) if line.message and line.message.get("method") == "session/update"]
    for line in during:
        if not is_update(line, turn.params["sessionId"]):
            raise Failed("an update has another `sessionId` than the prompt", turn.sent, line)
    for flaw in talk.flaws:
        if flaw.id == "SCHEMA-001" and flaw.line in during:
            raise Failed(flaw.why, turn.sent, flaw.line)
    if turn.answer is None:
        raise NotTested(turn.missing)
    return f"{len(during)} updates"


@requirement("PROMPT-003", "advisory", "A prompt may link to a resource.", exchanges.resource_link)
def takes_links(talk: Talk) -> str:
    return f"stopReason {stop_reason(talk)}"


@requirement("CANCEL-001", "mandatory", "session/cancel ends a turn with `cancelled`, no error.", exchanges.cancelling)
def ends_cancelled_turns(talk: Talk) -> None:
    judge_interrupted(talk)


def judge_interrupted(talk: Talk) -> None:
    """Whether the turn that was interrupted ended with `cancelled`. Raises Judged."""
    turn = step(talk, "session/prompt")
    if turn.interrupted is None:
        if turn.answer is None:
            raise NotTested(turn.missing)
        raise NotTested(f"the turn ended before it could be interrupted; {BUSY}")
    lines = [turn.sent, turn.interrupted]
    if turn.answer is None:
        raise Failed(turn.missing, *lines)
    if turn.error:
        raise Failed(f"the prompt was answered with an error: {told(turn.error)}", *lines, turn.answer)
    if (reason := turn.member("stopReason")) == "cancelled":
        return
    late = turn.answer.at - turn.interrupted.at
    if late < talk.options.quiet:
        raise NotTested(f"the turn ended by itself ({brief(reason)}), {late:.2f} s after it was interrupted; {BUSY}")
    raise Failed(f"the turn went on for {late:.1f} s and ended with {brief(reason)}", *lines, turn.answer)


@requirement("CANCEL-002", "mandatory", "Nothing of a cancelled turn comes after its answer.", exchanges.cancelling)
def is_silent_after_cancel(talk: Talk) -> None:
    turn = step(talk, "session/prompt")
    late = of_turn(talk.updates(turn.params["sessionId"], turn.answer)) if turn.answer else []
    if turn.interrupted and late:
        raise Failed("an update of the turn came after its answer", turn.interrupted, *shown(turn)[1:], late[0])
    try:
        judge_interrupted(talk)
    except Failed as failed:
        raise NotTested(f"{failed}; see CANCEL-001") from failed


# What an agent may be able to do


@requirement("LOAD-001", "capability", "session/load succeeds.", exchanges.loading, capability="loadSession")
def loads(talk: Talk) -> None:
    result(talk, "session/load", cast("Any", AGENT_METHODS["session/load"].result))


@requirement(
    "LOAD-002",
    "capability",
    "session/load shows the conversation before its answer, and nothing of it afterwards.",
    exchanges.loading,
    capability="loadSession",
)
def replays(talk: Talk) -> str:
    load = succeeded(talk, "session/load", see="LOAD-001")
    turn = step(talk, "session/prompt")
    session = load.params["sessionId"]
    if late := of_turn(talk.updates(session, cast("Line", load.answer))):
        raise Failed("an update of the conversation came after the answer", *shown(load), late[0])
    shown_before = of_turn(talk.updates(session, turn.sent, turn.answer))
    shown_again = of_turn(talk.updates(session, load.sent, load.answer))
    if shown_before and not shown_again:
        raise Failed(f"nothing was shown of a turn of {len(shown_before)} updates", shown_before[0], *shown(load))
    return f"{len(shown_again)} updates"


@requirement(
    "LOAD-003", "advisory", "The result of session/load is an object.", exchanges.loading, capability="loadSession"
)
def answers_load_with_an_object(talk: Talk) -> None:
    load = succeeded(talk, "session/load", see="LOAD-001")
    if not isinstance(load.result, dict):
        raise Failed(f"it is {brief(load.result)}", *shown(load))


@requirement(
    "RESUME-001",
    "capability",
    "session/resume succeeds, also without `mcpServers`.",
    exchanges.resuming,
    capability="sessionCapabilities.resume",
)
def resumes(talk: Talk) -> None:
    result(talk, "session/resume", cast("Any", AGENT_METHODS["session/resume"].result))


@requirement(
    "RESUME-002",
    "capability",
    "session/resume shows nothing of the conversation before its answer.",
    exchanges.resuming,
    capability="sessionCapabilities.resume",
)
def resumes_silently(talk: Talk) -> None:
    resume = succeeded(talk, "session/resume", see="RESUME-001")
    updates = talk.updates(resume.params["sessionId"], resume.sent, resume.answer)
    if history := [line for line in updates if kind(line) in HISTORY]:
        raise Failed("it shows the conversation", resume.sent, history[0])


@requirement(
    "LIST-001", "capability", "session/list succeeds.", exchanges.listing, capability="sessionCapabilities.list"
)
def lists(talk: Talk) -> str:
    found = result(talk, "session/list", ListSessionsResponse, 0)
    return f"{len(found.sessions)} sessions" + (", and more" if found.next_cursor else "")


@requirement(
    "LIST-002",
    "capability",
    "session/list of a folder without sessions is an empty list.",
    exchanges.listing,
    capability="sessionCapabilities.list",
)
def lists_by_folder(talk: Talk) -> None:
    asked = step(talk, "session/list", 1)
    if found := result(talk, "session/list", ListSessionsResponse, 1).sessions:
        raise Failed(f"it lists {len(found)} sessions", *shown(asked))


@requirement(
    "DELETE-001",
    "capability",
    "session/delete succeeds, and the session is listed no more.",
    exchanges.deleting,
    capability="sessionCapabilities.delete",
)
def deletes(talk: Talk) -> None:
    result(talk, "session/delete", cast("Any", AGENT_METHODS["session/delete"].result))
    later = step(talk, "session/list")
    gone = step(talk, "session/delete").params["sessionId"]
    if gone in [at(found, "sessionId") for found in listed(later.member("sessions"))]:
        raise Failed("the session is still listed", *shown(step(talk, "session/delete")), *shown(later))


@requirement(
    "DELETE-002",
    "advisory",
    "Deleting a session that does not exist succeeds.",
    exchanges.deleting_nothing,
    capability="sessionCapabilities.delete",
)
def deletes_nothing(talk: Talk) -> None:
    succeeded(talk, "session/delete")


@requirement(
    "CLOSE-001",
    "capability",
    "session/close succeeds.",
    exchanges.closing,
    capability="sessionCapabilities.close",
)
def closes(talk: Talk) -> None:
    result(talk, "session/close", cast("Any", AGENT_METHODS["session/close"].result))


@requirement(
    "CLOSE-002",
    "capability",
    "session/close during a turn ends it with `cancelled`.",
    exchanges.closing_busy,
    capability="sessionCapabilities.close",
)
def closes_busy_sessions(talk: Talk) -> None:
    if step(talk, "session/prompt").interrupted and (close := step(talk, "session/close")).error:
        raise NotTested(f"session/close was refused: {told(close.error or {})}")
    judge_interrupted(talk)


@requirement(
    "ADDDIRS-001",
    "capability",
    "session/new takes further folders.",
    exchanges.directories,
    capability="sessionCapabilities.additionalDirectories",
)
def takes_folders(talk: Talk) -> None:
    succeeded(talk, "session/new")


@requirement("MODES-001", "capability", "The current mode is one of those available.", exchanges.sessions)
def has_an_available_mode(talk: Talk) -> str:
    modes = member(talk, "modes", SessionModeState)
    ids = [mode.id for mode in modes.available_modes]
    if modes.current_mode_id not in ids:
        raise Failed(
            f"{modes.current_mode_id!r} is none of {', '.join(ids) or 'no modes'}", *shown(step(talk, "session/new", 0))
        )
    return ", ".join(ids)


@requirement(
    "MODES-002", "capability", "session/set_mode succeeds; an update names `currentModeId`.", exchanges.setting_mode
)
def sets_modes(talk: Talk) -> str:
    modes = member(talk, "modes", SessionModeState)
    if len(modes.available_modes) < 2:
        raise Skipped("there is one mode only")
    asked = succeeded(talk, "session/set_mode")
    updates = talk.updates(asked.params["sessionId"], asked.sent)
    for flaw in talk.flaws:
        if flaw.id == "SCHEMA-001" and flaw.line in updates and kind(flaw.line) == "current_mode_update":
            raise Failed(flaw.why, asked.sent, flaw.line)
    return f"to {asked.params['modeId']}"


@requirement("CONFIG-001", "capability", "An option's current value is one of its values.", exchanges.sessions)
def has_possible_values(talk: Talk) -> str:
    options = member(talk, "configOptions", list[SessionConfigOption])
    asked = step(talk, "session/new", 0)
    for option, raw in zip(options, asked.member("configOptions"), strict=True):
        if isinstance(option, SelectConfigOption) and option.current_value not in choices(raw):
            raise Failed(f"{option.id}: {option.current_value!r} is not among its options", *shown(asked))
    return f"{len(options)} options"


@requirement(
    "CONFIG-002",
    "capability",
    "session/set_config_option gives all options, the new value among them.",
    exchanges.setting_option,
)
def sets_options(talk: Talk) -> str:
    options = member(talk, "configOptions", list[SessionConfigOption])
    if not any(step.method == "session/set_config_option" for step in talk.steps):
        raise Skipped("no option has another value to set")
    asked = step(talk, "session/set_config_option")
    now = result(talk, "session/set_config_option", SetSessionConfigOptionResponse).config_options
    values = {option.id: option.current_value for option in now if isinstance(option, SelectConfigOption)}
    kept = {option.id for option in now if isinstance(option, SelectConfigOption | BooleanConfigOption)}
    before = {option.id for option in options if isinstance(option, SelectConfigOption | BooleanConfigOption)}
    if missing := before - kept:
        raise Failed(f"these options are missing: {', '.join(sorted(missing))}", *shown(asked))
    option, value = asked.params["configId"], asked.params["value"]
    if values.get(option) != value:
        raise Failed(f"{option} should be {value!r} and is {values.get(option)!r}", *shown(asked))
    return f"{option} to {value}"


@requirement(
    "CONFIG-003",
    "mandatory",
    "No option of the type `boolean` is offered to a client that cannot show it.",
    exchanges.sessions,
)
def offers_no_switches(talk: Talk) -> None:
    asked = succeeded(talk, "session/new", 0, see="SESSION-001")
    if "boolean" in [at(option, "type") for option in listed(asked.member("configOptions"))]:
        raise Failed("there is one, and `clientCapabilities.session.configOptions.boolean` was not set", *shown(asked))


def prompt_capability(id: str, name: str, what: str, exchange: Exchange) -> None:
    @requirement(id, "capability", f"A prompt may hold {what}.", exchange, capability=f"promptCapabilities.{name}")
    def takes_it(talk: Talk) -> str:
        return f"stopReason {stop_reason(talk)}"


prompt_capability("PROMPTCAP-001", "image", "an image", exchanges.image)
prompt_capability("PROMPTCAP-002", "audio", "a sound", exchanges.audio)
prompt_capability("PROMPTCAP-003", "embeddedContext", "a resource", exchanges.embedded)


# What a client cannot do


def used_tools(talk: Talk) -> str:
    """What the agent did itself; nothing shows that it would have called a client that can."""
    stop_reason(talk)
    kinds = sorted({kind(line) for line in talk.lines} & {"tool_call"})
    return "it used tools of its own" if kinds else "it used no tool, so it may not have been tempted"


requirement("CLIENTCAP-001", "mandatory", "A client without `fs` is not asked for a file.", exchanges.wants_file)(
    used_tools
)
requirement(
    "CLIENTCAP-002", "mandatory", "A client without `terminal` is not asked for one.", exchanges.wants_terminal
)(used_tools)
requirement(
    "CLIENTCAP-003",
    "mandatory",
    "A client without `elicitation` is not asked to question anyone.",
    exchanges.wants_answer,
)(used_tools)


@requirement("EXT-001", "mandatory", "A request of somebody's own (`_…`) is answered.", exchanges.extension)
def answers_extensions(talk: Talk) -> str:
    asked = step(talk, exchanges.UNKNOWN_METHOD)
    if asked.answer is None:
        raise Failed(asked.missing, asked.sent)
    return told(asked.error) if asked.error else "with a result"


@requirement("META-001", "advisory", "`_meta` is accepted.", exchanges.meta)
def takes_meta(talk: Talk) -> str:
    return f"stopReason {stop_reason(talk)}"


requirement("ERROR-001", "advisory", "An error's message is one line, and not empty.", exchanges.mistake)(whole)


@requirement("SHUTDOWN-001", "advisory", "The agent ends once its input has ended.", exchanges.everyday)
def ends_by_itself(talk: Talk) -> str:
    succeeded(talk, "initialize")
    if talk.left_by != "itself":
        raise Failed(f"after {talk.options.grace:g} s it had to be ended with {talk.left_by}")
    return "by itself"


# What is good to know


@requirement("STDERR-001", "informational", "How much goes to standard error.", exchanges.everyday)
def says_beside(talk: Talk) -> str:
    succeeded(talk, "session/new")
    return f"{talk.stderr_size} bytes in a conversation of one prompt"


@requirement("INFO-PARSE-001", "informational", "What a line that is no JSON leads to.", exchanges.broken_line)
def meets_a_broken_line(talk: Talk) -> str:
    return reaction(talk)


@requirement("INFO-INVALIDREQ-001", "informational", "What JSON that is no message leads to.", exchanges.no_message)
def meets_no_message(talk: Talk) -> str:
    return reaction(talk)


@requirement(
    "INFO-UNKNOWNSESSION-001",
    "informational",
    "What a prompt for an unknown session leads to.",
    exchanges.unknown_session,
)
def meets_an_unknown_session(talk: Talk) -> str:
    asked = step(talk, "session/prompt")
    if asked.answer is None:
        return asked.missing
    return told(asked.error) if asked.error else "a result"


def reaction(talk: Talk) -> str:
    """How it took a line that is no message, and whether the next request worked."""
    step(talk, "initialize")
    wrong = next((line for line in talk.lines if line.sender == "client" and line.message is None), None)
    if wrong is None:
        raise NotTested(talk.stopped)
    answer = next((line.message for line in after(talk, wrong) if is_answer_to_nothing(line.message)), None)
    said = f"answered {told(answer.get('error') or {})}" if answer else "not answered"
    opened = step(talk, "session/new").member("sessionId") if talk.steps[-1].method == "session/new" else None
    return f"{said}; the next request {'worked' if opened else 'failed'}"


def is_answer_to_nothing(message: Message | None) -> bool:
    return message is not None and "method" not in message and message.get("id") is None


def after(talk: Talk, line: Line) -> list[Line]:
    """What the agent said after a line."""
    return [other for other in talk.lines[talk.lines.index(line) + 1 :] if other.sender == "agent"]


def between(talk: Talk, asked: Step) -> list[Line]:
    """What the agent said between a request and its answer."""
    said = after(talk, asked.sent)
    return said[: said.index(asked.answer)] if asked.answer else said
