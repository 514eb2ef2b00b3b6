"""The client of a session, and its user, who can be asked."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UNSET, Struct
from msgspec.structs import asdict, replace

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.decoding import decode, encode
from crow_core.acp.schema import (
    CancelledOutcome,
    ClientCapabilities,
    CompleteElicitationNotification,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationSchema,
    PermissionOption,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
    SessionNotification,
    SessionUpdate,
    StopReason,
    StringPropertySchema,
    ToolCall,
    ToolCallFields,
    ToolCallUpdate,
)
from crow_core.errors import ElicitationError, EndTurn
from crow_core.mcp.elicitation import FormAnswer, can_ask, check_form, check_page, check_values
from crow_core.session.log import SessionLog, new_id
from crow_core.text import clean_json, clean_lines, to_line

NOBODY_THERE = "it needs a permission, and nobody is there to give it"
"""The reason of a denial where the user could not be asked."""


class Client(Protocol):
    """The client's side of an ACP connection: an editor, a terminal, a program."""

    @property
    def capabilities(self) -> ClientCapabilities: ...

    async def request(self, method: str, params: Struct) -> Any:
        """Send a request and return its result. Raises RpcError, ConnectionClosed."""
        ...

    async def notify(self, method: str, params: Struct) -> None:
        """Send a notification; returns when the client has room for more."""
        ...


GoesOn = Callable[["asyncio.Task[StopReason]"], bool]
"""Decides for the task of a turn whether it goes on without the client that has begun it."""
REASON_LIMIT = 2_000
"""Characters of a user's reason that are passed on."""
COMMAND_LIMIT = 100_000
"""Characters of a command that the user has changed."""


@dataclass(frozen=True)
class PermissionChoice:
    """The option that the user chose, and what a client may add to it in `_meta.crow` of its answer."""

    option_id: str
    """"" for an unknown outcome."""
    reason: str = ""
    """The user's words."""
    command: str = ""
    """The command as the user changed it."""
    fault: str = ""
    """Why the answer cannot be used, as `PermissionAnswer.reason`; "" if it can."""


@dataclass(frozen=True)
class PermissionAnswer:
    """The answer to a question whether something is allowed."""

    allowed: bool
    reason: str
    """The person or the rule that decided, in words that complete "denied: …"."""
    lasts: bool = False
    """True if it holds for longer than this question."""
    choice: PermissionChoice = PermissionChoice("")


