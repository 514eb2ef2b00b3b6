"""The bridge between the two protocols: what MCP servers ask, say and report, in the words of ACP."""

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
from msgspec import UNSET, ValidationError

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.decoding import lenient
from crow_core.acp.schema import (
    BlockContent,
    BooleanPropertySchema,
    ElicitationSchema,
    PermissionOption,
    StringPropertySchema,
    TextBlock,
    ToolCallContent,
    ToolCallFields,
    ToolCallUpdate,
    Unknown,
)
from crow_core.content import to_audio_part, to_image_part, to_text_part
from crow_core.elicitation import FormAnswer, can_ask, check_form
from crow_core.errors import ElicitationError, EndTurn, ModelError
from crow_core.log import new_id
from crow_core.masking import mask
from crow_core.mcp.server import RunningCall, Server
from crow_core.messages import Message, to_parts
from crow_core.models.chat import Request
from crow_core.session import Session
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

PROGRESS_EVERY = 0.25
"""Seconds between two words on the progress of a call; of those that come between, the last is shown."""
LOG_EVERY = 1.0
"""Seconds between two messages of one server's log that a person is shown; what comes between is left out."""
LINE = 300
"""Characters of a message that is one line."""
SHOWN = 4000
"""Characters of a longer text that a person is shown."""
FORM_LIMIT = 100_000
"""Bytes of a form, as JSON."""
CHOICES = 20
"""Answers among which a person can choose without a form."""
QUESTIONS = 20
"""How often a server may ask back during one call, and how often in a session where no call can be told."""
SAMPLE_TOKENS = 8192
"""Tokens of an answer, at most, however many a server asks for."""
SAMPLE_LIMIT = 10_000_000
"""Bytes of what the model may be asked, as JSON."""
URGENT = {"warning": "warning", "error": "error", "critical": "error", "alert": "error", "emergency": "error"}
"""The levels of a server's log that a person is to hear of."""
STOP_REASONS = {"stop": "endTurn", "length": "maxTokens"}


