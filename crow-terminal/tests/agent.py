"""An ACP agent that does what the first word of a prompt says. It is not crow: it uses only crow's connection."""

import asyncio
import base64
import os
import sys
from pathlib import Path
from typing import Any

from crow_core.acp.complete_method import COMPLETE_METHOD
from crow_core.acp.connection import Connection
from crow_core.acp.schema import (
    AGENT_METHODS,
    CLIENT_METHODS,
    AgentCapabilities,
    AgentMessageChunk,
    AgentThoughtChunk,
    AvailableCommand,
    AvailableCommandsUpdate,
    BlockContent,
    CancelNotification,
    CreateElicitationRequest,
    DiffContent,
    ElicitationSchema,
    ImageBlock,
    Implementation,
    InitializeRequest,
    InitializeResponse,
    IntegerPropertySchema,
    NewSessionRequest,
    NewSessionResponse,
    PermissionOption,
    PromptCapabilities,
    PromptRequest,
    PromptResponse,
    RequestPermissionRequest,
    SelectConfigOption,
    SelectEntry,
    SessionInfoUpdate,
    SessionNotification,
    SetSessionConfigOptionRequest,
    SetSessionConfigOptionResponse,
    StringPropertySchema,
    TextBlock,
    ToolCall,
    ToolCallFields,
    ToolCallUpdate,
    UsageUpdate,
    UserMessageChunk,
)
from crow_core.acp.shared_methods import BACKGROUND_METHOD, STEERING_METHOD, to_meta
from crow_core.acp.transports import stdio

FOLDER = os.getcwd()


