"""crow as the client that the MCP conformance suite judges: `python mcp_client.py URL`, the scenario in the environment

An editor opens a session with the server, and a scripted model calls the tools that the scenario wants called.
"""

import asyncio
import json
import os
import sys
import warnings
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from crow_core import app
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    McpServer,
)
from crow_core.app import Crow
from crow_core.servers import Server, fastmcp_client
from crow_core.testing import Reply, ScriptedModel, connect
from msgspec import to_builtins

SCENARIO = os.environ.get("MCP_CONFORMANCE_SCENARIO", "initialize")
CONTEXT: dict[str, Any] = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
ADD = ("add_numbers", {"a": 5, "b": 3})
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "initialize": [],
    "tools_call": [ADD],
    "request-metadata": [ADD],
    "sse-retry": [("test_reconnection", {})],
    "elicitation-sep1034-client-defaults": [("test_client_elicitation_defaults", {})],
    "json-schema-ref-no-deref": [],
    "http-custom-headers": [(call["name"], call.get("arguments") or {}) for call in CONTEXT.get("toolCalls", [])],
    "sep-2322-client-request-state": [
        (f"test_mrtr_{name}", {}) for name in ("echo_state", "unrelated", "no_state", "no_result_type")
    ],
}
"""The calls that a scenario asks for; where it is not here, every tool is called."""


def calls(tools: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """What the model calls, under the names that it was offered."""
    functions = {tool["function"]["name"].removeprefix("judge_"): tool["function"] for tool in tools}
    if SCENARIO == "json-schema-2020-12-preservation":
        return [("json_schema_echo", {"schema": functions["json_schema_2020_12_tool"]["parameters"]})]
    every = [(name, least(tool["parameters"])) for name, tool in functions.items()]
    return [(name, arguments) for name, arguments in CALLS.get(SCENARIO, every) if name in functions]


def least(schema: dict[str, Any]) -> dict[str, Any]:
    """The fewest arguments that a tool takes."""
    samples = {"string": "x", "integer": 0, "number": 0, "boolean": False, "object": {}, "array": []}
    properties = schema.get("properties", {})
    return {name: samples.get(properties.get(name, {}).get("type"), "x") for name in schema.get("required", [])}


def script(request: dict[str, Any]) -> Reply:
    """A model that makes one call a step."""
    todo = calls(request.get("tools", []))
    done = sum(message["role"] == "tool" for message in request["messages"])
    if done == len(todo):
        return Reply("Done.")
    name, arguments = todo[done]
    return Reply(tool_calls=[{"name": f"judge_{name}", "arguments": arguments}])


def accept(form: CreateElicitationRequest) -> CreateElicitationResponse:
    """A person who leaves everything as it is, and says yes."""
    schema = to_builtins(form.requested_schema)
    content = {name: field.get("default", True) for name, field in schema["properties"].items()}
    return CreateElicitationResponse(action="accept", content=content)


def authorized(url: str) -> Server:
    """The server behind OAuth, for a person who consents at once and has no browser."""
    fastmcp_client()
    import httpx2
    from fastmcp.client.auth import OAuth
    from fastmcp.client.transports import StreamableHttpTransport
    from mcp.shared.auth import AuthorizationCodeResult

    class Consent(OAuth):
        async def redirect_handler(self, authorization_url: str) -> None:
            async with httpx2.AsyncClient() as client:
                answer = await client.get(authorization_url, follow_redirects=False)
            self.answered = dict(parse_qsl(urlsplit(answer.headers["location"]).query))

        async def callback_handler(self) -> AuthorizationCodeResult:
            found = self.answered
            return AuthorizationCodeResult(code=found["code"], state=found.get("state"), iss=found.get("iss"))

    def source() -> Any:
        who = {key: CONTEXT[key] for key in ("client_id", "client_secret") if key in CONTEXT}
        how = {"token_endpoint_auth_method": "client_secret_basic"} if "client_secret" in who else {}
        page = "https://conformance-test.local/client-metadata.json"
        auth = Consent(client_metadata_url=page, additional_client_metadata=how, **who)
        return StreamableHttpTransport(url, auth=auth)

    return Server("judge", source)


async def main(url: str) -> None:
    app.SERVERS_WAIT = 60  # all scenarios run at once, and each loads FastMCP
    capabilities = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
    model = ScriptedModel(script)
    crow = Crow(model)
    behind_oauth = SCENARIO.startswith("auth/")
    if behind_oauth:
        crow.mcp_servers(lambda session: [authorized(url)])
    servers = [] if behind_oauth else [McpServer(name="judge", type="http", url=url, headers=[])]
    async with connect(crow, capabilities=capabilities) as editor:
        editor.answer = accept
        session = await editor.new_session(os.getcwd(), servers)
        await editor.prompt(session.session_id, "Go.")
    said = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    print(
        json.dumps(
            {
                "told": editor.thoughts,
                "tools": [t["function"]["name"] for t in model.requests[0].get("tools", [])],
                "results": said,
            }
        )
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(main(sys.argv[1]))