@dataclass(eq=False)
class Bridge:
    """A session, as its MCP servers see it: a `Host`."""

    session: Session
    _allowed: dict[Server, bool] = field(default_factory=dict[Server, bool])
    """Which servers may have the model asked for the rest of the session, and which may not."""
    _pages: dict[tuple[Server, str], str] = field(default_factory=dict[tuple[Server, str], str])
    """The client's id of a page that a person was sent to, by the server's."""
    _asked: "WeakKeyDictionary[Server | RunningCall, int]" = field(
        default_factory=WeakKeyDictionary["Server | RunningCall", int]
    )
    """How often a server has asked back, for each call."""
    _logged: dict[Server, float] = field(default_factory=dict[Server, float])
    """When a server's log was last shown, in seconds of the monotonic clock."""
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a person decides what a server may: the answer may hold for the next question, too."""

    def roots(self) -> list[str]:
        return [Path(root).as_uri() for root in self.session.folders.roots]

    async def progress(self, server: Server, done: float, total: float | None, message: str, use: RunningCall) -> None:
        use.progress = progress_text(done, total, self.tidy(message[:SHOWN])[:LINE])
        if "progress" not in use.beside:
            use.beside["progress"] = showing = asyncio.ensure_future(self._show_progress(use))
            showing.add_done_callback(lambda task: task.cancelled() or task.exception())  # the call's end says it, too

    async def _show_progress(self, use: RunningCall) -> None:
        """Show what was last said of a call, until nothing more is said or the call ends."""
        while text := use.progress:
            use.progress = ""
            update = ToolCallUpdate(tool_call_id=use.id, status="in_progress", content=block(text))
            await self.session.update(update)
            await asyncio.sleep(PROGRESS_EVERY)
        use.beside.pop("progress", None)

    async def log(self, server: Server, said: "LoggingMessageNotificationParams") -> None:
        severity, now = URGENT.get(said.level), monotonic()
        if severity is None or now - self._logged.get(server, -LOG_EVERY) < LOG_EVERY:
            return
        self._logged[server] = now
        text = said.data if isinstance(said.data, str) else msgspec.json.encode(said.data).decode()
        line = self.tidy(f"{server.name}: {text[:SHOWN]}")[:LINE]
        wanted = self.session.client.capabilities.session
        if wanted and wanted.notices:
            with suppress(ConnectionClosed):
                await self.session.notice(line, "error" if severity == "error" else "warning")
        else:
            logger.warning("%s", line)

    async def complete(self, server: Server, id: str) -> None:
        if page := self._pages.pop((server, id), ""):
            with suppress(ConnectionClosed):
                await self.session.user.complete(page)

    async def elicit(self, server: Server, asked: "ElicitRequestParams", use: RunningCall | None) -> "ElicitResult":
        from mcp_types import ElicitResult  # loaded: a server is connected

        self._count(server, use)
        try:
            answer = await (self._send(server, asked, use) if asked.mode == "url" else self._ask(server, asked, use))
        except (ElicitationError, ValidationError) as error:
            why = str(error).rstrip(".")
            await self.session.notice(f"A question of {self.name(server)} was declined: {why}.", "warning")
            answer = FormAnswer("decline")
        except EndTurn:
            answer = FormAnswer("cancel")
        filled_in = answer.action == "accept" and asked.mode == "form"
        return ElicitResult(action=answer.action, content=answer.content if filled_in else None)

    def _count(self, server: Server, use: RunningCall | None) -> None:
        """Raise ValueError when a server has asked often enough."""
        whose = use or server
        self._asked[whose] = self._asked.get(whose, 0) + 1
        if self._asked[whose] > QUESTIONS:
            raise ValueError(f"A call may ask back at most {QUESTIONS} times.")

    async def _send(self, server: Server, asked: "ElicitRequestURLParams", use: RunningCall | None) -> FormAnswer:
        """Send the person to a page. Raises ElicitationError."""
        words = self.words(server, asked.message)
        answer = await self.session.user.elicit(words, url=asked.url, tool_call_id=use.id if use else "")
        if asked.elicitation_id and answer.action == "accept":
            self._pages[server, asked.elicitation_id] = answer.id
        return answer

    async def _ask(self, server: Server, asked: "ElicitRequestFormParams", use: RunningCall | None) -> FormAnswer:
        """Have the person fill in a form, or choose where the client shows none. Raises ElicitationError."""
        if len(msgspec.json.encode(asked.requested_schema)) > FORM_LIMIT:
            raise ElicitationError("its form is too long")
        form = form_of(asked.requested_schema, lambda text: self.tidy(text, lines=True)[:SHOWN])
        words = self.words(server, asked.message)
        if can_ask(self.session.client.capabilities, "form"):
            return await self.session.user.elicit(words, form=form, tool_call_id=use.id if use else "")
        check_form(words, form)
        choices = choices_of(form)
        names = [self.tidy(name)[:LINE] for name, _ in choices]
        chosen = await self.session.user.ask_choice(about(use, words), names)
        await self._restore(use)
        return FormAnswer("decline") if chosen is None else FormAnswer("accept", choices[chosen][1])

    async def sample(
        self, server: Server, asked: "CreateMessageRequestParams", use: RunningCall | None
    ) -> "CreateMessageResult":
        from mcp_types import CreateMessageResult, TextContent  # loaded: a server is connected

        self._count(server, use)
        request = sampled(asked)
        if not await self._may_sample(server, request, use):
            raise PermissionError("The user did not allow it.")
        try:
            call = await self.session.ask_model(request, "sampling")
        except ModelError as error:  # it names the endpoint, which is no business of the server's
            await self.session.notice(f"{self.name(server)} got no answer of the model: {error}", "warning")
            raise ValueError("The model did not answer.") from error
        return CreateMessageResult(
            role="assistant",
            content=TextContent(type="text", text=str(call.reply.get("content") or "")),
            model=call.model.name,
            stop_reason=STOP_REASONS.get(call.finish_reason, call.finish_reason or None),
        )

    async def _may_sample(self, server: Server, request: Request, use: RunningCall | None) -> bool:
        """Whether the person lets a server have the model asked; where nobody is there, nobody does."""
        async with self._asking:
            mode = self.session.options.find("mode")
            if (answered := self._allowed.get(server)) is not None:
                allowed, by, lasts = answered, "the user answered so for this session", True
            elif mode is not None and mode.get() == "yolo":
                allowed, by, lasts = True, "mode yolo", False
            else:
                allowed, by, lasts = await self._question(server, request, use)
        decision = {
            "kind": "decision",
            "is": "allow" if allowed else "deny",
            "by": by,
            "scope": f"session: {self.name(server)}" if lasts else "once",
            "call": f"{use.id if use else new_id()}/sampling",  # the call itself was decided on before
            "tool": f"{self.name(server)}: sampling/createMessage",
            "arguments": hashlib.sha256(msgspec.json.encode(request)).hexdigest(),
        }
        self.session.log.append({"crow": decision})
        return allowed

    async def _question(self, server: Server, request: Request, use: RunningCall | None) -> tuple[bool, str, bool]:
        """Show the person what would be sent; gives whether it may be, who says so, and whether for good."""
        name = self.name(server)
        whole = self.tidy("\n\n".join(map(in_words, request["messages"])), lines=True)
        more = f"\n[{len(whole) - SHOWN:,} characters more]" if len(whole) > SHOWN else ""
        options = [
            PermissionOption(option_id="allow", name="Allow", kind="allow_once"),
            PermissionOption(option_id="always", name=f"Allow {name} for this session", kind="allow_always"),
            PermissionOption(option_id="reject", name="Reject", kind="reject_once"),
            PermissionOption(option_id="never", name=f"Reject {name} for this session", kind="reject_always"),
        ]
        question = about(use, f"{name} wants to ask the model", fence(whole[:SHOWN] + more))
        try:
            answer = await self.session.user.ask_permission(question, options)
        except ElicitationError:
            return False, "it needs a permission, and nobody is there to give it", False
        except EndTurn:
            return False, "the turn was cancelled", False
        await self._restore(use)
        if lasts := answer in ("always", "never"):
            self._allowed[server] = answer == "always"
        return answer in ("allow", "always"), "the user", lasts

    async def _restore(self, use: RunningCall | None) -> None:
        """Let a call look again as it did before a question stood in its place."""
        if use is not None:
            await self.session.send(ToolCallUpdate(tool_call_id=use.id, title=use.title, content=[]))

    def name(self, server: Server) -> str:
        """A server's name, for a person."""
        return f"MCP server {self.tidy(server.name)[:LINE]!r}"

    def words(self, server: Server, text: str) -> str:
        """What a server says to a person, and that it is the server that says so."""
        return self.tidy(f"{self.name(server)}: {text}", lines=True)[:SHOWN]

    def tidy(self, text: str, *, lines: bool = False) -> str:
        """A server's text without secrets, and without what a screen might obey; on one line, or on several. To be cut
        afterwards: half a secret is not found."""
        text = mask(text, self.session.secrets)
        return clean_lines(text) if lines else to_line(text)


