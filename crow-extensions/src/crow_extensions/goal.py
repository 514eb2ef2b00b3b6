"""Let turns go on until a goal is reached: until a command succeeds, or a judge says so.

`/goal WORDS` begins a goal, which is in the log and so survives a restart. With `every_turn`, each prompt in whose turn
tools were called is a goal of that turn.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict, cast

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import find_first_text
from crow_core.errors import ConfigError, EndTurn
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, marker_kind
from crow_core.messages.notes import Notes
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.prompts import Prompt
from crow_core.session.session import Command, Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from crow_system.shortening import shorten_line
from msgspec import Meta

from crow_extensions.shell import run_command
from crow_extensions.spending import Spending

HINT = "WORDS [requests=50] [money=2] [minutes=30] [until = COMMAND] | go | off"
LIMIT = re.compile(r"(?:^|(?<=\s))(requests|money|minutes)\s*=\s*(\d+(?:\.\d+)?)(?=\s|$)")
UNTIL = re.compile(r"(?:^|\s)until\s*=\s*(\S.*)\Z", re.DOTALL)
VERDICT = re.compile(r"\W*(yes|no)\b[\s:*.,–-]*(.*)", re.IGNORECASE | re.DOTALL)
FAILED = "You are not done: `{}` failed ({}). {}"
OUTPUT = "The end of its output:\n\n{}"
NO_OUTPUT = "It printed no text."
AGAIN = "Go on to the goal: {}"
MISSING = "The goal is not reached yet. {} Go on with what is missing."
WHY_LENGTH = 300
"""Characters of a verdict that are shown and stored."""

AboveZero = Annotated[float, Meta(gt=0)]


class GoalTerms(TypedDict, total=False):
    """The terms of a goal."""

    words: str
    until: str
    """The shell command that succeeds when the goal is reached; empty if a judge decides."""
    limits: dict[str, float]
    """The most requests, money and minutes."""
    of_turn: bool
    """True if it ends with the turn that began it."""


class GoalNotes(Notes, total=False):
    """A goal began, was checked, or ended. `why` is the verdict, `spent` the amounts that the goal has used."""

    goal: GoalTerms
    """The goal, if it begins with this entry: the user's message, or a marker."""
    state: str
    """`open`, `reached`, `given up` at a limit, or `ended` by the user."""


@dataclass
class Goal:
    """A goal that the turns of a session go on to."""

    terms: GoalTerms
    spending: Spending
    """The limits, and the amounts used."""
    why: str = ""
    """Why it did not hold at the last check."""

    def describe(self) -> str:
        """Describe the goal in lines."""
        by = f"`{until}` succeeds" if (until := self.terms.get("until", "")) else "a judge says that it is reached"
        limits, spent = self.spending.limits, self.spending.spent
        used = ", ".join(f"{spent.get(what, 0):,.4g} of {limit:,.6g} {what}" for what, limit in limits.items())
        last = f"\n\nThe last check: {self.why}" if self.why else ""
        return f"The goal: {self.terms.get('words', '')}\n\nTurns go on until {by}. Used: {used}.{last}"


GOAL = StateKey[Goal | None]("goal")
WORKED = StateKey("goal worked", lambda: False)
"""True if a tool was called in the running turn."""
EVERY_TURN = StateKey("goal every turn", lambda: True)
"""False after `/goal off`."""
ALLOWED = StateKey[set[str]]("goal allowed", set)
"""The commands that the user has allowed for this session."""