class Agent:
    def __init__(self, transport: Any) -> None:
        handlers = {
            "initialize": self.initialize,
            "session/new": self.new_session,
            "session/prompt": self.prompt,
            "session/cancel": self.cancel,
            "session/set_config_option": self.set_option,
        }
        self.connection = Connection(transport, AGENT_METHODS, CLIENT_METHODS, handlers, fallback=self.answer)
        self.model = "small"
        self.cancelled = asyncio.Event()

    async def initialize(self, params: InitializeRequest) -> InitializeResponse:
        methods = [COMPLETE_METHOD, *([BACKGROUND_METHOD] if "SENDS" in os.environ else [])]
        own: Any = {"crow": {"permissionAnswers": ["reason", "command"], "methods": methods}}
        return InitializeResponse(
            protocol_version=1,
            agent_info=Implementation(name="parrot", version="1"),
            agent_capabilities=AgentCapabilities(
                meta=own, prompt_capabilities=PromptCapabilities(image="BLIND" not in os.environ)
            ),
            meta=to_meta([STEERING_METHOD] if "STEERS" in os.environ else []),
        )

    async def new_session(self, params: NewSessionRequest) -> NewSessionResponse:
        commands = [AvailableCommand(name="sing", description="a song")]
        asyncio.get_running_loop().call_soon(
            lambda: asyncio.ensure_future(self.send(AvailableCommandsUpdate(available_commands=commands)))
        )
        return NewSessionResponse(session_id="s", config_options=[self.option()])

    def option(self) -> SelectConfigOption:
        entries = [SelectEntry(value=each, name=each) for each in ("small", "large")]
        return SelectConfigOption(id="model", name="Model", category="model", current_value=self.model, options=entries)

    async def set_option(self, params: SetSessionConfigOptionRequest) -> SetSessionConfigOptionResponse:
        self.model = str(params.value)
        return SetSessionConfigOptionResponse(config_options=[self.option()])

    async def send(self, update: Any) -> None:
        await self.connection.notify("session/update", SessionNotification(session_id="s", update=update))

    async def say(self, text: str) -> None:
        await self.send(AgentMessageChunk(content=TextBlock(text=text)))

    async def cancel(self, params: CancelNotification) -> None:
        self.cancelled.set()

    async def prompt(self, params: PromptRequest) -> PromptResponse:
        self.cancelled.clear()
        text = "\n".join(block.text for block in params.prompt if isinstance(block, TextBlock))
        word, _, rest = text.partition(" ")
        match word:
            case "numbers":
                for n in range(int(rest.split()[0])):
                    if self.cancelled.is_set():
                        break
                    await self.say(f"line-{n:05}\n" + ("" if n % 3 else "\n"))
                    await asyncio.sleep(float([*rest.split(), "0"][1]))
            case "timer":
                self.timer = asyncio.ensure_future(self.take_own_turn(Path(rest)))
            case "wait":
                await self.say("waiting")
                await self.cancelled.wait()
                return PromptResponse(stop_reason="cancelled")
            case "ask":
                await self.ask(rest or "rm -rf build")
            case "edit":
                await self.edit(rest or "pancakes.py")
            case "flood":
                await asyncio.gather(*(self.ask(f"rm number-{n}", str(n)) for n in range(int(rest))))
            case "stubborn":
                await self.ask("rm first")
                await self.ask("rm second", "2")
            case "late":
                asking = asyncio.ensure_future(self.ask("rm late"))
                await asyncio.sleep(0.1)
                asking.cancel()
                await self.say("The turn is over.")
            case "form":
                await self.form()
            case "both":
                await asyncio.gather(self.ask(rest), self.form())
            case "die":
                sys.stderr.write("I have had enough\n")
                sys.stderr.flush()
                os._exit(3)
            case "evil":
                await self.say("before \x1b[2J\x1b]0;title\x07 after\u202e end")
            case "bells":
                await self.say("\x07" * 200 + "\n\nafter the bells")
            case "look":
                images = [block for block in params.prompt if isinstance(block, ImageBlock)]
                sizes = ", ".join(f"{len(base64.b64decode(one.data))} bytes of {one.mime_type}" for one in images)
                await self.say(f"I see {sizes or 'nothing'}: {rest}")
            case "think":
                await self.send(AgentThoughtChunk(content=TextBlock(text="hmm, let me see")))
                await self.say("thought")
            case _:
                await self.say(f"You said: {text} <{self.model}>")
        await self.send(UsageUpdate(used=5_000, size=20_000))
        return PromptResponse(stop_reason="end_turn")

    async def take_own_turn(self, file: Path) -> None:
        """Begin a turn that nobody has prompted, once a file is there."""
        while not file.exists():  # noqa: ASYNC240 # it is on this machine
            await asyncio.sleep(0.02)
        await self.send(SessionInfoUpdate(meta={"crow": {"turn": "began"}}))
        await self.say("It is time.")
        await self.ask("make tea")
        await self.send(SessionInfoUpdate(meta={"crow": {"turn": "ended"}}))

    async def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Answer a method beyond ACP: complete a song, or take words for the running turn."""
        if method == STEERING_METHOD:
            return await self.steer(params)
        if method == BACKGROUND_METHOD:
            return await self.send_away(params)
        songs = [song for song in ("ballad", "canon") if params["text"] == f"/sing {song[:2]}"]
        return {"completions": [{"text": song, "replaces": 2, "detail": "a long one"} for song in songs]}

    async def send_away(self, params: dict[str, Any]) -> dict[str, Any]:
        """Send what runs to the background, list it, or say what was done with it."""
        if params["action"] == "send":
            self.cancelled.set()
            await self.send(SessionInfoUpdate(meta={"crow": {"background": ["sleep 9"]}}))
            return {"sent": ["1"], "work": []}
        said = {"said": f"{params['action']} {params['name']} {params['text']}"} if params["name"] else {}
        return {**said, "work": [{"name": "1", "title": "sleep 9", "end": "", "lastLine": "z\x1b[2Jz"}]}

    async def steer(self, params: dict[str, Any]) -> dict[str, str]:
        """Take words that do not begin with “no”; the others wait for the end of the turn."""
        text = params["prompt"][0]["text"]
        if text.startswith("no"):
            await self.cancelled.wait()
            return {"outcome": "promptRequired", "reason": "noRunningTurn"}
        await self.send(UserMessageChunk(content=TextBlock(text=text), message_id=text))
        return {"outcome": "injected"}

    async def ask(self, command: str, id: str = "1") -> None:
        call: Any = {"tool_call_id": id, "title": command, "kind": "execute"}
        call["raw_input"] = {"command": command}
        await self.send(ToolCall(**call, status="pending"))
        options = [
            PermissionOption(option_id="yes", name="Allow", kind="allow_once"),
            PermissionOption(option_id="ever", name="Allow always: rm *", kind="allow_always"),
            PermissionOption(option_id="no", name="Reject", kind="reject_once"),
        ]
        request = RequestPermissionRequest(session_id="s", tool_call=ToolCallFields(**call), options=options)
        answer = await self.connection.request("session/request_permission", request)
        chosen = getattr(answer.outcome, "option_id", "cancelled")
        result = [
            BlockContent(content=TextBlock(text="\n".join(f"out {n}" for n in range(20)))),
            DiffContent(path="a.py", old_text="a\n", new_text="b\n"),
        ]
        await self.send(ToolCallUpdate(tool_call_id=id, status="completed", content=result[:1]))
        await self.say(f"Answer: {chosen} {answer.meta or ''}\n\n")

    async def edit(self, path: str) -> None:
        """Ask about a change as crow does, with answers that last."""
        old = [f"line {n}" for n in range(1, 41)]
        new = [f"other {n}" if n in (3, 20, 21, 38) else line for n, line in enumerate(old, 1)]
        diff = DiffContent(path=f"{FOLDER}/{path}", old_text="\n".join(old) + "\n", new_text="\n".join(new) + "\n")
        call: Any = {"tool_call_id": "2", "title": f"str_replace {path}", "kind": "edit", "content": [diff]}
        await self.send(ToolCall(**call, status="pending"))
        options = [PermissionOption(option_id="yes", name="Allow", kind="allow_once")]
        for scope, rule in (("session", "changes to files here"), ("folder", f"changes to {path}")):
            own: Any = {"crow": {"answer": {"scope": scope, "text": rule}}}
            name = f"Allow for this {scope}: {rule}"
            options.append(PermissionOption(option_id=scope, name=name, kind="allow_always", meta=own))
        options.append(PermissionOption(option_id="no", name="Reject", kind="reject_once"))
        request = RequestPermissionRequest(session_id="s", tool_call=ToolCallFields(**call), options=options)
        answer = await self.connection.request("session/request_permission", request)
        await self.send(ToolCallUpdate(tool_call_id="2", status="completed"))
        await self.say(f"Answer: {getattr(answer.outcome, 'option_id', 'cancelled')}")

    async def form(self) -> None:
        colour = StringPropertySchema(title="Colour", enum=["red", "blue"])
        fields = {"colour": colour, "count": IntegerPropertySchema(title="How many", default=7)}
        schema = ElicitationSchema(properties=fields, required=["colour", "count"])
        request = CreateElicitationRequest(message="Some paint", mode="form", session_id="s", requested_schema=schema)
        answer = await self.connection.request("elicitation/create", request)
        await self.say(f"Form: {answer.action} {answer.content}")


async def main() -> None:
    await Agent(await stdio()).connection.serve()


asyncio.run(main())