def block(text: str) -> list[ToolCallContent]:
    return [BlockContent(content=TextBlock(text=text))]


def about(use: RunningCall | None, title: str, text: str = "") -> ToolCallFields:
    """A question to the person, which stands in the place of the call that it is for."""
    content = block(text) if text else UNSET
    if use is None:
        return ToolCallFields(tool_call_id=new_id(), title=title, kind="think", status="pending", content=content)
    return ToolCallFields(tool_call_id=use.id, title=title, content=content)


def progress_text(done: float, total: float | None, message: str) -> str:
    """How far something has come, in a few words."""
    count = f"{done:g}" if total is None else f"{done:g} of {total:g}"
    if not message:
        return count
    return message if total is None else f"{message} ({count})"


def form_of(schema: dict[str, Any], tidy: Callable[[str], str]) -> ElicitationSchema:
    """A server's form in the words of ACP. Raises ElicitationError, ValidationError."""
    fields: Any = schema.get("properties", {})
    if not isinstance(fields, dict):
        raise ElicitationError("its form has no fields")
    properties = {name: field_of(each, tidy) for name, each in cast("dict[str, Any]", fields).items()}
    form = lenient({**readable(schema, tidy), "properties": properties}, ElicitationSchema)
    if any(isinstance(each, Unknown) for each in form.properties.values()):
        raise ElicitationError("its form has a field of a kind that clients do not know")
    return form


