"""Typed results: let a turn end with a value that fits the JSON schema which came with the prompt.

The endpoint's own structured output is used where its quirks say that it works, else the tool `give_result`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
from crow_core.acp.schema import StopReason, TextBlock
from crow_core.app import Crow
from crow_core.content import attach_blocks
from crow_core.errors import EndTurn
from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import Tool, ToolCall
from crow_core.messages.message import Message
from crow_core.messages.notes import Notes, OutputNotes
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.output import TURN_NOTES, OutputSchema, is_strict
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from msgspec import UNSET

NAME = "give_result"
DESCRIPTION = """\
Give the result of your work, in this form; that ends your turn. \
Only when the user's message asks for a result by this tool."""
BY_TOOL = "When you are done, give the result by a call of the tool `{name}`; that ends your turn."
BY_TEXT = """\
When you are done, answer with JSON alone, without any other text. It must fit this JSON schema:

{schema}"""
MISFIT = "The result does not fit:\n{faults}\n\n{instruction}"
NOT_ASKED = "No result is asked for by this tool now. Go on without it, and answer in words."
GIVEN = "The result was taken."
AGAIN = "A result was given already."

SERVER = StateKey[Server]("structured_output")


@dataclass(eq=False)
class RequestedOutput:
    """The result that the running turn is to end with."""

    message: Message
    """The user's message, as it arrived."""
    schema: OutputSchema
    retries: int
    """The attempts after the first."""
    tool_name: str = ""
    """The name of the tool that takes the result; empty where the endpoint's own structured output is used."""
    faults: list[str] = field(default_factory=list[str])
    """The faults of each attempt."""
    misfits: dict[str, str] = field(default_factory=dict[str, str])
    """The fault of each call whose arguments do not fit, by the call's id, without advice for the model."""
    value: Any = UNSET
    """The result; UNSET until there is one."""

    def take(self, value: Any) -> None:
        """Take a result, or UNSET to ask for another, and note it for the answer to the prompt."""
        self.value = value
        if (notes := TURN_NOTES.get()) is not None:
            notes.pop("output", None)
            notes |= {} if value is UNSET else {"output": value}

    @property
    def instruction(self) -> str:
        """The sentence that asks the model for the result."""
        if self.tool_name:
            return BY_TOOL.format(name=self.tool_name)
        return BY_TEXT.format(schema=msgspec.json.encode(self.schema.parameters).decode())

    @property
    def is_over(self) -> bool:
        """True if there is a result, or no attempt is left."""
        return self.value is not UNSET or len(self.faults) > self.retries


REQUESTED = StateKey[RequestedOutput | None]("requested_output", lambda: None)
"""The result that the running turn is to end with; None if its prompt asked for none."""


