"""crow as the client that the MCP conformance suite judges: takes errands (errand.py) on a port that it prints.

For each, an editor opens a session with a server, and a scripted model calls the tools that the scenario wants called.
It is one process for all scenarios because FastMCP takes a second to load.
"""

import asyncio
import json
import os
import warnings
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    McpServer,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server, fastmcp_client
from crow_core.settings.config import OAuthSettings, ServerSettings, to_server
from crow_core.testing import Reply, ScriptedModel, connect
from msgspec import to_builtins

Calls = list[tuple[str, dict[str, Any]]]

ADD: Calls = [("add_numbers", {"a": 5, "b": 3})]
CALLS: dict[str, Calls] = {
    "initialize": [],
    "tools_call": ADD,
    "request-metadata": ADD,
    "sse-retry": [("test_reconnection", {})],
    "elicitation-sep1034-client-defaults": [("test_client_elicitation_defaults", {})],
    "json-schema-ref-no-deref": [],
    "sep-2322-client-request-state": [
        (f"test_mrtr_{name}", {}) for name in ("echo_state", "unrelated", "no_state", "no_result_type")
    ],
}
"""The calls that a scenario asks for; where it is not here, every tool is called."""


@dataclass
class Errand:
    """One scenario."""

    url: str
    scenario: str
    context: dict[str, Any]
    """What the scenario tells its client beside."""

    def calls(self, tools: list[dict[str, Any]]) -> Calls:
        """What the model calls, by the server's own names."""
        schemas = {tool["function"]["name"].removeprefix("judge_"): tool["function"]["parameters"] for tool in tools}
        match self.scenario:
            case "json-schema-2020-12-preservation":
                return [("json_schema_echo", {"schema": schemas["json_schema_2020_12_tool"]})]
            case "http-custom-headers":
                wanted = [(call["name"], call.get("arguments") or {}) for call in self.context["toolCalls"]]
            case scenario:
                wanted = CALLS.get(scenario, [(name, least(schema)) for name, schema in schemas.items()])
        return [(name, arguments) for name, arguments in wanted if name in schemas]

    def script(self, request: dict[str, Any]) -> Reply:
        """A model that makes one call a step."""
        todo = self.calls(request.get("tools", []))
        done = sum(message["role"] == "tool" for message in request["messages"])
        if done == len(todo):
            return Reply("Done.")
        name, arguments = todo[done]
        return Reply(tool_calls=[{"name": f"judge_{name}", "arguments": arguments}])

    async def run(self) -> str:
        """Do it; gives what there is to see of it, for who looks for the reason of a failure."""
        can = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
        crow = Crow(model := ScriptedModel(self.script))
        servers = [McpServer(name="judge", type="http", url=self.url, headers=[])]
        if self.scenario.startswith("auth/"):
            crow.mcp_servers(lambda session: [self.behind_oauth(session.folders.scratch())])
            servers = []
        async with connect(crow, capabilities=can, servers_wait=200) as editor:
            editor.answer = accept
            session = await editor.new_session(os.getcwd(), servers)
            await editor.prompt(session.session_id, "Go.")
        return json.dumps([editor.thoughts, model.requests[-1]["messages"]])

    def behind_oauth(self, tokens: Path) -> Server:
        """The server, as the configuration names one that wants a login."""
        page = "https://conformance-test.local/client-metadata.json"
        secret = self.context.get("client_secret", "")
        oauth = OAuthSettings(client_id=self.context.get("client_id", page), client_secret=secret)
        settings = ServerSettings(url=self.url, auth="oauth", oauth=oauth)
        return to_server("judge", settings, os.getcwd(), tokens=tokens, visit=consent)


@asynccontextmanager
async def consent(page: str) -> AsyncGenerator[None]:
    """A person who agrees at once."""
    async with httpx2.AsyncClient(follow_redirects=True) as browser:
        await browser.get(page)
    yield


def least(schema: dict[str, Any]) -> dict[str, Any]:
    """The fewest arguments that a tool takes."""
    samples = {"string": "x", "integer": 0, "number": 0, "boolean": False, "object": {}, "array": []}
    properties = schema.get("properties", {})
    return {name: samples.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required", [])}


def accept(form: CreateElicitationRequest) -> CreateElicitationResponse:
    """A person who leaves everything as it is, and says yes."""
    schema = to_builtins(form.requested_schema)
    content = {name: field.get("default", True) for name, field in schema["properties"].items()}
    return CreateElicitationResponse(action="accept", content=content)


async def main() -> None:
    async def take(reader: StreamReader, writer: StreamWriter) -> None:
        errand = Errand(**json.loads(await reader.readline()))
        async with few:
            writer.write((await errand.run()).encode())
        writer.close()

    few = asyncio.Semaphore(4)  # the suite asks for all at once, and looks at the clock
    fastmcp_client()
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main())
