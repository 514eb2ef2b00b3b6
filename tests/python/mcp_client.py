"""crow as a client for the MCP conformance suite: runs the scenarios that errand.py sends to a port that it prints.

For each scenario, a client opens a session with a server, and a scripted model calls the tools of the scenario. All
scenarios run in one process because importing FastMCP takes a second.
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
from urllib.parse import urljoin

import httpx2
from crow_agent.settings.mcp_servers import to_server
from crow_agent.settings.structs import OAuthSettings, ServerSettings
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    McpServer,
)
from crow_core.app import Crow
from crow_core.mcp.sdk_import import import_sdk
from crow_core.mcp.server import Server
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
"""The tool calls of each scenario; in others, every tool is called."""


@dataclass
class Errand:
    """One scenario."""

    url: str
    scenario: str
    context: dict[str, Any]
    """The scenario's further data for its client."""

    def calls(self, tools: list[dict[str, Any]]) -> Calls:
        """Return the tool calls of the model, with the server's own names."""
        schemas = {tool["function"]["name"].removeprefix("suite_"): tool["function"]["parameters"] for tool in tools}
        match self.scenario:
            case "json-schema-2020-12-preservation":
                return [("json_schema_echo", {"schema": schemas["json_schema_2020_12_tool"]})]
            case "http-custom-headers":
                wanted = [(call["name"], call.get("arguments") or {}) for call in self.context["toolCalls"]]
            case scenario:
                wanted = CALLS.get(scenario, [(name, least(schema)) for name, schema in schemas.items()])
        return [(name, arguments) for name, arguments in wanted if name in schemas]

    def script(self, request: dict[str, Any]) -> Reply:
        """Return the reply of the model: the next tool call, or the end."""
        todo = self.calls(request.get("tools", []))
        done = sum(message["role"] == "tool" for message in request["messages"])
        if done == len(todo):
            return Reply("Done.")
        name, arguments = todo[done]
        return Reply(tool_calls=[{"name": f"suite_{name}", "arguments": arguments}])

    async def run(self) -> str:
        """Run the scenario. Returns the thoughts and the messages as JSON, to explain a failure."""
        can = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
        crow = Crow(model := ScriptedModel(self.script))
        servers = [McpServer(name="suite", type="http", url=self.url, headers=[])]
        if self.scenario.startswith("auth/"):
            crow.mcp_servers(lambda session: [self.behind_oauth(session.folders.scratch())])
            servers = []
        async with connect(crow, capabilities=can, servers_wait=200) as editor:
            editor.answer = accept
            session = await editor.new_session(os.getcwd(), servers)
            await editor.prompt(session.session_id, "Go.")
        return json.dumps([editor.thoughts, model.requests[-1]["messages"]])

    def behind_oauth(self, tokens: Path) -> Server:
        """Return the server as the configuration describes one with a login."""
        page = "https://conformance-test.local/client-metadata.json"
        secret = self.context.get("client_secret", "")
        oauth = OAuthSettings(client_id=self.context.get("client_id", page), client_secret=secret)
        settings = ServerSettings(url=self.url, auth="oauth", oauth=oauth)
        if self.scenario == "auth/client-credentials-basic":
            settings.auth, oauth.issuer = "client_credentials", self.find_issuer()
        return to_server("suite", settings, os.getcwd(), tokens=tokens, visit=consent)

    def find_issuer(self) -> str:
        """Return the authorization server of the suite, which its user would know."""
        metadata = httpx2.get(urljoin(self.url, "/.well-known/oauth-protected-resource/mcp")).json()
        return metadata["authorization_servers"][0]


@asynccontextmanager
async def consent(page: str) -> AsyncGenerator[None]:
    """A user who agrees on the login page."""
    async with httpx2.AsyncClient(follow_redirects=True) as browser:
        await browser.get(page)
    yield


def least(schema: dict[str, Any]) -> dict[str, Any]:
    """Return values for the required arguments of a tool."""
    samples = {"string": "x", "integer": 0, "number": 0, "boolean": False, "object": {}, "array": []}
    properties = schema.get("properties", {})
    return {name: samples.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required", [])}


def accept(form: CreateElicitationRequest) -> CreateElicitationResponse:
    """A user who accepts a form with its defaults."""
    schema = to_builtins(form.requested_schema)
    content = {name: field.get("default", True) for name, field in schema["properties"].items()}
    return CreateElicitationResponse(action="accept", content=content)


async def main() -> None:
    async def take(reader: StreamReader, writer: StreamWriter) -> None:
        errand = Errand(**json.loads(await reader.readline()))
        async with few:
            writer.write((await errand.run()).encode())
        writer.close()

    few = asyncio.Semaphore(4)  # the suite starts all scenarios at once, and some depend on time
    import_sdk()
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main())
