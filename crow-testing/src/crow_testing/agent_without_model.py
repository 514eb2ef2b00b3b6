"""An ACP agent without a model: `python -m crow_testing.agent_without_model` does what the lines of a prompt say.

`say TEXT`, `think TEXT`, `call ID`, `diff PATH`, `done ID`, `ask ID`, `form NAME`, `secret`, `page URL`,
`choose KINDS`, `notices NUMBER`, `read PATH`, `write PATH TEXT`, `run COMMAND`, `cost AMOUNT`,
`refuse TEXT`, `die CODE TEXT`, `stop REASON`, `env NAME`, `cwd`.

`open COMMAND` does not release its terminal. `spawn` starts a process in a session of its own, and says its id. `wait`
waits until the turn is cancelled; `deaf` ignores a cancel. `print TEXT` prints outside of the protocol.

The arguments of the command are a fault: `exit`, `silent`, `rubbish`, `flood`, `login`, `version`, `no session`,
`slow close`.
"""

import asyncio
import os
import shlex
import subprocess
import sys
from itertools import count
from typing import Any

from crow_core.acp.connection import Connection, RpcError
from crow_core.acp.schema import (
    AGENT_METHODS,
    AUTH_REQUIRED,
    CLIENT_METHODS,
    INTERNAL_ERROR,
    PROTOCOL_VERSION,
    AgentCapabilities,
    AgentMessageChunk,
    AgentThoughtChunk,
    AuthenticateRequest,
    AuthMethod,
    CancelNotification,
    CloseSessionRequest,
    Cost,
    CreateElicitationRequest,
    CreateTerminalRequest,
    DiffContent,
    ElicitationSchema,
    InitializeRequest,
    InitializeResponse,
    NewSessionRequest,
    NewSessionResponse,
    NoticeUpdate,
    PermissionOption,
    PromptRequest,
    PromptResponse,
    ReadTextFileRequest,
    ReleaseTerminalRequest,
    RequestPermissionRequest,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionMode,
    SessionModeState,
    SessionNotification,
    SessionUpdate,
    SetSessionModeRequest,
    StringPropertySchema,
    TerminalContent,
    TerminalOutputRequest,
    TextBlock,
    ToolCall,
    ToolCallContent,
    ToolCallFields,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
    WaitForTerminalExitRequest,
    WriteTextFileRequest,
)
from crow_core.acp.transports import stdio
from msgspec import UNSET


