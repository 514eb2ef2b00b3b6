"""Pass the requests, log messages and progress of MCP servers on to the ACP client of a session."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import msgspec
from crow_system.shortening import leave_out
from msgspec import UNSET, ValidationError

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import (
    BlockContent,
    BooleanPropertySchema,
    ElicitationSchema,
    StringPropertySchema,
    TextBlock,
    ToolCallContent,
    ToolCallFields,
    ToolCallUpdate,
    Unknown,
)
from crow_core.content import read_image, to_audio_part, to_text_part
from crow_core.errors import ElicitationError, EndTurn, ModelError
from crow_core.masking import mask
from crow_core.mcp.elicitation import FormAnswer, can_ask, check_form
from crow_core.mcp.running_calls import AskingServer, RunningCall
from crow_core.messages.message import Message, to_parts
from crow_core.messages.notes import Notes
from crow_core.models.model_call import ModelRequest
from crow_core.session.log import new_id
from crow_core.session.session import Session
from crow_core.session.user import PermissionAnswer, offer_for_session, shows_apps
from crow_core.text import clean_lines, fence, to_line

if TYPE_CHECKING:
    from mcp_types import (
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestFormParams,
        ElicitRequestParams,
        ElicitRequestURLParams,
        ElicitResult,
        LoggingMessageNotificationParams,
        SamplingMessage,
    )

logger = logging.getLogger("crow")

PROGRESS_INTERVAL = 0.25
"""Seconds between two updates of a tool call's progress; only the latest progress is shown."""
LOG_INTERVAL = 1.0
"""Seconds between two log messages of one server that are shown; others in between are dropped."""
LINE_LIMIT = 300
"""Characters of a text on one line."""
TEXT_LIMIT = 4000
"""Characters of a text on several lines."""
FORM_LIMIT = 100_000
"""Bytes of a form, as JSON."""
CHOICES_LIMIT = 20
"""Choices of a permission that replaces a form."""
QUESTIONS_LIMIT = 20
"""Questions that a server may ask during one tool call, and in a session outside of all known tool calls."""
SAMPLE_TOKENS_LIMIT = 8192
"""Tokens of the model's answer to a server."""
SAMPLE_LIMIT = 10_000_000
"""Bytes of a server's request to the model, as JSON."""
SEVERITIES = {"warning": "warning", "error": "error", "critical": "error", "alert": "error", "emergency": "error"}
"""The levels of log messages that are shown, with the severity of the notice."""
STOP_REASONS = {"stop": "endTurn", "length": "maxTokens"}


