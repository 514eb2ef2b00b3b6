"""Test the real command with a real model: Gemma 3 with 270 million parameters, on llama.cpp's own server.

So small a model answers nonsense and calls no tools. The tests look at what crow does while it answers, and at what the
server reports. Where an answer has to end by itself, a JSON schema makes it a short string.
"""

import asyncio
import json
import os
import sys
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from crow_agent import Agent
from crow_cli.examined_model import ExaminedModel
from crow_cli.probes import probe_structured_output
from crow_compact.compaction import LEFT_OUT
from crow_core.acp.schema import ClientCapabilities
from crow_core.acp.transports import spawn
from crow_core.messages.passes import SUMMARY_TEMPLATE
from crow_core.testing import Editor
from msgspec import Meta

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WINDOW = 1_024
"""The server's context in tokens."""
PARAMETERS = {
    "brief": 'max_tokens = 200, json_schema = { type = "string", minLength = 20, maxLength = 60 }',
    "short": 'max_tokens = 50, json_schema = { type = "string", minLength = 5, maxLength = 12 }',
    "endless": "max_tokens = 1000, ignore_eos = true",
    "cut": "max_tokens = 8, ignore_eos = true",
}
STORY = "The crow sat on a wire above the old harbour and watched the boats come home before the rain. " * 7
"""About 150 tokens."""


@dataclass
class Command:
    """The command `crow` with an empty home and the models of the server."""

    home: Path
    llama: str
    """The server's address."""

    def __post_init__(self) -> None:
        self.env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "CROW_HOME": str(self.home), "LANG": "C.UTF-8"}
        (self.home / "prompts").mkdir()
        (self.home / "prompts" / "system.md.j2").write_text("You are crow.")  # a long one takes seconds
        self.configure()

    def configure(self, more: str = "", *, warm_up: bool = False) -> None:
        """Write the configuration, with more lines at its end."""
        lines = [] if warm_up else ["extensions.warm_up = false"]
        lines += [f'models.{name}.base_url = "{self.llama}/v1"\nmodels.{name}.model = "gemma"' for name in PARAMETERS]
        lines += [f"models.{name}.parameters = {{ temperature = 0, {text} }}" for name, text in PARAMETERS.items()]
        (self.home / "config.toml").write_text("\n".join([*lines, more]))

    async def run(self, *args: str, code: int = 0) -> str:
        """Run a command, and return its output."""
        command = [sys.executable, "-m", "crow_cli", *args]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, env=self.env, cwd=self.home
        )
        out, _ = await process.communicate()
        assert process.returncode == code, out.decode()
        return out.decode()

    @asynccontextmanager
    async def session(self, model: str) -> AsyncGenerator[tuple[Editor, str]]:
        """Run `crow acp`, and open a session with a model."""
        child = await spawn(sys.executable, ["-m", "crow_cli", "acp"], {**self.env, "CROW_MODEL": model}, self.home)
        editor = Editor(child)
        try:
            async with editor.serving():
                await editor.initialize("editor", ClientCapabilities())
                yield editor, (await editor.new_session(str(self.home))).session_id
        finally:
            with suppress(ProcessLookupError):
                child.process.kill()

    async def list_calls(self, id: str) -> list[dict[str, Any]]:
        """List the model calls of a session, oldest first."""
        return json.loads(await self.run("calls", "list", id, "--json"))[::-1]

    async def view(self, id: str) -> list[dict[str, Any]]:
        """List the messages of a session that the model sees."""
        return json.loads(await self.run("sessions", "show", id, "--view", "--json"))

    def find_last_task(self) -> int:
        """Return the number of the request that the server has begun last; -1 if there was none."""
        with urllib.request.urlopen(f"{self.llama}/slots") as answer:
            return max(slot.get("id_task", -1) for slot in json.load(answer))

    def is_busy(self) -> bool:
        """Whether the server is working on a request."""
        with urllib.request.urlopen(f"{self.llama}/slots") as answer:
            return any(slot["is_processing"] for slot in json.load(answer))


@pytest.fixture
def command(tmp_path: Path, llama: str) -> Command:
    return Command(tmp_path, llama)


async def test_doctor_finds_out_what_llama_cpp_can_do(command: Command):
    report = json.loads(await command.run("doctor", "-m", "short", "--json", code=1))
    found = {finding["probe"]: finding for finding in report["findings"]}
    for probe in ("address", "key and model", "streaming", "usage", "window", "cache"):
        verdict, sentence = found[probe]["verdict"], found[probe]["sentence"]
        assert verdict == "ok" or "Meanwhile" in sentence, sentence  # a busy machine drops a connection now and then
    assert found["window"]["sentence"].startswith("1,024 tokens fit")
    assert found["tool calls"]["verdict"] == "no", "it is too small a model"


@dataclass
class Bird:
    name: Annotated[str, Meta(max_length=20)]
    legs: Literal[2, 4]
    colour: Literal["black", "white", "grey"]