def field_of(schema: Any, tidy: Callable[[str], str]) -> Any:
    """One of its fields; without a pattern, which could keep us busy for ever: the server checks it anyway."""
    if not isinstance(schema, dict):
        return schema
    field = readable(cast("dict[str, Any]", schema), tidy)
    field.pop("pattern", None)
    match field:
        case {"enum": [*values], "enumNames": [*names]} if len(values) == len(names):  # as it was until 2025
            field["oneOf"] = [
                {"const": value, "title": tidy(str(name))} for value, name in zip(values, names, strict=True)
            ]
        case {"oneOf": [*options]}:
            named = [cast("dict[str, Any]", option) for option in options if isinstance(option, dict)]
            field["oneOf"] = [readable(option, tidy) for option in named]
        case _:
            pass
    return field


def readable(schema: dict[str, Any], tidy: Callable[[str], str]) -> dict[str, Any]:
    """A schema whose texts for people are tidy."""
    texts = {key: tidy(text) for key in ("title", "description") if isinstance(text := schema.get(key), str)}
    return {**schema, **texts}


def choices_of(form: ElicitationSchema) -> list[tuple[str, dict[str, Any]]]:
    """The answers to a form that is only one choice, each with the content it stands for. Raises ElicitationError."""
    match [*form.properties.items()]:
        case []:
            return [("Yes", {})]
        case [(name, BooleanPropertySchema())]:
            return [("Yes", {name: True}), ("No", {name: False})]
        case [(name, StringPropertySchema(one_of=[*options]))] if len(options) <= CHOICES:
            return [(option.title or option.const, {name: option.const}) for option in options]
        case [(name, StringPropertySchema(enum=[*values]))] if len(values) <= CHOICES:
            return [(value, {name: value}) for value in values]
        case _:
            raise ElicitationError("the client shows no forms, and can only offer a few choices of which one is taken")


def sampled(asked: "CreateMessageRequestParams") -> Request:
    """A request to the model as a server wants it. Raises ValueError for one that is not answered."""
    if asked.tools:
        raise ValueError("Tools are not lent to the model here; ask without them.")
    if asked.max_tokens < 1 or not asked.messages:
        raise ValueError("There is nothing to answer: it takes messages, and maxTokens above 0.")
    system: list[Message] = [{"role": "system", "content": asked.system_prompt}] if asked.system_prompt else []
    request: Request = {"max_tokens": min(asked.max_tokens, SAMPLE_TOKENS)}
    if asked.temperature is not None:
        request["temperature"] = asked.temperature
    if asked.stop_sequences:
        request["stop"] = asked.stop_sequences
    request["messages"] = [*system, *map(as_message, asked.messages)]
    if len(msgspec.json.encode(request)) > SAMPLE_LIMIT:
        raise ValueError("That is too much to ask of the model; ask less.")
    return request


def as_message(said: "SamplingMessage") -> Message:
    """What a server has somebody say, as a message. Raises ValueError."""
    found: list[dict[str, Any]] = []
    for content in said.content_as_list:
        match content.type:
            case "text":
                found.append(to_text_part(content.text))
            case "image":
                found.append(to_image_part(content.data, content.mime_type))
            case "audio":
                found.append(to_audio_part(content.data, content.mime_type))
            case _:
                raise ValueError("Tools are not lent to the model here; ask without them.")
    if said.role == "assistant" or all(part["type"] == "text" for part in found):
        return {"role": said.role, "content": "\n\n".join(part.get("text", "") for part in found)}
    return {"role": said.role, "content": found}


def in_words(message: Message) -> str:
    """A message for a person to read."""
    said = (part.get("text") or f"[{part['type']}]" for part in to_parts(message.get("content")))
    return f"{message.get('role')}: " + "\n".join(said)
