"""The scenarios: each is one conversation with a process of its own, and is checked afterwards by its lines.

A scenario asserts nothing. It goes on as far as it can; `CannotContinue` ends it, and what it did not reach is reported
as not tested.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crow_acp_tools.check.conversation import CannotContinue, Conversation
from crow_acp_tools.check.validation import get_path, list_or_empty
from crow_acp_tools.check.versions import CLIENT_INFO, VERSION_1, ProtocolVersion
from crow_acp_tools.check.wire_lines import CheckRequest, Message, WireLine

HELLO_PROMPT = "Say hello in one word. Héllo, 你好 \U0001f426"
FILE_NAME = "notes.txt"
"""A file in the folder of every session."""
FUTURE_VERSION = 65535
"""A version of the protocol that no agent knows."""
UNKNOWN_METHOD = "_crow/no_such_method"

IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""
AUDIO = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQIAAAAAAA=="
"""A WAV of one silent sample."""


@dataclass
class AgentFacts:
    """The agent's answer to `initialize` in one version, and the basic scenarios that failed."""

    version: ProtocolVersion = VERSION_1
    initialize: CheckRequest | None = None
    """The request `initialize` of the first conversation."""
    broken: dict[str, str] = field(default_factory=dict[str, str])
    """For each basic scenario that failed, why the scenarios that need it cannot be tested."""
    unanswered: set[str] = field(default_factory=set[str])
    """The methods that were not answered in time in a basic scenario."""

    def advertises(self, capability: str) -> bool:
        """Tell whether the agent advertises a capability, given as a dotted path: its value is true, or an object."""
        value = get_path(self.initialize and self.initialize.result, self.version.capabilities, *capability.split("."))
        return value is True or isinstance(value, dict)


@dataclass(frozen=True, eq=False)
class Scenario:
    """A conversation to have with the agent."""

    run: Callable[[Conversation], Awaitable[None]]
    needs: Literal["", "initialize", "session", "prompt"]
    """The last basic scenario that has to work for it; the empty text if none has to."""
    counts_flaws: bool
    """False where the client itself breaks the protocol: flaws in the conversation are then ignored."""

    async def __call__(self, conversation: Conversation) -> None:
        """Run it to its end, or until it cannot continue."""
        try:
            async with asyncio.timeout(3 * conversation.options.timeout):
                await self.run(conversation)
        except CannotContinue as stop:
            conversation.stopped = str(stop)
        except TimeoutError:
            conversation.give_up(f"the conversation took longer than {3 * conversation.options.timeout:g} s")


def scenario(
    needs: Literal["", "initialize", "session", "prompt"] = "session", *, counts_flaws: bool = True
) -> Callable[[Callable[[Conversation], Awaitable[None]]], Scenario]:
    def declare(hold: Callable[[Conversation], Awaitable[None]]) -> Scenario:
        return Scenario(hold, needs, counts_flaws)

    return declare


@scenario("")
async def initializing(conversation: Conversation) -> None:
    await conversation.initialize()


@scenario("initialize")
async def sessions(conversation: Conversation) -> None:
    await conversation.open_session()
    await conversation.open_another_session()


