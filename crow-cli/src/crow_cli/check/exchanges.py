"""What is said to the agent: each exchange is held with a process of its own, and judged afterwards by what was said.

An exchange asserts nothing. It goes on as far as it can; `Stop` ends it, and what was not reached is not tested.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crow_cli.check.talk import Line, Message, Step, Stop, Talk, of_turn
from crow_cli.check.validity import at, listed

HELLO = "Say hello in one word. Héllo, 你好 \U0001f426"
FILE = "notes.txt"
"""In the folder of every session."""
FUTURE = 65535
"""A version of the protocol that no agent speaks."""
UNKNOWN_METHOD = "_crow/no_such_method"

IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""
AUDIO = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQIAAAAAAA=="
"""A WAV of one silent sample."""


@dataclass
class Facts:
    """What the agent said of itself, and which of the things that others build upon do not work."""

    greeting: Step | None = None
    """What came of `initialize`."""
    broken: dict[str, str] = field(default_factory=dict[str, str])
    """Why nothing that needs this can be tested."""

    def advertises(self, capability: str) -> bool:
        """Whether a capability, by its dotted path, is there: true, or an object."""
        value = at(self.greeting and self.greeting.result, "agentCapabilities", *capability.split("."))
        return value is True or isinstance(value, dict)


@dataclass(frozen=True, eq=False)
class Exchange:
    """One conversation to have."""

    hold: Callable[[Talk], Awaitable[None]]
    needs: Literal["", "initialize", "session", "prompt"]
    """What has to work for it, and all before that."""
    watched: bool
    """Whether what is wrong anywhere counts here too; not where the client breaks the rules itself."""

    async def __call__(self, talk: Talk) -> None:
        """Hold it to its end, or until it stops."""
        try:
            async with asyncio.timeout(3 * talk.options.timeout):
                await self.hold(talk)
        except Stop as stop:
            talk.stopped = str(stop)
        except TimeoutError:
            talk.stopped = f"the conversation took longer than {3 * talk.options.timeout:g} s"


def exchange(
    needs: Literal["", "initialize", "session", "prompt"] = "session", *, watched: bool = True
) -> Callable[[Callable[[Talk], Awaitable[None]]], Exchange]:
    def declare(hold: Callable[[Talk], Awaitable[None]]) -> Exchange:
        return Exchange(hold, needs, watched)

    return declare


@exchange("")
async def greeting(talk: Talk) -> None:
    await talk.initialize()


@exchange("initialize")
async def sessions(talk: Talk) -> None:
    await talk.open()
    await talk.open_another()


@exchange()
async def everyday(talk: Talk) -> None:
    session = await talk.open()
    await talk.prompt(session, HELLO)
    await talk.quiet()


@exchange("")
async def future(talk: Talk) -> None:
    """Version 2 wants other names for the same things, and an agent may have both."""
    client = {"name": "crow-check", "version": "1"}
    params = {"protocolVersion": FUTURE, "clientCapabilities": {}, "clientInfo": client, "info": client}
    await talk.ask("initialize", {**params, "capabilities": {}})


@exchange("initialize")
async def ids(talk: Talk) -> None:
    await talk.ask("initialize", {"protocolVersion": 1, "clientCapabilities": {}}, id=0)
    await talk.ask("session/new", {"cwd": str(talk.folder), "mcpServers": []}, id="an id, ünïque")


@exchange("initialize")
async def extension(talk: Talk) -> None:
    await talk.initialize()
    await talk.ask(UNKNOWN_METHOD, {"anything": 1})


@exchange("initialize")
async def mistake(talk: Talk) -> None:
    """A session without a folder, and one with."""
    await talk.initialize()
    await talk.ask("session/new", {"mcpServers": []})
    await talk.open_another()


@exchange(watched=False)
async def notifications(talk: Talk) -> None:
    session = await talk.open()
    talk.notify("session/cancel", {"sessionId": session})
    talk.notify("session/cancel", {"sessionId": "no such session"})
    talk.notify("session/cancel", {})
    talk.notify(UNKNOWN_METHOD, {})
    talk.notify("no_such/method", {})
    await talk.quiet()


@exchange("prompt")
async def resource_link(talk: Talk) -> None:
    session = await talk.open()
    link = {"type": "resource_link", "uri": (talk.folder / FILE).as_uri(), "name": FILE}
    await talk.prompt(session, "What is this file called?", link)


@exchange("prompt")
async def meta(talk: Talk) -> None:
    session = await talk.open()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await talk.prompt(session, HELLO, _meta={"traceparent": trace, "example.com/own": {"sessionId": "another"}})


@exchange("session")
async def cancelling(talk: Talk) -> None:
    session = await talk.open()
    await interrupt(talk, session, lambda: talk.cancel(session))
    await talk.quiet()


async def interrupt(talk: Talk, session: str, how: Callable[[], Line]) -> None:
    """Begin a turn and interrupt it once it shows something; if it is too quick for that, another one at once."""
    for early in (False, True):
        turn = talk.begin_prompt(session, talk.options.cancel_prompt)
        if not early:
            await talk.until(lambda turn=turn: of_turn(talk.updates(session, turn.sent)), talk.options.timeout / 10)
            await talk.until(turn.ended.is_set, 0.05)  # it may have ended in the same breath
        if not turn.ended.is_set():
            turn.interrupted = how()
        await talk.finish(turn)
        if turn.interrupted:
            return


@exchange("prompt")
async def loading(talk: Talk) -> None:
    session = await talk.open()
    await talk.prompt(session, HELLO)
    await talk.ask("session/load", {"sessionId": session, "cwd": str(talk.folder), "mcpServers": []})
    await talk.quiet()


@exchange("prompt")
async def resuming(talk: Talk) -> None:
    session = await talk.open()
    await talk.prompt(session, HELLO)
    await talk.ask("session/resume", {"sessionId": session, "cwd": str(talk.folder)})


@exchange()
async def listing(talk: Talk) -> None:
    await talk.open()
    await talk.ask("session/list", {})
    elsewhere = talk.folder / "nobody works here"
    elsewhere.mkdir()
    await talk.ask("session/list", {"cwd": str(elsewhere)})


@exchange()
async def deleting(talk: Talk) -> None:
    session = await talk.open()
    await talk.ask("session/delete", {"sessionId": session})
    await talk.ask("session/list", {"cwd": str(talk.folder)})


@exchange("initialize")
async def deleting_nothing(talk: Talk) -> None:
    await talk.initialize()
    await talk.ask("session/delete", {"sessionId": "no such session"})


@exchange()
async def closing(talk: Talk) -> None:
    session = await talk.open()
    await talk.ask("session/close", {"sessionId": session})


@exchange()
async def closing_busy(talk: Talk) -> None:
    session = await talk.open()
    await interrupt(talk, session, lambda: talk.begin("session/close", {"sessionId": session}).sent)
    await talk.finish(talk.steps[-1])


@exchange()
async def directories(talk: Talk) -> None:
    further = talk.folder / "further"
    further.mkdir()
    await talk.open(additionalDirectories=[str(further)])


@exchange()
async def setting_mode(talk: Talk) -> None:
    session = await talk.open()
    modes = talk.steps[-1].member("modes")
    ids = [at(mode, "id") for mode in listed(at(modes, "availableModes"))]
    if others := [id for id in ids if isinstance(id, str) and id != at(modes, "currentModeId")]:
        await talk.ask("session/set_mode", {"sessionId": session, "modeId": others[0]})
        await talk.quiet()


@exchange()
async def setting_option(talk: Talk) -> None:
    session = await talk.open()
    options = listed(talk.steps[-1].member("configOptions"))
    for option in sorted(options, key=lambda option: at(option, "category") == "model"):  # others depend on models
        if others := [value for value in choices(option) if value != at(option, "currentValue")]:
            params = {"sessionId": session, "configId": at(option, "id"), "value": others[0]}
            await talk.ask("session/set_config_option", params)
            return


def choices(option: Any) -> list[str]:
    """The values that a selection offers, in groups or not."""
    entries = listed(at(option, "options"))
    grouped = [inner for entry in entries for inner in listed(at(entry, "options"))]
    return [value for value in (at(entry, "value") for entry in entries + grouped) if isinstance(value, str)]


def showing(block: Message, words: str) -> Exchange:
    """A prompt with a block that needs a capability."""

    @exchange("prompt")
    async def show(talk: Talk) -> None:
        session = await talk.open()
        await talk.prompt(session, words, block)

    return show


image = showing({"type": "image", "mimeType": "image/png", "data": IMAGE}, "Which colour is this? One word.")
audio = showing({"type": "audio", "mimeType": "audio/wav", "data": AUDIO}, "What do you hear? One word.")
embedded = showing(
    {"type": "resource", "resource": {"uri": "file:///poem.txt", "mimeType": "text/plain", "text": "Roses are red."}},
    "Which flowers are in this poem? One word.",
)


def tempting(words: str) -> Exchange:
    """A prompt that wants something of the client that it does not offer."""

    @exchange("prompt")
    async def tempt(talk: Talk) -> None:
        session = await talk.open()
        await talk.prompt(session, words)

    return tempt


wants_file = tempting(f"Read the file {FILE} in this folder, and say what is in it.")
wants_terminal = tempting("Run the command `echo crow` and say what it printed.")
wants_answer = tempting("Ask me with a form which colour I like, if you can; else say that you cannot.")


@exchange("initialize")
async def logging_in(talk: Talk) -> None:
    await talk.initialize()  # which authenticates, with the method that was given
    if talk.options.auth_method:
        await talk.ask("session/new", {"cwd": str(talk.folder), "mcpServers": []})


@exchange("initialize")
async def logging_out(talk: Talk) -> None:
    if talk.options.allow_logout:
        await talk.initialize()
        await talk.ask("logout", {})


@exchange("initialize", watched=False)
async def broken_line(talk: Talk) -> None:
    await talk.initialize()
    talk.write(b'{"jsonrpc": "2.0", "method": "session/new", "params":')
    await talk.quiet()
    await talk.open_another()


@exchange("initialize", watched=False)
async def no_message(talk: Talk) -> None:
    await talk.initialize()
    talk.write(b'{"crow": "no message"}')
    await talk.quiet()
    await talk.open_another()


@exchange(watched=False)
async def unknown_session(talk: Talk) -> None:
    await talk.open()
    await talk.prompt("no such session", HELLO)


def furnish(folder: Path) -> None:
    """Put into a session's folder what the prompts speak of."""
    (folder / FILE).write_text("The crow is in the cupboard.\n")