class User:
    """The person at the client of a session. A question waits until everything before it has been written."""

    def __init__(
        self,
        client: Client,
        session_id: str,
        log: SessionLog,
        announce: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`announce` is called with each question, in addition to the client."""
        self.client, self._announce = client, announce
        self._session_id = session_id
        self._log = log
        self._permission_lock = asyncio.Lock()
        """Held while a permission is asked for: one at a time."""

    async def elicit(
        self, message: str, *, form: ElicitationSchema | None = None, url: str = "", tool_call_id: str = ""
    ) -> FormAnswer:
        """Ask the user to fill in a form, or to visit a page (ACP, elicitation).

        `tool_call_id` names the tool call that the question is for. Waits without a limit; cancelling withdraws the
        question. Raises ElicitationError if the client cannot ask, or its answer does not fit the form.
        """
        if not can_ask(self.client.capabilities, "form" if form else "url"):
            raise ElicitationError(f"The client cannot {'show forms' if form else 'send a person to a page'}.")
        id = "" if form else new_id()
        if form:
            # The client answers with the names and choices that it was shown.
            form = decode(clean_json(encode(form)), ElicitationSchema)
            check_form(message, form)
        else:
            check_page(url)
        request = CreateElicitationRequest(
            message=message,
            mode="form" if form else "url",
            session_id=self._session_id,
            tool_call_id=tool_call_id or UNSET,
            requested_schema=form or UNSET,
            url=url or UNSET,
            elicitation_id=id or UNSET,
        )
        await self._log.written()
        try:
            response: CreateElicitationResponse = await self._ask("elicitation/create", request, message)
        except (RpcError, ConnectionClosed) as error:
            raise ElicitationError(f"The client did not ask: {error}") from error
        match response.action:
            case "accept":
                return FormAnswer("accept", check_values(response.content or {}, form) if form else {}, id)
            case "decline":
                return FormAnswer("decline")
            case _:
                return FormAnswer("cancel")

    async def _ask(self, method: str, request: Struct, question: str) -> Any:
        """Ask the client; meanwhile announce the question. Raises RpcError, ConnectionClosed."""
        if self._announce is None:
            return await self.client.request(method, request)
        announcing = asyncio.ensure_future(self._announce(to_line(question)))
        announcing.add_done_callback(report_failure)
        try:
            return await self.client.request(method, request)
        finally:
            announcing.cancel()

    async def complete(self, elicitation_id: str) -> None:
        """Tell the client that the user is done with a page; the id is that of the `FormAnswer`."""
        done = CompleteElicitationNotification(elicitation_id=elicitation_id)
        await self.client.notify("elicitation/complete", done)

    async def ask_permission(self, about: ToolCallFields, options: Sequence[PermissionOption]) -> PermissionChoice:
        """Ask the user to choose one of these options.

        A client that does not say that it shows their names is sent the first option of each kind: it may show one
        button for each kind. Raises ElicitationError if the client does not ask, EndTurn if it answers that the turn is
        cancelled.
        """
        offered = [*options] if shows_option_names(self.client.capabilities) else find_first_of_each_kind(options)
        request = RequestPermissionRequest(session_id=self._session_id, tool_call=about, options=offered)
        try:
            async with self._permission_lock:
                await self._log.written()
                response: RequestPermissionResponse = await self._ask(
                    "session/request_permission",
                    request,
                    about.title if isinstance(about.title, str) else "A tool call",
                )
        except (RpcError, ConnectionClosed) as error:
            raise ElicitationError(f"the client did not ask: {error}") from error
        match response.outcome:
            case CancelledOutcome():
                raise EndTurn("cancelled")
            case SelectedOutcome(option_id=id, meta=meta):
                known = any(option.option_id == id for option in offered)
                return to_choice(
                    id if known else "", meta if isinstance(meta, dict) and "crow" in meta else response.meta
                )
            case _:
                return PermissionChoice("")

    async def ask_allowed(
        self,
        about: ToolCallFields,
        lasting: Sequence[PermissionOption] = (),
        *,
        yes: str = "Allow",
        no: str = "Reject",
    ) -> PermissionAnswer:
        """Ask the user whether something is allowed; without an answer it is denied.

        `lasting` are options for longer than once, of the kinds `allow_always` and `reject_always`, the narrowest of
        each kind first. Raises EndTurn if the client answers that the turn is cancelled.
        """
        options = [
            PermissionOption(option_id="allow", name=yes, kind="allow_once"),
            *(option for option in lasting if option.kind == "allow_always"),
            PermissionOption(option_id="reject", name=no, kind="reject_once"),
            *(option for option in lasting if option.kind == "reject_always"),
        ]
        try:
            choice = await self.ask_permission(about, options)
        except ElicitationError:
            return PermissionAnswer(False, NOBODY_THERE)
        if choice.fault:
            return PermissionAnswer(False, choice.fault)
        kind = next((option.kind for option in options if option.option_id == choice.option_id), "")
        allowed, lasts = kind.startswith("allow"), kind.endswith("_always")
        rejection = f"the user rejected it: {choice.reason}" if choice.reason else "the user rejected it"
        return PermissionAnswer(allowed, "the user" if allowed else rejection, lasts, choice)

    async def confirm(self, question: str, yes: str = "Go on", no: str = "Stop") -> bool:
        """Ask a question that no tool call is about, by any means the client has; no answer means no.

        Raises EndTurn if the client answers that the turn is cancelled.
        """
        try:
            if can_ask(self.client.capabilities, "form"):
                choice = StringPropertySchema(title="Answer", enum=[yes, no])
                form = ElicitationSchema(properties={"answer": choice}, required=["answer"])
                answer = await self.elicit(question, form=form)
                return answer.content.get("answer") == yes
            return await self._confirm_by_permission(question, yes, no)
        except ElicitationError:
            return False

    async def _confirm_by_permission(self, question: str, yes: str, no: str) -> bool:
        """Ask for a permission, which needs a tool call to be about: one is shown for the question alone."""
        start = ToolCall(tool_call_id=new_id(), title=question, kind="think", status="pending")
        options = [
            PermissionOption(option_id="yes", name=yes, kind="allow_once"),
            PermissionOption(option_id="no", name=no, kind="reject_once"),
        ]
        await self._log.written()
        await self._send(start)
        try:
            return (await self.ask_permission(ToolCallFields(**asdict(start)), options)).option_id == "yes"
        finally:
            await self._send(ToolCallUpdate(tool_call_id=start.tool_call_id, status="completed"))

    async def _send(self, update: SessionUpdate) -> None:
        notification = SessionNotification(session_id=self._session_id, update=update)
        await self.client.notify("session/update", notification)

    async def ask_choice(self, about: ToolCallFields, choices: Sequence[str]) -> int | None:
        """Ask for one of these choices through a client that knows only permissions.

        A client that may not show the names of options is asked about one choice after another. Returns the index of
        the choice, or None. Raises as `ask_permission` does.
        """
        if len(choices) == 1 or shows_option_names(self.client.capabilities):
            options = [
                PermissionOption(option_id=str(n), name=name, kind="allow_once") for n, name in enumerate(choices)
            ]
            options.append(PermissionOption(option_id="none", name="None of these", kind="reject_once"))
            id = (await self.ask_permission(about, options)).option_id
            return int(id) if id.isdecimal() and int(id) < len(choices) else None
        for number, name in enumerate(choices):
            title = f"{about.title} {name}? ({number + 1} of {len(choices)})"
            options = [
                PermissionOption(option_id="yes", name=name, kind="allow_once"),
                PermissionOption(option_id="no", name="Another answer", kind="reject_once"),
            ]
            choice = await self.ask_permission(replace(about, title=title), options)
            if choice.option_id != "no":
                return number if choice.option_id == "yes" else None
        return None


def shows_option_names(capabilities: ClientCapabilities) -> bool:
    """True if a client says that it shows the name of each option of a question."""
    match capabilities.meta:
        case {"crow": {"optionNames": True}}:
            return True
        case _:
            return False


def shows_apps(capabilities: ClientCapabilities) -> bool:
    """True if a client says that it shows MCP Apps."""
    match capabilities.meta:
        case {"crow": {"apps": True}}:
            return True
        case _:
            return False


def find_first_of_each_kind(options: Sequence[PermissionOption]) -> list[PermissionOption]:
    """Find the first option of each kind, in their order."""
    first = {option.kind: option for option in reversed(options)}
    return [option for option in options if first[option.kind] is option]


def to_choice(option_id: str, meta: Any) -> PermissionChoice:
    """Convert the answer to a permission question, with the `_meta` of the answer or of its outcome.

    A reason that is not text counts as not given. A command that cannot be used is a fault: the user may have taken the
    original one back.
    """
    match meta:
        case {"crow": {**given}}:
            reason, command = given.get("reason"), given.get("command")
        case _:
            reason = command = None
    reason = clean_lines(reason).strip()[:REASON_LIMIT] if isinstance(reason, str) else ""
    if command is None:
        return PermissionChoice(option_id, reason)
    if not isinstance(command, str) or not command.strip():
        return PermissionChoice(option_id, reason, fault="the command in the client's answer is not text")
    if len(command) > COMMAND_LIMIT:
        fault = f"the command in the client's answer is longer than {COMMAND_LIMIT:,} characters"
        return PermissionChoice(option_id, reason, fault=fault)
    return PermissionChoice(option_id, reason, command)


def offer_for_session(what: str) -> list[PermissionOption]:
    """Make the options that answer for the rest of the session."""
    return [
        PermissionOption(option_id="allow-session", name=f"Allow for this session: {what}", kind="allow_always"),
        PermissionOption(option_id="reject-session", name=f"Reject for this session: {what}", kind="reject_always"),
    ]


def report_failure(announcing: "asyncio.Task[None]") -> None:
    """Log why a question was not announced; it waits for its answer all the same."""
    if not announcing.cancelled() and (error := announcing.exception()):
        logging.getLogger("crow").warning("A function of the hook `question` failed: %s", error)