def structured_output(crow: Crow) -> None:
    """Let a turn end with a result that fits the JSON schema of its prompt (ACP: `_meta.crow.outputSchema`).

    A result that does not fit is asked for again, with the faults. Use it after the other extensions: it ends turns.
    """
    crow.takes_output_schema = True

    @crow.mcp_servers
    def serve(session: Session) -> Sequence[Server]:
        session.state[SERVER] = Server(SERVER.name, definitions=[], handlers={NAME: take}, built_in=True)
        return [session.state[SERVER]]

    @crow.tools
    def offer(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]] | None:
        tools, server = session.toolbox.tools, session.state[SERVER]
        requested = find_requested(session, schemas)
        if requested is None or not requested.tool_name:
            for schema in schemas:  # of a stored session, or of the parent: its calls need an answer
                if schema["function"]["name"] == NAME and ((known := tools.get(NAME)) is None or known.server is None):
                    tools[NAME] = Tool(NAME, server, make_definition(NAME, schema["function"]["parameters"]))
            return None
        name = requested.tool_name
        tool = tools[name] = Tool(name, server, make_definition(name, requested.schema.parameters))
        server.handlers[name] = take
        kept = [tool.schema if schema["function"]["name"] == name else schema for schema in schemas]
        return kept if tool.schema in kept else [*kept, tool.schema]

    @crow.before_prompt
    def instruct(message: Message, session: Session) -> Message | None:
        if (requested := session.state[REQUESTED]) is None or message.get("crow", {}).get("steer"):
            return None
        asked = attach_blocks(message, [TextBlock(text=requested.instruction)])
        note: OutputNotes = {"schema": requested.schema.schema, "retries": requested.retries}
        return {**asked, "crow": asked.get("crow", Notes()) | Notes(output=note)}

    @crow.turn_resume
    def resume(session: Session, entries: Sequence[Message]) -> None:
        if (requested := session.state[REQUESTED]) is None or not requested.tool_name:
            return
        failed = {entry.get("tool_call_id"): "failed" in entry.get("crow", {}) for entry in entries}
        for use in (use for entry in entries for use in entry.get("tool_calls", ())):
            tool_call = session.toolbox.parse(use)
            if tool_call.name == requested.tool_name and use["id"] in failed:
                try:
                    requested.take(accept_arguments(requested.schema, tool_call))
                except ValueError as error:
                    requested.faults.append(str(error))
        if requested.value is not UNSET:
            raise EndTurn

    @crow.before_model
    def constrain(request: ModelRequest, session: Session) -> ModelRequest | None:
        if (requested := session.state[REQUESTED]) is None or requested.tool_name:
            return None
        schema = requested.schema.parameters
        form = {"name": "result", "strict": is_strict(schema), "schema": schema}
        asked = {"response_format": {"type": "json_schema", "json_schema": form}}
        return asked | request | asked  # first, since the messages are last

    def take(session: Session, tool_call: ToolCall) -> ToolResult:
        requested = session.state[REQUESTED]
        if requested is None or tool_call.name != requested.tool_name:
            return ToolResult.error(NOT_ASKED)
        if requested.value is not UNSET:
            return ToolResult.text(AGAIN)
        try:
            requested.take(accept_arguments(requested.schema, tool_call))
        except ValueError as error:
            instruction = f"Call {requested.tool_name} again, with arguments that fit."
            requested.misfits[tool_call.id] = str(error)
            return ToolResult.error(MISFIT.format(faults=error, instruction=instruction))
        return ToolResult.text(GIVEN)

    @crow.after_tool
    def count_faults(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        requested = session.state[REQUESTED]
        if requested and tool_call.name == requested.tool_name and result.is_error:
            text = "\n".join(str(block.get("text", "")) for block in result.content)
            requested.faults.append(requested.misfits.get(tool_call.id, text))

    @crow.after_model
    async def end(session: Session, model_call: ModelCall) -> None:
        requested = session.state[REQUESTED]
        if requested is None or not requested.is_over or not model_call.reply.get("tool_calls"):
            return
        if requested.value is not UNSET and (more := await crow.before_end.run(session, "end_turn")) is not None:
            session.log.append(more)  # an extension lets the turn go on, so that the result may change
            requested.take(UNSET)
            return
        raise EndTurn

    @crow.before_end
    def read_text(session: Session, stop_reason: StopReason) -> Message | None:
        requested = session.state[REQUESTED]
        if requested is None or requested.is_over or stop_reason != "end_turn":
            return None
        replies = (entry for entry in reversed(session.log) if entry.get("role") == "assistant")
        try:
            requested.take(requested.schema.accept_text(str(next(replies, Message()).get("content") or "")))
            return None
        except ValueError as error:
            requested.faults.append(str(error))
        if requested.is_over:
            return None
        content = MISFIT.format(faults=requested.faults[-1], instruction=requested.instruction)
        return {"role": "user", "content": content, "crow": {"hidden": True}}

    @crow.turn_end
    def answer(session: Session, outcome: StopReason | Exception) -> None:
        requested, notes = session.state.pop(REQUESTED), TURN_NOTES.get()
        if requested is None or notes is None:
            return
        if requested.value is not UNSET and outcome == "end_turn":
            notes["output"] = requested.value
        else:
            notes.pop("output", None)
            notes["outputFaults"] = requested.faults


def find_requested(session: Session, schemas: Sequence[dict[str, Any]]) -> RequestedOutput | None:
    """Find the result that the running turn is to end with; read it from the prompt if the turn has only begun.

    `schemas` are the tools to be sent.
    """
    message = session.turns.message
    if (before := session.state[REQUESTED]) is not None and before.message is message:
        return before
    match message:
        case {"crow": {"output": {"schema": schema, "retries": retries}}}:
            pass
        case _:
            return None
    requested = RequestedOutput(message, OutputSchema(mask(schema, session.secrets)), retries)
    if not can_constrain(session, has_tools=bool(schemas)):
        tools, server = session.toolbox.tools, session.state[SERVER]
        names = (f"{NAME}_{n}" if n > 1 else NAME for n in count(1))
        requested.tool_name = next(n for n in names if n not in tools or tools[n].server in (None, server))
    session.state[REQUESTED] = requested
    return requested


def can_constrain(session: Session, *, has_tools: bool) -> bool:
    """True if the structured output of the model's endpoint works."""
    if not isinstance(session.model, ChatModel):
        return False
    match session.model.quirks.structured_output:
        case "with_tools":
            return True
        case "alone":
            return not has_tools
        case "off":
            return False


def accept_arguments(schema: OutputSchema, tool_call: ToolCall) -> Any:
    """Return the result in a call, as the model wrote it if that fits, else with its types converted.

    Raises ValueError.
    """
    try:
        return schema.accept(tool_call.original)
    except ValueError:
        return schema.accept(tool_call.arguments)


def make_definition(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Make the definition of the tool that takes a result."""
    meta = {"crow/kind": "think", "crow/arguments": None}
    return {"name": name, "description": DESCRIPTION, "inputSchema": schema, "_meta": meta}