@scenario()
async def one_prompt(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.prompt(session, HELLO_PROMPT)
    await conversation.wait_quietly()


@scenario("")
async def future_version(conversation: Conversation) -> None:
    """Ask for a future version. The parameters of version 2 are sent as well, since the agent may know it."""
    params = {"protocolVersion": FUTURE_VERSION, "clientCapabilities": {}, "clientInfo": CLIENT_INFO}
    await conversation.ask("initialize", {**params, "info": CLIENT_INFO, "capabilities": {}})


@scenario("initialize")
async def ids(conversation: Conversation) -> None:
    await conversation.ask("initialize", {**conversation.version.initialize}, id=0)
    await conversation.ask("session/new", {"cwd": str(conversation.folder), "mcpServers": []}, id="an id, ünïque")


@scenario("initialize")
async def extension(conversation: Conversation) -> None:
    await conversation.initialize()
    await conversation.ask(UNKNOWN_METHOD, {"anything": 1})


@scenario("initialize")
async def invalid_params(conversation: Conversation) -> None:
    """Ask for a session without a folder, which is invalid, and then for a valid one."""
    await conversation.initialize()
    await conversation.ask("session/new", {"mcpServers": []})
    await conversation.open_another_session()


@scenario(counts_flaws=False)
async def notifications(conversation: Conversation) -> None:
    session = await conversation.open_session()
    conversation.notify("session/cancel", {"sessionId": session})
    conversation.notify("session/cancel", {"sessionId": "no such session"})
    conversation.notify("session/cancel", {})
    conversation.notify(UNKNOWN_METHOD, {})
    conversation.notify("no_such/method", {})
    await conversation.wait_quietly()


@scenario("prompt")
async def resource_link(conversation: Conversation) -> None:
    session = await conversation.open_session()
    link = {"type": "resource_link", "uri": (conversation.folder / FILE_NAME).as_uri(), "name": FILE_NAME}
    await conversation.prompt(session, "What is this file called?", link)


@scenario("prompt")
async def meta(conversation: Conversation) -> None:
    session = await conversation.open_session()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await conversation.prompt(
        session, HELLO_PROMPT, _meta={"traceparent": trace, "example.com/own": {"sessionId": "another"}}
    )


@scenario("session")
async def cancelling(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await interrupt_turn(conversation, session, lambda: conversation.cancel(session))
    await conversation.wait_quietly()


async def interrupt_turn(conversation: Conversation, session: str, send: Callable[[], WireLine]) -> None:
    """Begin a turn and interrupt it after its first update. If it ends before, interrupt a second turn at once."""
    for early in (False, True):
        turn = conversation.begin_prompt(session, conversation.options.cancel_prompt)
        if not early:
            await conversation.wait_until(
                lambda turn=turn: conversation.turn_updates(session, turn.sent),
                conversation.options.timeout / 10,
            )
            # It may end right after its first update.
            await conversation.wait_until(lambda turn=turn: conversation.has_ended(turn), 0.05)
        if not conversation.has_ended(turn):
            turn.interrupted = send()
        await conversation.finish_turn(turn)
        if turn.interrupted:
            return


@scenario("prompt")
async def loading(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.prompt(session, HELLO_PROMPT)
    await conversation.ask("session/load", {"sessionId": session, "cwd": str(conversation.folder), "mcpServers": []})
    await conversation.wait_quietly()


@scenario("prompt")
async def reloading(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.prompt(session, HELLO_PROMPT)
    await conversation.restart()
    await conversation.ask("session/load", {"sessionId": session, "cwd": str(conversation.folder), "mcpServers": []})


@scenario("prompt")
async def resuming(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.prompt(session, HELLO_PROMPT)
    await conversation.ask("session/resume", {"sessionId": session, "cwd": str(conversation.folder)})


@scenario()
async def listing(conversation: Conversation) -> None:
    await conversation.open_session()
    await conversation.ask("session/list", {})
    elsewhere = conversation.folder / "nobody works here"
    elsewhere.mkdir()
    await conversation.ask("session/list", {"cwd": str(elsewhere)})


@scenario()
async def deleting(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.ask("session/delete", {"sessionId": session})
    await conversation.ask("session/list", {"cwd": str(conversation.folder)})


@scenario("initialize")
async def deleting_nothing(conversation: Conversation) -> None:
    await conversation.initialize()
    await conversation.ask("session/delete", {"sessionId": "no such session"})


@scenario()
async def closing(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await conversation.ask("session/close", {"sessionId": session})


@scenario()
async def closing_busy(conversation: Conversation) -> None:
    session = await conversation.open_session()
    await interrupt_turn(
        conversation, session, lambda: conversation.begin("session/close", {"sessionId": session}).sent
    )
    await conversation.finish(conversation.requests[-1])


@scenario()
async def directories(conversation: Conversation) -> None:
    further = conversation.folder / "further"
    further.mkdir()
    await conversation.open_session(additionalDirectories=[str(further)])


@scenario()
async def setting_mode(conversation: Conversation) -> None:
    session = await conversation.open_session()
    modes = conversation.requests[-1].member("modes")
    ids = [get_path(mode, "id") for mode in list_or_empty(get_path(modes, "availableModes"))]
    if others := [id for id in ids if isinstance(id, str) and id != get_path(modes, "currentModeId")]:
        await conversation.ask("session/set_mode", {"sessionId": session, "modeId": others[0]})
        await conversation.wait_quietly()


@scenario()
async def setting_option(conversation: Conversation) -> None:
    session = await conversation.open_session()
    options = list_or_empty(conversation.requests[-1].member("configOptions"))
    for option in sorted(
        options, key=lambda option: get_path(option, "category") == "model"
    ):  # others depend on models
        if others := [value for value in list_choices(option) if value != get_path(option, "currentValue")]:
            id = get_path(option, conversation.version.option_id)
            kind = {} if conversation.version.number == 1 else {"type": "id"}
            params = {"sessionId": session, "configId": id, "value": others[0], **kind}
            await conversation.ask("session/set_config_option", params)
            return


def list_choices(option: Any) -> list[str]:
    """List the values of an option, also those in groups."""
    entries = list_or_empty(get_path(option, "options"))
    grouped = [inner for entry in entries for inner in list_or_empty(get_path(entry, "options"))]
    return [value for value in (get_path(entry, "value") for entry in entries + grouped) if isinstance(value, str)]


def prompt_with_block(block: Message, text: str) -> Scenario:
    """Return a scenario that sends a prompt with a block that needs a capability."""

    @scenario("prompt")
    async def show(conversation: Conversation) -> None:
        session = await conversation.open_session()
        await conversation.prompt(session, text, block)

    return show


image = prompt_with_block({"type": "image", "mimeType": "image/png", "data": IMAGE}, "Which colour is this? One word.")
audio = prompt_with_block({"type": "audio", "mimeType": "audio/wav", "data": AUDIO}, "What do you hear? One word.")
embedded = prompt_with_block(
    {"type": "resource", "resource": {"uri": "file:///poem.txt", "mimeType": "text/plain", "text": "Roses are red."}},
    "Which flowers are in this poem? One word.",
)


def prompt_with_text(text: str) -> Scenario:
    """Return a scenario that sends a prompt for which the agent may want a capability of the client."""

    @scenario("prompt")
    async def tempt(conversation: Conversation) -> None:
        session = await conversation.open_session()
        await conversation.prompt(session, text)

    return tempt


wants_file = prompt_with_text(f"Read the file {FILE_NAME} in this folder, and say what is in it.")
wants_terminal = prompt_with_text("Run the command `echo crow` and say what it printed.")
wants_answer = prompt_with_text("Ask me with a form which colour I like, if you can; else say that you cannot.")


@scenario("initialize")
async def logging_in(conversation: Conversation) -> None:
    await conversation.initialize()  # this authenticates, if a method was given
    if conversation.options.auth_method:
        await conversation.ask("session/new", {"cwd": str(conversation.folder), "mcpServers": []})


@scenario("initialize")
async def logging_out(conversation: Conversation) -> None:
    await conversation.initialize()
    if conversation.options.allow_logout:
        await conversation.ask(conversation.version.logout, {})


@scenario("initialize", counts_flaws=False)
async def broken_line(conversation: Conversation) -> None:
    await conversation.initialize()
    conversation.write(b'{"jsonrpc": "2.0", "method": "session/new", "params":')
    await conversation.wait_quietly()
    await conversation.open_another_session()


@scenario("initialize", counts_flaws=False)
async def no_message(conversation: Conversation) -> None:
    await conversation.initialize()
    conversation.write(b'{"crow": "no message"}')
    await conversation.wait_quietly()
    await conversation.open_another_session()


@scenario(counts_flaws=False)
async def unknown_session(conversation: Conversation) -> None:
    await conversation.open_session()
    await conversation.prompt("no such session", HELLO_PROMPT)


def create_files(folder: Path) -> None:
    """Create the folder of a session, with the file that the prompts mention."""
    folder.mkdir()
    (folder / FILE_NAME).write_text("The crow is in the cupboard.\n")
