"""Let a turn go on until a command succeeds, or until the model has checked its own work."""

from collections.abc import Collection, Sequence
from typing import Annotated

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.session.options import ON_OFF, Option
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from msgspec import Meta

from crow_extensions.shell import run_command

WANTED = StateKey("until_done", lambda: "on")
ROUNDS = StateKey[int | None]("until_done_rounds", lambda: None)
"""How many times the turn was continued; None before the first tool call."""
DONE = "DONE"
QUESTION = (
    f"Compare what was asked with what you did and saw. If all of it is done and checked, answer only {DONE}. "
    "Otherwise go on with what is missing."
)
FAILED = "You are not done: `{}` failed ({}). {}"
OUTPUT = "The end of its output:\n\n{}"
NO_OUTPUT = "It printed no text."

AboveZero = Annotated[float, Meta(gt=0)]


def until_done(
    crow: Crow, *, check: str = "", times: int = 5, timeout: AboveZero = 600.0, hidden: Collection[str] = ()
) -> None:
    """Let a turn in which tools were called go on until it is done, at most `times` times.

    It is done when the shell command `check` succeeds in the working directory within `timeout` seconds. Without a
    command, the model is asked whether it is done. The command does not inherit the environment variables that
    `hidden` names. Adds the session option `until_done`, on or off.
    """

    @crow.options
    def option(session: Session) -> Option:
        def choose(value: str) -> None:
            session.state[WANTED] = value

        def get() -> str:
            return session.state[WANTED]

        return Option("until_done", "Go on until done", "_until_done", ON_OFF, get, choose, is_switch=True)

    @crow.before_prompt
    def begin(message: Message, session: Session) -> None:
        if not message.get("crow", {}).get("steer"):
            session.state[ROUNDS] = None

    @crow.turn_resume
    def count(session: Session, entries: Sequence[Message]) -> None:
        asked = [str(entry.get("content")) for entry in entries if entry.get("crow", {}).get("hidden")]
        rounds = sum(text == QUESTION or text.startswith(FAILED.partition("{")[0]) for text in asked)
        session.state[ROUNDS] = rounds if any(entry.get("role") == "tool" for entry in entries) else None

    @crow.after_tool
    def work(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        session.state[ROUNDS] = session.state[ROUNDS] or 0

    @crow.before_end
    async def look(session: Session, stop_reason: StopReason) -> Message | None:
        rounds = session.state[ROUNDS]
        wanted = session.state[WANTED] == "on" and not session.parent
        if rounds is None or not wanted or stop_reason != "end_turn":
            return None
        if not (missing := await run_check(session) if check else make_question(session, rounds)):
            return None
        if rounds >= times:
            await session.notice(
                f"Not done after {times} more rounds; [extensions.until_done] sets how many.", "warning"
            )
            return None
        session.state[ROUNDS] = rounds + 1
        if check:
            await session.notice(f"{to_line(check)} failed; going on ({rounds + 1} of {times}).")
        return {"role": "user", "content": missing, "crow": {"hidden": True}}

    async def run_check(session: Session) -> str:
        """Run the check; return the message to the model if it fails, or "" if it succeeds."""
        try:
            code, said = await run_command(check, session.cwd, timeout, with_stdout=True, hidden=hidden)
            why = f"exit code {code}"
        except TimeoutError as error:
            code, said, why = 1, str(error), f"it took more than {timeout:g} seconds"
        except OSError as error:
            code, said, why = 1, "", str(error)
        output = OUTPUT.format(said) if said else NO_OUTPUT
        return mask(FAILED.format(check, why, output), session.secrets) if code else ""


def make_question(session: Session, rounds: int) -> str:
    """Return the question to the model about its own work, or "" once it has answered that it is done."""
    said = next((entry.get("content") for entry in reversed(session.log) if entry.get("role") == "assistant"), "")
    return "" if rounds and str(said).strip().rstrip(".").endswith(DONE) else QUESTION