@pytest.mark.parametrize("stream", [False, True])
async def test_typed_result_comes_by_the_structured_output_of_llama_cpp(command: Command, stream: bool):
    command.configure(
        f"""
        [models.typed]
        base_url = "{command.llama}/v1"
        model = "gemma"
        parameters = {{ temperature = 0, max_tokens = 200 }}
        quirks = {{ structured_output = "alone" }}
        """
    )
    async with Agent("typed", tools=[], env=command.env, cwd=command.home) as agent:
        if stream:
            updates = agent.stream("Describe a crow.", output=Bird)
            assert [update async for update in updates]
            result = updates.result
        else:
            result = await agent.prompt("Describe a crow.", output=Bird)
        assert result is not None
        assert isinstance(result.output, Bird)
        assert not result.tool_calls
    (call,) = await command.list_calls(result.session_id)
    assert call["purpose"] == "turn"


async def test_probe_finds_the_structured_output_of_llama_cpp(llama: str):
    examined = ExaminedModel(name="gemma", base_url=f"{llama}/v1", parameters={"max_tokens": 60})
    try:
        result = await probe_structured_output(examined)
    finally:
        await examined.close()
    assert (result.verdict, result.quirks) == ("ok", {"structured_output": "alone"}), "so small a model calls no tools"


async def test_session_uses_the_cache_also_for_its_summary(command: Command):
    command.configure("extensions.compact.threshold = 0.4")
    async with command.session("brief") as (editor, id):
        turns = 0
        while "Compacted from about" not in editor.thoughts and turns < 6:
            assert (await editor.prompt(id, f"{turns}. {STORY}")).stop_reason == "end_turn"
            turns += 1
        assert (await editor.prompt(id, "And now?")).stop_reason == "end_turn"
        assert len(editor.text) > (turns + 1) * 20
    *asked, summary, last = await command.list_calls(id)
    assert ([call["purpose"] for call in asked], summary["purpose"]) == (["turn"] * turns, "compaction")
    for before, call in pairwise([*asked, summary]):
        assert call["cached"] > 0.9 * before["input"], "only what is new was read"
    assert last["input"] < summary["input"]
    seen = await command.view(id)
    assert seen[1]["content"].startswith("0. The crow sat")
    assert SUMMARY_TEMPLATE.partition("{}")[0] in seen[1]["content"]


async def test_first_prompt_finds_its_beginning_in_the_cache(command: Command):
    (command.home / "prompts" / "system.md.j2").write_text(f"You are crow. {STORY}")
    command.configure(warm_up=True)
    before = command.find_last_task()
    async with command.session("short") as (editor, id):
        async with asyncio.timeout(60):
            while command.find_last_task() == before:
                await asyncio.sleep(0.1)
        assert (await editor.prompt(id, "Hello.")).stop_reason == "end_turn"
    warm, first = await command.list_calls(id)
    assert (warm["purpose"], first["purpose"]) == ("warm-up", "turn")
    assert first["cached"] > 0.8 * warm["input"], "only what the user said was read"


async def test_request_that_the_server_refuses_as_too_long_is_compacted_and_sent_again(command: Command):
    command.configure("extensions.context_window = false\nmodels.brief.window = 100_000")
    async with command.session("brief") as (editor, id):
        for text in ("Hello.", f"This is it: {STORY * 3}", f"Longer: {STORY * 4}"):
            assert (await editor.prompt(id, text)).stop_reason == "end_turn"
        assert "Compacted from about" in editor.thoughts
    *_, refused, summary, last = await command.list_calls(id)
    assert "context" in refused["error"]
    assert (refused["purpose"], summary["purpose"], last["purpose"]) == ("turn", "compaction", "turn")
    assert summary["cached"] > 350, "it was asked for behind the answered messages"
    assert last["input"] + last["output"] <= WINDOW


async def test_cancelled_stream_frees_the_server_and_stays_in_the_session(command: Command):
    async with command.session("endless") as (editor, id):
        shown: list[str] = []
        for text in ("Tell me a story.", "Another one."):
            seen = len(editor.text)
            turn = asyncio.ensure_future(editor.prompt(id, text))
            await editor.until(lambda editor, seen=seen: len(editor.text) > seen)
            await editor.cancel(id)
            assert (await turn).stop_reason == "cancelled"
            async with asyncio.timeout(60):
                while command.is_busy():
                    await asyncio.sleep(0.1)
            shown.append(editor.text[seen:])
    told = json.loads(await command.run("sessions", "show", id, "--json"))
    stored = [message["content"] for message in told if message.get("role") == "assistant"]
    assert len(stored) == 2
    assert all(map(str.startswith, stored, shown)), "what was shown is stored"


async def test_session_goes_on_where_max_tokens_is_too_small_for_a_summary(command: Command):
    command.configure("extensions.compact.threshold = 0.4")
    async with command.session("cut") as (editor, id):
        turns = 0
        while "oldest messages behind the first were left out" not in editor.thoughts and turns < 6:
            assert (await editor.prompt(id, f"{turns}. {STORY}")).stop_reason == "max_tokens"
            turns += 1
        assert "a larger max_tokens or window may help" in editor.thoughts
        assert (await editor.prompt(id, "And now?")).stop_reason == "max_tokens"
    calls = await command.list_calls(id)
    assert [call["purpose"] for call in calls].count("compaction") == 3
    seen = str(await command.view(id))
    assert LEFT_OUT in seen
    assert f"{turns - 1}. The crow sat" in seen
    assert "1. The crow sat" not in seen
