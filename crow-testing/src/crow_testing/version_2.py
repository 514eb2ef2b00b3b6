"""A client of ACP version 2 that checks every message of the agent against the official schema."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from crow_core.acp.transports import MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[3] / "crow-core/schema/schema_v2.json").read_text("utf-8"))
DEFS = SCHEMA["$defs"]
INITIALIZE: dict[str, Any] = {
    "protocolVersion": 2,
    "info": {"name": "two", "version": "1"},
    "capabilities": {"elicitation": {"form": {}, "url": {}}},
}
Update = dict[str, Any]


def find_definition(method: str, *, result: bool) -> str:
    """Find the name of the definition of a method's params or result."""
    for name, definition in DEFS.items():
        if definition.get("x-method") == method and name.endswith("Response") == result:
            return name
    raise LookupError(method)


@cache
def find_validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": DEFS})


def check(name: str, value: Any) -> None:
    """Check a value against a definition. Raises ValidationError."""
    find_validator(name).validate(value)  # pyright: ignore[reportUnknownMemberType]


class ClientV2:
    """A client of version 2, over lines in memory."""

    def __init__(self, transport: MemoryTransport, crow: Crow) -> None:
        self.transport = transport
        self.crow = crow
        """The app, for a second client of a session."""
        self.updates: list[Update] = []
        """All updates, oldest first."""
        self.questions: list[dict[str, Any]] = []
        """The params of all requests for permission."""
        self.order: list[str] = []
        """The arrived messages, in order: `result` for an answer, else the kind of the update."""
        self.withdrawn: list[Any] = []
        """The ids of the questions that were withdrawn."""
        self.permit: str | None = "allow_once"
        """The kind of the option that answers a question; None leaves it open."""
        self.faults: list[str] = []
        """The errors that answered requests without an id, and what is wrong with messages."""
        self._asked: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._changed = asyncio.Condition()

    def write(self, message: dict[str, Any]) -> None:
        self.transport.write(msgspec.json.encode({"jsonrpc": "2.0", **message}) + b"\n")

    def send(self, method: str, params: Any) -> "asyncio.Future[Any]":
        """Send a request; the future has the message that answers it."""
        id = len(self._asked) + 1
        future = asyncio.get_running_loop().create_future()
        self._asked[id] = method, future
        self.write({"id": id, "method": method, "params": params})
        return future

    async def ask(self, method: str, params: Any) -> Any:
        """Send a request and return its result; fail if it is an error."""
        answer = await self.send(method, params)
        assert "error" not in answer, answer
        return answer["result"]

    async def fail(self, method: str, params: Any) -> dict[str, Any]:
        """Send a request and return the error that answers it."""
        answer = await self.send(method, params)
        assert "result" not in answer, answer
        return answer["error"]

    def notify(self, method: str, params: Any) -> None:
        self.write({"method": method, "params": params})

    async def read(self) -> None:
        """Receive messages until the agent closes the connection."""
        while line := await self.transport.readline():
            try:
                self.receive(json.loads(line))
            except Exception as error:  # whatever is wrong with a message is a fault of the agent
                self.faults.append(f"{error!r}: {bytes(line)[:400]!r}")
            async with self._changed:
                self._changed.notify_all()

    def receive(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "session/update", "params": params}:
                check("UpdateSessionNotification", params)
                self.updates.append(params["update"])
                self.order.append(params["update"]["sessionUpdate"])
            case {"method": "session/request_permission", "id": id, "params": params}:
                check("RequestPermissionRequest", params)
                self.questions.append(params)
                if self.permit:
                    chosen = next(one["optionId"] for one in params["options"] if one["kind"] == self.permit)
                    self.write({"id": id, "result": {"outcome": {"outcome": "selected", "optionId": chosen}}})
            case {"method": "elicitation/create", "id": id, "params": params}:
                check("CreateElicitationRequest", params)
                self.write({"id": id, "result": {"action": "decline"}})
            case {"method": "$/cancel_request", "params": {"requestId": id}}:
                self.withdrawn.append(id)
            case {"method": method}:
                check(find_definition(method, result=False), message["params"]) if method[0] not in "$_" else None
            case {"id": int(id), **answer}:
                method, future = self._asked[id]
                self.order.append("result" if "result" in answer else "error")
                if "result" in answer and not method.startswith("_"):
                    check(find_definition(method, result=True), answer["result"])
                elif "error" in answer:
                    check("Error", answer["error"])
                future.set_result(message)
            case _:
                self.faults.append(str(message))

    async def until(self, condition: Callable[["ClientV2"], Any]) -> None:
        """Wait until `condition(self)` is true; it is checked after every message."""
        async with self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def open(self, cwd: str = "/", **more: Any) -> str:
        return (await self.ask("session/new", {"cwd": cwd, **more}))["sessionId"]

    async def prompt(self, session: str, text: str) -> str:
        """Send a prompt, wait until the session is idle, and return the stop reason."""
        ends = len(self.ends())
        await self.ask("session/prompt", make_prompt(session, text))
        await self.until(lambda client: len(client.ends()) > ends)
        return self.ends()[-1]["stopReason"]

    def of(self, kind: str) -> list[Update]:
        return [update for update in self.updates if update["sessionUpdate"] == kind]

    def ends(self) -> list[Update]:
        """Return the updates that end foreground work."""
        return [update for update in self.of("state_update") if "stopReason" in update]

    def states(self) -> list[str]:
        return [update["state"] for update in self.of("state_update")]

    @property
    def text(self) -> str:
        return "".join(update["content"]["text"] for update in self.of("agent_message_chunk"))

    def calls(self) -> dict[str, dict[str, Any]]:
        """Return the tool calls as a client has them after all updates."""
        return merge(self.of("tool_call_update"), "toolCallId")

    def terminals(self) -> dict[str, dict[str, Any]]:
        """Return the terminals as a client has them after all updates."""
        return merge(self.of("terminal_update"), "terminalId")


def merge(updates: list[Update], key: str) -> dict[str, dict[str, Any]]:
    """Apply upserts: an omitted field is unchanged, null clears, a value replaces."""
    found: dict[str, dict[str, Any]] = {}
    for update in updates:
        known = found.setdefault(update[key], {})
        known.update(update)
        for name in [name for name, value in update.items() if value is None]:
            del known[name]
    return found


def make_prompt(session: str, text: str) -> dict[str, Any]:
    return {"sessionId": session, "prompt": [{"type": "text", "text": text}]}


@asynccontextmanager
async def join_2(crow: Crow, **options: Any) -> AsyncGenerator[ClientV2]:
    """Connect a client of version 2 to an agent of this app. Nothing that the agent sends may break the schema."""
    crow.servers_wait = 60.0
    ours, theirs = memory_pair()
    serving = asyncio.ensure_future(AcpAgent(theirs, crow, **options).serve())
    client = ClientV2(ours, crow)
    reading = asyncio.ensure_future(client.read())
    try:
        assert (await client.ask("initialize", INITIALIZE))["protocolVersion"] == 2
        yield client
    finally:
        await ours.close()
        await asyncio.wait([serving])
        await asyncio.wait([reading], timeout=5)
        reading.cancel()
    assert client.faults == []


@asynccontextmanager
async def connect_2(crow: Crow, **options: Any) -> AsyncGenerator[ClientV2]:
    """Connect the only client of an app, as `join_2` does."""
    try:
        async with join_2(crow, **options) as client:
            yield client
    finally:
        await crow.shut_down()
