"""The loop in one file: connect an MCP server, stream a reply, run the tool calls in it, and repeat.

    uv run streaming_async_react.py                 # a scripted model on loopback, real tools
    uv run streaming_async_react.py "What is in this folder?" --model qwen3:8b --base-url http://localhost:11434/v1

There is no agent, no session and no ACP here, only functions that crow itself is made of: `ReplyBuilder` joins
deltas to a message, `settle` completes the message, `view` derives a valid request from the log, and `Toolbox` speaks
MCP.
"""

import argparse
import asyncio
import os
import sys

import crow_mcp_server
from crow_core.content import to_content
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import Message, RawToolCall, answer_tool_call, settle
from crow_core.messages.passes import view
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model
from crow_core.models.reply import ReplyBuilder
from crow_core.testing import Reply, ScriptedServer

SYSTEM: Message = {"role": "system", "content": "You answer by looking. Use the tools, then say what you saw."}


async def react(model: Model, toolbox: Toolbox, log: list[Message], *, max_requests: int = 20) -> str:
    """Ask, act, repeat, until a reply calls no tool or `max_requests` requests have been made."""
    for _ in range(max_requests):
        reply = await ask(model, toolbox, log)
        log.append(reply)
        raw_calls = reply.get("tool_calls", [])
        if not raw_calls:
            return str(reply.get("content") or "")
        log += await act(toolbox, raw_calls)
    return "stopped: too many requests"


async def ask(model: Model, toolbox: Toolbox, log: list[Message]) -> Message:
    """Stream one reply, and print it while it arrives."""
    request = {"tools": toolbox.schemas(), "messages": [SYSTEM, *view(log)]}
    reply = ReplyBuilder()
    async for delta in model.stream(request):
        reply.add(delta)
        print(delta.get("reasoning_content", "") + delta.get("content", ""), end="", flush=True)
    print()
    used = {call["id"] for message in log for call in message.get("tool_calls", [])}
    return settle(reply.build(), used=used)


async def act(toolbox: Toolbox, raw_calls: list[RawToolCall]) -> list[Message]:
    """Run the tool calls of a reply at the same time; return their answers in the order of the calls."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(use_tool(toolbox, use)) for use in raw_calls]
    return [answer_tool_call(use, to_content(task.result())) for use, task in zip(raw_calls, tasks, strict=True)]


async def use_tool(toolbox: Toolbox, use: RawToolCall) -> ToolResult:
    """Run one tool call. A failure is a result, too: the model reads it and tries something else."""
    tool_call = toolbox.parse(use)
    print(f"● {tool_call.name} {use['function']['arguments']}")
    result = toolbox.reject(tool_call) or await toolbox.call(tool_call, {"crow/cwd": os.getcwd()})
    print("\n".join(f"  {line}" for line in str(to_content(result)).splitlines()[:8]))
    return result


def built_in_tools() -> Server:
    """crow's own tools, an MCP server like any other. Yours: `Server("mine", lambda: "http://localhost:9000/mcp")`."""
    return Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True)


async def converse(model: Model, prompt: str) -> str:
    """One prompt with the built-in tools, from connecting to closing."""
    toolbox = Toolbox()
    toolbox.add([built_in_tools()])
    await toolbox.wait(5.0)
    await toolbox.update()
    try:
        return await react(model, toolbox, [{"role": "user", "content": prompt}])
    finally:
        await toolbox.close()


SCRIPT = [
    Reply(
        "I look around.", tool_calls=[{"name": "terminal", "arguments": {"command": "echo hello from a real shell"}}]
    ),
    Reply("A real shell said hello. The model was a script, the tool was not."),
]


async def main(prompt: str, model: str, base_url: str) -> None:
    if model:
        await converse(ChatModel(name=model, base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "")), prompt)
        return
    async with ScriptedServer(SCRIPT) as server:
        scripted = ChatModel(name="scripted", base_url=server.url)
        await converse(scripted, prompt)
        await scripted.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__, add_help=True)
    parser.add_argument("prompt", nargs="?", default="Say hello through a shell.")
    parser.add_argument("--model", default="")
    parser.add_argument("--base-url", default="http://localhost:11434/v1")
    options = parser.parse_args()
    asyncio.run(main(options.prompt, options.model, options.base_url))
