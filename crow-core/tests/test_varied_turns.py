"""Turns of all kinds, drawn at random: each message of the agent is valid by the official schema of its version.

A second client, which speaks the other version, has the session open, too.

CROW_TURNS is the number of turns a version, 10 by default; `just turns` has 300.
"""

import asyncio
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.commands import commands
from crow_extensions.steering import steering
from crow_extensions.titles import titles
from crow_extensions.undo import undo
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.anyio

TURNS = int(os.environ.get("CROW_TURNS", "10"))
TURNS_PER_SESSION = 10
SCHEMAS = Path(__file__).parents[1] / "schema"
CLIENT = {"name": "varied", "version": "1"}
INITIALIZE: dict[int, dict[str, Any]] = {
    1: {"protocolVersion": 1, "clientInfo": CLIENT, "clientCapabilities": {"elicitation": {"form": {}}}},
    2: {"protocolVersion": 2, "info": CLIENT, "capabilities": {"elicitation": {"form": {}}}},
}
WORDS = ["Well.", "", "Ünïcode 🐦 and\nlines\n", "```diff\n- no fence ends here", "\u202e\x1b[2J", "x" * 500]
PROMPTS: list[Any] = [
    {"type": "text", "text": "go"},
    {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"},
    {"type": "resource_link", "uri": "file:///etc/hostname", "name": "hostname"},
    {"type": "resource", "resource": {"uri": "file:///poem", "text": "Roses are red."}},
]


@cache
def load_validators(version: int) -> Callable[[str], Draft202012Validator]:
    """Return a function that finds the validator of a method's params (`params METHOD`) or result (`result METHOD`)."""
    definitions = json.loads((SCHEMAS / ("schema.json" if version == 1 else "schema_v2.json")).read_text("utf-8"))[
        "$defs"
    ]
    names = {
        f"{'result' if name.endswith('Response') else 'params'} {found['x-method']}": name
        for name, found in definitions.items()
        if "x-method" in found
    }

    @cache
    def find(name: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": f"#/$defs/{names[name]}", "$defs": definitions})

    return find


class Client:
    """A client of either version that answers questions at random and checks each message."""

    def __init__(self, wire: RawClient, version: int, random: Random) -> None:
        self.wire, self.version, self.random = wire, version, random
        self.asked: dict[int, str] = {}
        self.shown: list[str] = []
        """The kinds of all updates."""
        self.session = ""
        self.valid = set[str]()
        """The keys of the chunks that are valid."""

    async def ask(self, method: str, params: Any) -> dict[str, Any]:
        """Send a request and return its answer; answer the agent's questions meanwhile."""
        id = self.send(method, params)
        while (message := await self.receive()).get("id") != id or "method" in message:
            pass
        return message

    def send(self, method: str, params: Any) -> int:
        self.wire.last_id += 1
        self.asked[self.wire.last_id] = method
        self.wire.send(self.wire.last_id, method, params)
        return self.wire.last_id

    async def receive(self) -> dict[str, Any]:
        message = await self.wire.receive()
        self.check(message)
        if message.get("method") == "session/update":
            self.shown.append(message["params"]["update"]["sessionUpdate"])
        elif "method" in message and "id" in message:
            self.answer(message)
        return message

    def check(self, message: dict[str, Any]) -> None:
        """Check a message against the schema. Raises ValidationError."""
        find = load_validators(self.version)
        if "method" in message:
            params = message["params"]
            if (key := to_key(params)) not in self.valid:
                find(f"params {message['method']}").validate(params)  # pyright: ignore[reportUnknownMemberType]
                self.valid.add(key)
        elif "result" in message:
            name = f"result {self.asked[message['id']]}"
            find(name).validate(message["result"])  # pyright: ignore[reportUnknownMemberType]
        else:
            assert isinstance(message["error"]["code"], int)
            assert message["error"]["message"]

    def answer(self, message: dict[str, Any]) -> None:
        result: Any = {"action": "decline"}
        if message["method"] == "session/request_permission":
            options = [option["optionId"] for option in message["params"]["options"]]
            outcome = {"outcome": "selected", "optionId": self.random.choice(options)}
            result = {"outcome": self.random.choice([outcome, outcome, outcome, {"outcome": "cancelled"}])}
        line = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
        self.wire.transport.write(line.encode() + b"\n")

    async def turn(self, blocks: list[Any], *, cancel: bool) -> None:
        """Send a prompt and wait for the end of its turn; with `cancel`, cancel it at its first update."""
        id = self.send("session/prompt", {"sessionId": self.session, "prompt": blocks})
        while True:
            message = await self.receive()
            update = message.get("params", {}).get("update", {})
            if cancel and "update" in message.get("params", {}):
                self.wire.notify("session/cancel", {"sessionId": self.session})
                cancel = False
            if message.get("id") == id and ("error" in message or self.version == 1):
                return
            if update.get("sessionUpdate") == "state_update" and "stopReason" in update:
                return

    async def watch(self) -> None:
        """Receive messages, and answer questions, for ever."""
        while True:
            await self.receive()

    async def open(self, cwd: str) -> None:
        answer = await self.ask("session/new", {"cwd": cwd, "mcpServers": []})
        assert "result" in answer, answer
        self.session = answer["result"]["sessionId"]

    async def reopen(self, cwd: str) -> None:
        """Open the session again, with a replay."""
        params = {"sessionId": self.session, "cwd": cwd, "mcpServers": []}
        if self.version == 1:
            await self.ask("session/load", params)
        else:
            await self.ask("session/resume", {**params, "replayFrom": {"type": "start"}})


def to_key(params: dict[str, Any]) -> str:
    """Return the JSON of a chunk of text without its text, since there are many that differ in nothing else."""
    update = params.get("update", {})
    if not update.get("sessionUpdate", "").endswith("_chunk") or not isinstance(update["content"].get("text"), str):
        return json.dumps(params)
    return json.dumps({**params, "update": {**update, "content": {**update["content"], "text": ""}}})


def draw_call(random: Random, cwd: Path) -> Use:
    """Draw a tool call, which may be wrong."""
    name = cwd / random.choice(["a.txt", "b.md", "c d.py"])
    edit: dict[str, Any] = {"path": str(name)}
    return random.choice(
        [
            Use(
                name="terminal", arguments={"command": random.choice(["echo 42", "exit 3", "printf 'é\\n%.0s' 1 2 3"])}
            ),
            Use(name="terminal", arguments={"command": "kill -9 $$"}),
            Use(name="file_editor", arguments={"command": "create", **edit, "file_text": random.choice(WORDS)}),
            Use(name="file_editor", arguments={"command": "view", **edit}),
            Use(name="file_editor", arguments={"command": "str_replace", **edit, "old_str": "Well", "new_str": "é"}),
            Use(name="plan", arguments={"steps": [{"step": "Look", "status": "in_progress"}]}),
            Use(name="plan", arguments={"steps": "none"}),
            Use(name="no_such_tool", arguments={}),
            Use(name="terminal", arguments={}),
        ]
    )


def draw_reply(random: Random, cwd: Path, request: dict[str, Any]) -> Reply:
    """Draw a model's reply; after three of a turn, one without tool calls."""
    words, thought = random.choice(WORDS), random.choice(["", "", *WORDS])
    since_user = [message["role"] for message in request["messages"]][::-1].index("user")
    if since_user > 6 or random.random() < 0.3:
        return Reply(words or "Done.", reasoning=thought)
    if random.random() < 0.1:
        return Reply(words, error=ModelError("The model is asleep."))
    return Reply(words, reasoning=thought, tool_calls=[draw_call(random, cwd) for _ in range(random.randint(1, 3))])


@pytest.mark.timeout(60 + 10 * TURNS)
@pytest.mark.parametrize("version", [1, 2])
async def test_every_message_of_varied_turns_is_valid(version: int, tmp_path: Path) -> None:
    kinds = set[str]()
    for seed in range(-(-TURNS // TURNS_PER_SESSION)):
        random = Random(f"{version} {seed}")
        server = Server(
            "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
        )
        model = ScriptedModel(lambda request, random=random: draw_reply(random, tmp_path, request))
        crow = Crow(model, servers=[server])
        for extension in (permissions, commands, usage, titles, undo, steering):
            crow.use(extension)
        crow.store = MemoryStore()
        async with connect_raw(crow) as another, connect_raw(crow) as wire:
            client, other = Client(wire, version, random), Client(another, 3 - version, Random(seed))
            assert "result" in await other.ask("initialize", INITIALIZE[3 - version])
            assert (await client.ask("initialize", INITIALIZE[version]))["result"]["protocolVersion"] == version
            await client.open(str(tmp_path))
            other.session = client.session
            await other.reopen(str(tmp_path))
            watching = asyncio.ensure_future(other.watch())
            for _ in range(min(TURNS_PER_SESSION, TURNS)):
                blocks = random.choices(PROMPTS, k=random.randint(1, 2))
                slash = [{"type": "text", "text": random.choice(["/help", "/undo", "/usage", "/no"])}]
                await client.turn(random.choice([blocks, blocks, blocks, slash]), cancel=random.random() < 0.15)
                if random.random() < 0.2:
                    await client.reopen(str(tmp_path))
                if random.random() < 0.2:
                    params = {"sessionId": client.session, "configId": "mode", "value": "accept-edits"}
                    await client.ask(
                        "session/set_config_option", {**params, **({"type": "id"} if version == 2 else {})}
                    )
            await client.ask("session/list", {})
            await client.ask("session/close", {"sessionId": client.session})
            assert client.session in crow.sessions
            assert not watching.done() or watching.result()
            watching.cancel()
            assert {"available_commands_update"} < {*other.shown}
        kinds |= {*client.shown}
    expected = {"agent_message_chunk", "tool_call_update", "available_commands_update", "usage_update"}
    assert kinds >= expected | ({"tool_call"} if version == 1 else {"state_update", "user_message", "terminal_update"})