def goal(
    crow: Crow,
    *,
    until: str = "",
    every_turn: bool = False,
    requests: AboveZero = 50,
    money: AboveZero | None = None,
    minutes: AboveZero | None = None,
    timeout: AboveZero = 600.0,
    hidden: Collection[str] = (),
) -> None:
    """Let turns go on until a goal is reached, or one of its limits. Adds the command /goal.

    A goal is reached when the shell command `until` succeeds in the working directory within `timeout` seconds, or the
    command that /goal names. Without a command, the model judges the conversation by the prompt `goal`. With
    `every_turn`, each turn in which tools were called goes on like this. The limits count from the start of a goal. The
    commands do not inherit the environment variables that `hidden` names.
    """
    crow.prompts["goal"] = Prompt.from_package("goal", "crow_extensions")
    defaults: dict[str, float | None] = {"requests": requests, "money": money, "minutes": minutes}

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("goal", "Go on until a goal is reached", run, hint=HINT)]

    async def run(session: Session, text: str) -> str | Message:
        found = find_goal(session)
        match text.lower(), found:
            case "go", None if given_up := read_goal(session.view.entries(), {"open", "given up"}):
                return await begin_goal(session, given_up.terms, AGAIN)
            case "" | "go", None:
                return f"There is no goal. To set one: /goal {HINT}"
            case "", Goal():
                return found.describe()
            case "go", Goal():
                return {"role": "user", "content": AGAIN.format(found.terms.get("words", ""))}
            case "off", _:
                session.state[EVERY_TURN] = False
                if found:
                    end(session, found, "ended", "The user ended it.")
                return "The goal is ended." if found else "Turns no longer go on by themselves."
            case _:
                return await begin_goal(session, parse_goal(text, until), "{}")

    async def begin_goal(session: Session, terms: GoalTerms, prompt: str) -> Message:
        """Return the prompt that begins a goal. Raises EndTurn if the goal cannot be set."""
        made, command = make_goal(terms), terms.get("until", "")
        fault = ""
        if not all(made.spending.limits.values()):
            fault = "A limit of a goal has to be above 0."
        try:
            made.spending.check_prices(session.model)
        except ConfigError as error:
            fault = str(error)
        if not fault and command and command != until and not await may_run(session, command):
            fault = f"The goal is not set: you did not allow `{command}` to run after each answer."
        if fault:
            raise EndTurn("end_turn", fault, stopped_by="goal")
        notes: GoalNotes = {"goal": terms}
        return {"role": "user", "content": prompt.format(terms.get("words", "")), "crow": notes}

    def make_goal(terms: GoalTerms) -> Goal:
        limits = {**defaults, **terms.get("limits", {})}
        setting = "`money` of a goal"
        return Goal(terms, Spending(limits["requests"], None, limits["money"], limits["minutes"], setting=setting))

    def find_goal(session: Session) -> Goal | None:
        """Find the open goal of a session, or of the session that it works for."""
        while session.parent:
            session = session.parent
        if GOAL not in session.state:
            session.state[GOAL] = read_goal(session.view.entries())
        return session.state[GOAL]

    def read_goal(entries: Iterable[Message], states: Collection[str] = ("open",)) -> Goal | None:
        """Read the goal from a log; None if the state of the last one is not among `states`."""
        found: Goal | None = None
        for entry in entries:
            notes = to_notes(entry)
            if terms := notes.get("goal"):
                found = make_goal(terms)
            elif found and marker_kind(entry) == "goal":
                found.why, found.spending.spent = notes.get("why", "") or found.why, {**notes.get("spent", {})}
                found = found if notes.get("state") in states else None
            elif found and entry.get("role") == "assistant":
                found.spending.spend("requests", 1)
        return found

    def note(session: Session, found: Goal, state: str, why: str) -> None:
        found.spending.find_reached()  # counts the time
        spent = {what: found.spending.spent.get(what, 0) for what in found.spending.limits}
        notes: GoalNotes = {"kind": "goal", "state": state, "why": why, "spent": spent}
        session.log.append({"crow": notes})

    def end(session: Session, found: Goal, state: str, why: str) -> None:
        note(session, found, state, why)
        session.state[GOAL] = None

    @crow.session_start
    def remind(session: Session) -> None:
        if not session.parent and session.view.find_kind("goal") and (found := find_goal(session)):
            words = shorten_line(to_line(found.terms.get("words", "")), 80)
            session.options.remarks.append(f"A goal is open: {words}. /goal go goes on, /goal off ends it.")

    @crow.message
    def reread(session: Session, entry: Message) -> None:
        if marker_kind(entry) == "rewind" and GOAL in session.state:
            del session.state[GOAL]

    @crow.before_prompt
    def begin(message: Message, session: Session) -> None:
        if session.parent or message.get("crow", {}).get("steer"):
            return
        session.state[WORKED] = False
        if (left := find_goal(session)) and left.terms.get("of_turn"):  # its turn failed
            end(session, left, "ended", "Another turn began.")
        if terms := to_notes(message).get("goal"):
            session.state[GOAL] = make_goal(terms)
        if found := find_goal(session):
            found.spending.start()

    @crow.turn_resume
    def resume(session: Session, entries: Sequence[Message]) -> None:
        session.state[WORKED] = any(entry.get("role") == "tool" for entry in entries)
        if found := find_goal(session):
            found.spending.start()

    @crow.model_call
    def count(session: Session, model_call: ModelCall) -> None:
        if found := find_goal(session):
            found.spending.count(model_call, session.id)

    @crow.before_model
    async def stop(request: ModelRequest, session: Session) -> None:
        if found := find_goal(session):
            await session.log.written()  # the calls before are counted
            stop_at_limit(session, found)

    def stop_at_limit(session: Session, found: Goal) -> None:
        if not (spent := found.spending.describe_reached()):
            return
        sentence = f"The goal was not reached. {spent}" + (f" The last check: {found.why}" if found.why else "")
        if not session.parent:
            end(session, found, "given up", found.why)
            sentence += "" if found.terms.get("of_turn") else " /goal go tries again."
        raise EndTurn("max_turn_requests", sentence, stopped_by="goal")

    @crow.after_tool
    def work(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        session.state[WORKED] = True

    @crow.before_end
    async def look(session: Session, stop_reason: StopReason) -> Message | None:
        found = find_goal(session)
        if session.parent or stop_reason != "end_turn":
            return None
        if found is None:
            if not (every_turn and session.state[EVERY_TURN] and session.state[WORKED]):
                return None
            words = find_first_text(session.turns.message or {})
            found = make_goal({"words": words, "until": until, "of_turn": True})
        return await check(session, found)

    async def check(session: Session, found: Goal) -> Message | None:
        """Check a goal; return the message to the model if it is not reached."""
        command, is_new = found.terms.get("until", ""), session.state[GOAL] is None
        missing, why = await (check_command(session, command) if command else ask_judge(session, found))
        if not missing:
            if not is_new:
                end(session, found, "reached", why)
                await session.notice(f"The goal is reached: {why}")
            return None
        await session.log.written()  # the judge's call is counted
        found.why = why
        if is_new:
            notes: GoalNotes = {"kind": "goal", "state": "open", "goal": found.terms}
            session.log.append({"crow": notes})
            session.state[GOAL] = found
            found.spending.start()
        note(session, found, "open", why)
        stop_at_limit(session, found)
        used, limit = found.spending.spent.get("requests", 0), found.spending.limits["requests"]
        await session.notice(f"{why} Going on ({used:g} of {limit:g} requests).")
        return {"role": "user", "content": missing, "crow": {"hidden": True}}

    async def check_command(session: Session, command: str) -> tuple[str, str]:
        """Run a command; return the message to the model if it fails, or "", and a sentence for the user."""
        try:
            code, said = await run_command(command, session.cwd, timeout, with_stdout=True, hidden=hidden)
            why = f"exit code {code}"
        except TimeoutError as error:
            code, said, why = 1, str(error), f"it took more than {timeout:g} seconds"
        except OSError as error:
            code, said, why = 1, "", str(error)
        if not code:
            return "", f"{to_line(command)} succeeded."
        output = OUTPUT.format(said) if said else NO_OUTPUT
        return mask(FAILED.format(command, why, output), session.secrets), f"{to_line(command)} failed ({why})."

    @crow.turn_end
    def pause(session: Session, outcome: StopReason | Exception) -> None:
        if session.parent or (found := session.state.get(GOAL)) is None:
            return
        found.spending.pause()
        if found.terms.get("of_turn") and not isinstance(outcome, Exception):
            end(session, found, "ended", "Its turn ended.")
        elif outcome != "end_turn":
            note(session, found, "open", "")


def to_notes(entry: Message) -> GoalNotes:
    """Return the notes of an entry of the log, which may be about a goal."""
    return cast(GoalNotes, entry.get("crow", {}))


async def ask_judge(session: Session, found: Goal) -> tuple[str, str]:
    """Let the model judge the conversation; return the message to the model if the goal is not reached, or "", and the
    verdict for the user. Raises ModelError, PromptError."""
    request = await session.draft_request()
    words = found.terms.get("words", "")
    question = session.prompts.render(session.prompts.templates["goal"], "goal", words=words)
    model_call = await session.ask_model(
        {**request, "messages": [*request["messages"], {"role": "user", "content": question}]}, "goal"
    )
    verdict = VERDICT.match(str(model_call.reply.get("content") or ""))
    if verdict is None:
        return MISSING.format("It was judged without a verdict."), "The judge answered without YES or NO."
    why = shorten_line(to_line(mask(verdict[2], session.secrets)), WHY_LENGTH) or "without a reason."
    if verdict[1].lower() == "yes":
        return "", f"the judge says: {why}"
    return MISSING.format(why), f"The judge says no: {why}"


async def may_run(session: Session, command: str) -> bool:
    """Return True if a command may run after each answer: in the mode yolo, or as the user has allowed it."""
    mode = session.options.find_mode()
    if command in session.state[ALLOWED] or (mode and mode.get() == "yolo"):
        return True
    question = f"After each answer, run this in {session.cwd} until it succeeds? {to_line(command)}"
    if await session.user.confirm(question, yes="Run it", no="Do not set the goal"):
        session.state[ALLOWED].add(command)
        return True
    return False


def parse_goal(text: str, until: str) -> GoalTerms:
    """Parse what follows /goal: words, limits, and the command behind `until =`, which goes on to the end."""
    named = UNTIL.search(text)
    command, rest = (named[1].strip(), text[: named.start()]) if named else (until, text)
    limits = {name: float(value) for name, value in LIMIT.findall(rest)}
    words = LIMIT.sub("", rest).strip() or f"Make `{command}` succeed."
    return {"words": words, "until": command, "limits": limits}


def allow_command(crow: Crow, *, command: str) -> None:
    """Let goals run a command without a question in every session of this app."""

    @crow.session_start
    def allow(session: Session) -> None:
        session.state[ALLOWED].add(command)
