"""Tests of subscriptions: the model is told that a resource that was attached has changed."""

from typing import Any, Literal

import pytest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.resources import resources
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import EmptyResult, SubscribeRequestParams

pytestmark = pytest.mark.anyio

CHANGED = "[The resource docs://readme may have changed since it was attached."


def library(subscribed: list[str]) -> MCPServer:
    """Make a server with a resource, and a tool that changes it; clients that subscribe are added to `subscribed`."""
    server = MCPServer("docs")
    text = ["Read me."]

    @server.resource("docs://readme")
    def readme() -> str:
        return text[0]

    @server.resource("docs://other")
    def other() -> str:
        return "Other."

    @server.tool()
    async def write(uri: str, context: Context) -> str:
        text[0] = "Read me again."
        await context.notify_resource_updated(uri)
        if subscribed:
            await context.session.send_resource_updated(uri)
        return "written"

    async def subscribe(context: Any, params: SubscribeRequestParams) -> EmptyResult:
        subscribed.append(str(params.uri))
        return EmptyResult()

    server._lowlevel_server.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribe)  # pyright: ignore[reportPrivateUsage]
    return server


async def ask(crow: Crow, *prompts: str) -> None:
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for prompt in prompts:
            await editor.prompt(session.session_id, prompt)


def crow_with(model: ScriptedModel, mode: Literal["auto", "legacy"] = "auto") -> Crow:
    server = library([])
    return Crow(model, servers=[Server("docs", lambda: server, mode=mode)]).use(resources)


def writes(uri: str) -> ScriptedModel:
    call = Use(name="docs_write", arguments={"uri": uri})
    return ScriptedModel([Reply(tool_calls=[call]), Reply("Done."), Reply("Done."), Reply("Done.")])


def said(model: ScriptedModel, request: int) -> str:
    return str(model.requests[request]["messages"][-1]["content"])


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_model_is_told_at_the_next_prompt_that_an_attached_resource_has_changed(mode: Literal["auto", "legacy"]):
    model = writes("docs://readme")
    await ask(crow_with(model, mode), "@docs:docs://readme", "and now?", "and now?")
    assert "Read me." in said(model, 0)
    assert said(model, 2).startswith(f"and now?\n\n{CHANGED}")
    assert said(model, 3) == "and now?"


async def test_resource_that_is_attached_again_is_read_and_not_spoken_of():
    model = writes("docs://readme")
    await ask(crow_with(model), "@docs:docs://readme", "see @docs:docs://readme")
    assert "Read me again." in said(model, 2)
    assert CHANGED not in said(model, 2)


@pytest.mark.parametrize(("uri", "told"), [("docs://other", False), ("docs://readme/chapter", True)])
async def test_change_of_another_resource_is_ignored_and_of_a_part_told(uri: str, told: bool):
    model = writes(uri)
    await ask(crow_with(model, "legacy"), "@docs:docs://readme", "and now?")
    assert (CHANGED in said(model, 2)) == told


async def test_nothing_is_subscribed_to_if_nothing_is_attached():
    model, subscribed = writes("docs://readme"), list[str]()
    server = library(subscribed)
    crow = Crow(model, servers=[Server("docs", lambda: server, mode="legacy")]).use(resources)
    await ask(crow, "hello", "and now?")
    assert said(model, 2) == "and now?"
    assert subscribed == []