@dataclass(eq=False)
class Bridge:
    """The `Host` of a session: answers the requests of its MCP servers by asking the client or the model."""

    session: Session
    _allowed: dict[AskingServer, bool] = field(default_factory=dict[AskingServer, bool])
    """The user's answers for the rest of the session: whether a server may ask the model."""
    _pages: dict[tuple[AskingServer, str], str] = field(default_factory=dict[tuple[AskingServer, str], str])
    """The ACP elicitation id of each page that the user was sent to, by server and MCP elicitation id."""
    _question_counts: "WeakKeyDictionary[AskingServer | RunningCall, int]" = field(
        default_factory=WeakKeyDictionary["AskingServer | RunningCall", int]
    )
    """The number of questions asked during a tool call, or by a server outside of all known tool calls."""
    _last_logs: dict[AskingServer, float] = field(default_factory=dict[AskingServer, float])
    """The time at which a server's log was last shown, in seconds of the monotonic clock."""
    _permission_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the user decides, because the answer may apply to the next question too."""

    def roots(self) -> list[str]:
        return [Path(root).absolute().as_uri() for root in self.session.folders.roots]

    def folder(self) -> Path:
        return self.session.folders.scratch()

    def shows_apps(self) -> bool:
        return shows_apps(self.session.client.capabilities)

    async def progress(
        self, server: AskingServer, done: float, total: float | None, message: str, running: RunningCall
    ) -> None:
        running.progress = describe_progress(done, total, self.tidy(message[:TEXT_LIMIT])[:LINE_LIMIT])
        if "progress" not in running.tasks:
            running.tasks["progress"] = showing = asyncio.ensure_future(self._show_progress(running))
            showing.add_done_callback(lambda task: task.cancelled() or task.exception())  # the result shows it

    async def _show_progress(self, running: RunningCall) -> None:
        """Send the latest progress of a tool call at intervals, until there is none."""
        while text := running.progress:
            running.progress = ""
            update = ToolCallUpdate(tool_call_id=running.id, status="in_progress", content=to_content(text))
            await self.session.update(update)
            await asyncio.sleep(PROGRESS_INTERVAL)
        running.tasks.pop("progress", None)

    def find_task(self, server: AskingServer, running: RunningCall) -> str:
        return self.session.journal.find_task(running.id, server.name)

    async def keep_task(self, server: AskingServer, running: RunningCall) -> None:
        notes: Notes = {"kind": "task", "call": running.id, "server": server.name, "task": running.task}
        self.session.log.append({"crow": notes})
        await self.session.log.written()

    def leaves_task(self) -> bool:
        return self.session.journal.is_closing or self.session.log.is_frozen

    async def log(self, server: AskingServer, params: "LoggingMessageNotificationParams") -> None:
        severity, now = SEVERITIES.get(params.level), monotonic()
        if severity is None or now - self._last_logs.get(server, -LOG_INTERVAL) < LOG_INTERVAL:
            return
        self._last_logs[server] = now
        text = params.data if isinstance(params.data, str) else msgspec.json.encode(params.data).decode()
        line = self.tidy(f"{server.name}: {text[:TEXT_LIMIT]}")[:LINE_LIMIT]
        capabilities = self.session.client.capabilities.session
        if capabilities and capabilities.notices:
            with suppress(ConnectionClosed):
                await self.session.notice(line, "error" if severity == "error" else "warning")
        else:
            logger.warning("%s", line)

    async def complete(self, server: AskingServer, id: str) -> None:
        if page := self._pages.pop((server, id), ""):
            with suppress(ConnectionClosed):
                await self.session.user.complete(page)

    async def elicit(
        self, server: AskingServer, params: "ElicitRequestParams", running: RunningCall | None
    ) -> "ElicitResult":
        from mcp_types import ElicitResult  # imported already: a server is connected

        self._count_question(server, running)
        try:
            answer = await (
                self._send_to_page(server, params, running)
                if params.mode == "url"
                else self._ask_form(server, params, running)
            )
        except (ElicitationError, ValidationError) as error:
            why = str(error).rstrip(".")
            await self.session.notice(f"A question of {self.label(server)} was declined: {why}.", "warning")
            answer = FormAnswer("decline")
        except EndTurn:
            answer = FormAnswer("cancel")
        filled_in = answer.action == "accept" and params.mode == "form"
        return ElicitResult(action=answer.action, content=answer.content if filled_in else None)

    def _count_question(self, server: AskingServer, running: RunningCall | None) -> None:
        """Count a question. Raises ValueError if there have been too many."""
        source = running or server
        self._question_counts[source] = self._question_counts.get(source, 0) + 1
        if self._question_counts[source] > QUESTIONS_LIMIT:
            raise ValueError(f"A call may ask back at most {QUESTIONS_LIMIT} times.")

    async def _send_to_page(
        self, server: AskingServer, params: "ElicitRequestURLParams", running: RunningCall | None
    ) -> FormAnswer:
        """Ask the user to visit a page. Raises ElicitationError."""
        text = self.to_labelled_text(server, params.message)
        answer = await self.session.user.elicit(text, url=params.url, tool_call_id=running.id if running else "")
        if params.elicitation_id and answer.action == "accept":
            self._pages[server, params.elicitation_id] = answer.id
        return answer

    async def _ask_form(
        self, server: AskingServer, params: "ElicitRequestFormParams", running: RunningCall | None
    ) -> FormAnswer:
        """Show a form, or a permission with its choices if the client has no forms. Raises ElicitationError."""
        if len(msgspec.json.encode(params.requested_schema)) > FORM_LIMIT:
            raise ElicitationError("its form is too long")
        form = to_form(params.requested_schema, lambda text: self.tidy(text, lines=True)[:TEXT_LIMIT])
        text = self.to_labelled_text(server, params.message)
        if can_ask(self.session.client.capabilities, "form"):
            return await self.session.user.elicit(text, form=form, tool_call_id=running.id if running else "")
        check_form(text, form)
        choices = find_choices(form)
        names = [self.tidy(name)[:LINE_LIMIT] for name, _ in choices]
        chosen = await self.session.user.ask_choice(to_question(running, text), names)
        await self._restore_tool_call(running)
        return FormAnswer("decline") if chosen is None else FormAnswer("accept", choices[chosen][1])

    async def sample(
        self, server: AskingServer, params: "CreateMessageRequestParams", running: RunningCall | None
    ) -> "CreateMessageResult":
        from mcp_types import CreateMessageResult, TextContent  # imported already: a server is connected

        self._count_question(server, running)
        request = to_model_request(params)
        if not await self._may_sample(server, request, running):
            raise PermissionError("The user did not allow it.")
        try:
            model_call = await self.session.ask_model(request, "sampling")
        except ModelError as error:  # its message names the endpoint, which the server must not learn
            await self.session.notice(f"{self.label(server)} got no answer of the model: {error}", "warning")
            raise ValueError("The model did not answer.") from error
        return CreateMessageResult(
            role="assistant",
            content=TextContent(type="text", text=str(model_call.reply.get("content") or "")),
            model=model_call.model.name,
            stop_reason=STOP_REASONS.get(model_call.finish_reason, model_call.finish_reason or None),
        )

    async def _may_sample(self, server: AskingServer, request: ModelRequest, running: RunningCall | None) -> bool:
        """Decide whether a server may ask the model, and append the decision to the log."""
        async with self._permission_lock:
            mode = self.session.options.find("mode")
            if (answered := self._allowed.get(server)) is not None:
                answer = PermissionAnswer(answered, "the user answered so for this session", lasts=True)
            elif mode is not None and mode.get() == "yolo":
                answer = PermissionAnswer(True, "mode yolo")
            else:
                answer = await self._ask_user(server, request, running)
        decision: Notes = {
            "kind": "decision",
            "is": "allow" if answer.allowed else "deny",
            "by": answer.reason,
            "scope": f"session: {self.label(server)}" if answer.lasts else "once",
            "call": f"{running.id if running else new_id()}/sampling",  # the tool call has a decision of its own
            "tool": f"{self.label(server)}: sampling/createMessage",
            "arguments": hashlib.sha256(msgspec.json.encode(request)).hexdigest(),
        }
        self.session.log.append({"crow": decision})
        return answer.allowed

    async def _ask_user(
        self, server: AskingServer, request: ModelRequest, running: RunningCall | None
    ) -> PermissionAnswer:
        """Show the user what would be sent to the model, and ask whether it may be."""
        name = self.label(server)
        whole = self.tidy("\n\n".join(map(to_text, request["messages"])), lines=True)
        question = to_question(running, f"{name} wants to ask the model", fence(leave_out(whole, TEXT_LIMIT)))
        try:
            answer = await self.session.user.ask_allowed(question, offer_for_session(name))
        except EndTurn:
            return PermissionAnswer(False, "the turn was cancelled")
        await self._restore_tool_call(running)
        if answer.lasts:
            self._allowed[server] = answer.allowed
        return answer

    async def _restore_tool_call(self, running: RunningCall | None) -> None:
        """Show a tool call again as it was before a question replaced its title."""
        if running is not None:
            await self.session.send(ToolCallUpdate(tool_call_id=running.id, title=running.title, content=[]))

    def label(self, server: AskingServer) -> str:
        """Return the name of a server for the user."""
        return f"MCP server {self.tidy(server.name)[:LINE_LIMIT]!r}"

    def to_labelled_text(self, server: AskingServer, text: str) -> str:
        """Put the name of the server before its text for the user."""
        return self.tidy(f"{self.label(server)}: {text}", lines=True)[:TEXT_LIMIT]

    def tidy(self, text: str, *, lines: bool = False) -> str:
        """Mask secrets and remove control characters; keep line breaks if `lines`.

        Shorten the text afterwards, not before: a part of a secret is not found.
        """
        text = mask(text, self.session.secrets)
        return clean_lines(text) if lines else to_line(text)


def to_content(text: str) -> list[ToolCallContent]:
    return [BlockContent(content=TextBlock(text=text))]


def to_question(running: RunningCall | None, title: str, text: str = "") -> ToolCallFields:
    """Return a question to the user as a tool call. It replaces the title of the tool call that it belongs to."""
    content = to_content(text) if text else UNSET
    if running is None:
        return ToolCallFields(tool_call_id=new_id(), title=title, kind="think", status="pending", content=content)
    return ToolCallFields(tool_call_id=running.id, title=title, content=content)


def describe_progress(done: float, total: float | None, message: str) -> str:
    """Return the progress of a tool call as a short text."""
    count = f"{done:g}" if total is None else f"{done:g} of {total:g}"
    if not message:
        return count
    return message if total is None else f"{message} ({count})"


def to_form(schema: dict[str, Any], tidy: Callable[[str], str]) -> ElicitationSchema:
    """Convert a form of MCP to one of ACP. Raises ElicitationError, ValidationError."""
    fields: Any = schema.get("properties", {})
    if not isinstance(fields, dict):
        raise ElicitationError("its form has no fields")
    properties = {name: to_field(each, tidy) for name, each in cast("dict[str, Any]", fields).items()}
    form = convert_leniently({**tidy_texts(schema, tidy), "properties": properties}, ElicitationSchema)
    if any(isinstance(each, Unknown) for each in form.properties.values()):
        raise ElicitationError("its form has a field of a kind that clients do not know")
    return form


def to_field(schema: Any, tidy: Callable[[str], str]) -> Any:
    """Convert a field of a form. Its pattern is dropped, because matching may not end; the server checks it anyway."""
    if not isinstance(schema, dict):
        return schema
    field = tidy_texts(cast("dict[str, Any]", schema), tidy)
    field.pop("pattern", None)
    match field:
        case {"enum": [*values], "enumNames": [*names]} if len(values) == len(names):  # MCP before 2025-11-25
            field["oneOf"] = [
                {"const": value, "title": tidy(str(name))} for value, name in zip(values, names, strict=True)
            ]
        case {"oneOf": [*options]}:
            named = [cast("dict[str, Any]", option) for option in options if isinstance(option, dict)]
            field["oneOf"] = [tidy_texts(option, tidy) for option in named]
        case _:
            pass
    return field


def tidy_texts(schema: dict[str, Any], tidy: Callable[[str], str]) -> dict[str, Any]:
    """Return a schema with `tidy` applied to its title and description."""
    texts = {key: tidy(text) for key in ("title", "description") if isinstance(text := schema.get(key), str)}
    return {**schema, **texts}


def find_choices(form: ElicitationSchema) -> list[tuple[str, dict[str, Any]]]:
    """Return the choices of a form that has only one, each with its label and content. Raises ElicitationError."""
    match [*form.properties.items()]:
        case []:
            return [("Yes", {})]
        case [(name, BooleanPropertySchema())]:
            return [("Yes", {name: True}), ("No", {name: False})]
        case [(name, StringPropertySchema(one_of=[*options]))] if len(options) <= CHOICES_LIMIT:
            return [(option.title or option.const, {name: option.const}) for option in options]
        case [(name, StringPropertySchema(enum=[*values]))] if len(values) <= CHOICES_LIMIT:
            return [(value, {name: value}) for value in values]
        case _:
            raise ElicitationError("the client shows no forms, and can only offer a few choices of which one is taken")


def to_model_request(params: "CreateMessageRequestParams") -> ModelRequest:
    """Convert a sampling request of MCP to a request to the model. Raises ValueError if it is not supported."""
    if params.tools:
        raise ValueError("Sampling with tools is not supported here; ask without them.")
    if params.max_tokens < 1 or not params.messages:
        raise ValueError("Sampling needs messages, and maxTokens above 0.")
    system: list[Message] = [{"role": "system", "content": params.system_prompt}] if params.system_prompt else []
    request: ModelRequest = {"max_tokens": min(params.max_tokens, SAMPLE_TOKENS_LIMIT)}
    if params.temperature is not None:
        request["temperature"] = params.temperature
    if params.stop_sequences:
        request["stop"] = params.stop_sequences
    request["messages"] = [*system, *map(to_message, params.messages)]
    if len(msgspec.json.encode(request)) > SAMPLE_LIMIT:
        raise ValueError("The request to the model is too long; ask less.")
    return request


def to_message(message: "SamplingMessage") -> Message:
    """Convert a sampling message of MCP. Raises ValueError if it has content for tools."""
    parts: list[dict[str, Any]] = []
    for content in message.content_as_list:
        match content.type:
            case "text":
                parts.append(to_text_part(content.text))
            case "image":
                parts.append(read_image(content.data))
            case "audio":
                parts.append(to_audio_part(content.data, content.mime_type))
            case _:
                raise ValueError("Sampling with tools is not supported here; ask without them.")
    if message.role == "assistant" or all(part["type"] == "text" for part in parts):
        return {"role": message.role, "content": "\n\n".join(part.get("text", "") for part in parts)}
    return {"role": message.role, "content": parts}


def to_text(message: Message) -> str:
    """Return a message as text for the user."""
    texts = (part.get("text") or f"[{part['type']}]" for part in to_parts(message.get("content")))
    return f"{message.get('role')}: " + "\n".join(texts)