class PuppetAgent:
    """An agent that does what a prompt says, line by line."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.logged_in = False
        self.ids = count(1)
        self.cancels: dict[str, asyncio.Event] = {}
        self.cwd = ""
        self.outcome = ""

    async def serve(self) -> None:
        handlers = {
            "initialize": self.initialize,
            "authenticate": self.authenticate,
            "session/new": self.open,
            "session/set_mode": self.set_mode,
            "session/prompt": self.prompt,
            "session/cancel": self.cancel,
            "session/close": self.close,
        }
        transport = await stdio()
        if self.fault == "rubbish":
            transport.write(b'Welcome!\n{"a": 1}\nnull\n[]\n\xff\xfe\n')
        if self.fault == "flood":
            while True:
                transport.write(b"All work and no play makes Jack a dull boy.\n" * 1000)
                await transport.drain()
        self.connection = Connection(transport, AGENT_METHODS, CLIENT_METHODS, handlers)
        await self.connection.serve()

    async def initialize(self, request: InitializeRequest) -> InitializeResponse:
        if self.fault == "silent":
            await asyncio.Event().wait()
        close = SessionCloseCapabilities() if self.fault == "slow close" else UNSET
        return InitializeResponse(
            protocol_version=99 if self.fault == "version" else PROTOCOL_VERSION,
            agent_capabilities=AgentCapabilities(session_capabilities=SessionCapabilities(close=close)),
            auth_methods=[AuthMethod(id="key", name="A key", description="Set PUPPET_KEY")],
        )

    async def authenticate(self, request: AuthenticateRequest) -> None:
        if request.method_id != "key":
            raise RpcError(INTERNAL_ERROR, "No such method")
        self.logged_in = True

    async def open(self, request: NewSessionRequest) -> NewSessionResponse:
        if self.fault == "no session":
            await asyncio.Event().wait()
        if self.fault == "login" and not self.logged_in:
            raise RpcError(AUTH_REQUIRED, "Authentication required")
        self.cwd = request.cwd
        id = f"puppet-{next(self.ids)}"
        self.cancels[id] = asyncio.Event()
        modes = [SessionMode(id="loud", name="Loud"), SessionMode(id="soft", name="Soft")]
        return NewSessionResponse(session_id=id, modes=SessionModeState(current_mode_id="soft", available_modes=modes))

    async def set_mode(self, request: SetSessionModeRequest) -> None:
        if request.mode_id not in ("loud", "soft"):
            raise RpcError(INTERNAL_ERROR, "No such mode")

    async def cancel(self, notification: CancelNotification) -> None:
        self.cancels[notification.session_id].set()

    async def close(self, request: CloseSessionRequest) -> None:
        await asyncio.Event().wait()

    async def prompt(self, request: PromptRequest) -> PromptResponse:
        id = request.session_id
        self.cancels[id].clear()
        text = "\n".join(block.text for block in request.prompt if isinstance(block, TextBlock))
        usage = Usage(total_tokens=120, input_tokens=100, output_tokens=20)
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            if word == "stop":
                return PromptResponse(stop_reason=rest, usage=usage)  # pyright: ignore[reportArgumentType]
            await getattr(self, f"do_{word}", self.do_nothing)(id, rest)
            if self.cancels[id].is_set():
                return PromptResponse(stop_reason="cancelled", usage=usage)
        return PromptResponse(stop_reason="end_turn", usage=usage)

    async def update(self, id: str, update: SessionUpdate) -> None:
        await self.connection.notify("session/update", SessionNotification(session_id=id, update=update))

    async def ask_client(self, method: str, params: Any) -> Any:
        return await self.connection.request(method, params)

    async def do_nothing(self, id: str, rest: str) -> None:
        """Ignore a line that says nothing to do."""

    async def do_say(self, id: str, text: str) -> None:
        await self.update(id, AgentMessageChunk(content=TextBlock(text=text)))

    async def do_think(self, id: str, text: str) -> None:
        await self.update(id, AgentThoughtChunk(content=TextBlock(text=text)))

    async def do_call(self, id: str, call: str) -> None:
        await self.update(id, ToolCall(tool_call_id=call, title=f"Call {call}", kind="edit", status="pending"))

    async def do_done(self, id: str, call: str) -> None:
        await self.update(id, ToolCallUpdate(tool_call_id=call, status="completed"))

    async def do_diff(self, id: str, path: str) -> None:
        diff = DiffContent(path=os.path.join(self.cwd, path), old_text="one\n", new_text="two\n")
        await self.update(id, ToolCall(tool_call_id="diff", title=f"Edit {path}", kind="edit", content=[diff]))
        await self.do_done(id, "diff")

    async def do_ask(self, id: str, call: str) -> None:
        options = [
            PermissionOption(option_id="go", name="Go", kind="allow_once"),
            PermissionOption(option_id="no", name="No", kind="reject_once"),
        ]
        about = ToolCallFields(tool_call_id=call, title=f"Call {call}", kind="edit", raw_input={"path": call})
        request = RequestPermissionRequest(session_id=id, tool_call=about, options=options)
        answer = await self.ask_client("session/request_permission", request)
        self.outcome = getattr(answer.outcome, "option_id", "cancelled")
        await self.do_say(id, f"{call}: {self.outcome}. ")

    async def do_form(self, id: str, rest: str) -> None:
        name, schema = f", {rest}" if rest else "", ElicitationSchema(properties={"name": StringPropertySchema()})
        request = CreateElicitationRequest(
            message=f"Your name{name}?", mode="form", session_id=id, requested_schema=schema
        )
        try:
            answer = await self.ask_client("elicitation/create", request)
        except RpcError as error:
            await self.do_say(id, f"no form: {error.message}")
        else:
            await self.do_say(id, f"{answer.action} {answer.content}")

    async def do_secret(self, id: str, rest: str) -> None:
        """Ask for a password."""
        schema = ElicitationSchema(properties={"password": StringPropertySchema()})
        request = CreateElicitationRequest(message="Log in", mode="form", session_id=id, requested_schema=schema)
        await self.do_say(id, (await self.ask_client("elicitation/create", request)).action)

    async def do_page(self, id: str, url: str) -> None:
        request = CreateElicitationRequest(message="Log in", mode="url", session_id=id, url=url, elicitation_id="p")
        await self.do_say(id, (await self.ask_client("elicitation/create", request)).action)

    async def do_choose(self, id: str, rest: str) -> None:
        """Ask for a permission without a title, with the options of these kinds."""
        options = [PermissionOption(option_id=f"{n}", name=f"{n}", kind=kind) for n, kind in enumerate(rest.split())]  # pyright: ignore
        request = RequestPermissionRequest(session_id=id, tool_call=ToolCallFields(tool_call_id="a"), options=options)
        try:
            await self.do_say(id, f"{(await self.ask_client('session/request_permission', request)).outcome}")
        except RpcError as error:
            await self.do_say(id, f"not asked: {error.describe()}")

    async def do_notices(self, id: str, number: str) -> None:
        for n in range(int(number)):
            await self.update(id, NoticeUpdate(severity="info", title=f"notice {n}"))

    async def do_read(self, id: str, path: str) -> None:
        request = ReadTextFileRequest(session_id=id, path=os.path.join(self.cwd, path))
        try:
            await self.do_say(id, (await self.ask_client("fs/read_text_file", request)).content)
        except RpcError as error:
            await self.do_say(id, f"not read: {error.message}")

    async def do_write(self, id: str, rest: str) -> None:
        path, _, text = rest.partition(" ")
        request = WriteTextFileRequest(session_id=id, path=os.path.join(self.cwd, path), content=text)
        try:
            await self.ask_client("fs/write_text_file", request)
        except RpcError as error:
            await self.do_say(id, f"not written: {[*getattr(error, '__notes__', ()), error.message][0]}")

    async def do_open(self, id: str, command: str) -> str:
        words = shlex.split(command)
        request = CreateTerminalRequest(session_id=id, command=words[0], args=words[1:], cwd=self.cwd)
        terminal: str = (await self.ask_client("terminal/create", request)).terminal_id
        content: list[ToolCallContent] = [TerminalContent(terminal_id=terminal)]
        await self.update(id, ToolCall(tool_call_id="run", title=command, kind="execute", content=content))
        return terminal

    async def do_run(self, id: str, command: str) -> None:
        try:
            terminal = await self.do_open(id, command)
        except RpcError as error:
            await self.do_say(id, f"not run: {error.message}")
            return
        names: dict[str, Any] = {"session_id": id, "terminal_id": terminal}
        await self.ask_client("terminal/wait_for_exit", WaitForTerminalExitRequest(**names))
        printed = await self.ask_client("terminal/output", TerminalOutputRequest(**names))
        await self.do_done(id, "run")
        await self.ask_client("terminal/release", ReleaseTerminalRequest(**names))
        await self.do_say(id, printed.output)

    async def do_cost(self, id: str, amount: str) -> None:
        cost = Cost(amount=float(amount), currency="USD")
        await self.update(id, UsageUpdate(used=10, size=100, cost=cost))

    async def do_spawn(self, id: str, rest: str) -> None:
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
        await self.do_say(id, str(process.pid))

    async def do_wait(self, id: str, rest: str) -> None:
        await self.cancels[id].wait()

    async def do_deaf(self, id: str, rest: str) -> None:
        await asyncio.Event().wait()

    async def do_refuse(self, id: str, text: str) -> None:
        raise RpcError(INTERNAL_ERROR, text)

    async def do_die(self, id: str, rest: str) -> None:
        code, _, text = rest.partition(" ")
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        await self.connection._transport.close()  # pyright: ignore[reportPrivateUsage]  # a thread may still write
        os._exit(int(code))

    async def do_print(self, id: str, text: str) -> None:
        self.connection._transport.write(f"{text}\n".encode())  # pyright: ignore[reportPrivateUsage]

    async def do_env(self, id: str, name: str) -> None:
        await self.do_say(id, os.environ.get(name, "unset"))

    async def do_cwd(self, id: str, rest: str) -> None:
        await self.do_say(id, f"{os.getcwd()} {self.cwd}")


def main() -> None:
    fault = " ".join(sys.argv[1:])
    if fault == "exit":
        sys.exit("There is no key. Set PUPPET_KEY.")
    asyncio.run(PuppetAgent(fault).serve())


if __name__ == "__main__":
    main()
