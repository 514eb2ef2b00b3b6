"""Test mentions, `@path` in a prompt."""

import asyncio
import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    FileSystemCapabilities,
    ResourceBlock,
    ResourceContents,
    TextBlock,
)
from crow_core.app import Crow
from crow_skills.mentions import mentions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from conftest import Talking

pytestmark = pytest.mark.anyio

App = Callable[..., Crow]

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def files(project: Path) -> Path:
    (project / "src").mkdir()
    (project / "src" / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 31)))
    (project / "with space.txt").write_text("Spaced out.")
    (project / "dot.png").write_bytes(DOT)
    (project / "blob.bin").write_bytes(b"\0\1\2" * 100)
    return project


@pytest.mark.parametrize(
    ("words", "attached"),
    [
        ("Look at @src/a.py:2-3, please.", '#L2-L3">\nline 2\nline 3\n</resource>'),
        ("Look at @src/a.py#L30", '#L30">\nline 30\n</resource>'),
        ("What is in @src?", '/src">\na.py\n</resource>'),
        ("What is in (@src/)?", '/src">\na.py\n</resource>'),
        ('Read @"with space.txt".', "\nSpaced out.\n</resource>"),
        ("Read @blob.bin", "blob.bin: 300 bytes that are not text]"),
    ],
)
async def test_mentioned_content_follows_the_users_text(
    app: App, talk: "Talking", files: Path, words: str, attached: str
):
    async with talk(app().use(mentions)) as it:
        await it.say(words)
        assert it.last_content.startswith(f"{words}\n\n")
        assert attached in it.last_content
        assert it.replayed == [words]


async def test_mentioned_image_is_attached(app: App, talk: "Talking", files: Path):
    async with talk(app().use(mentions)) as it:
        await it.say("See @dot.png")
        words, image = it.last_content
        assert words["text"] == "See @dot.png"
        assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(DOT).decode()}"


@pytest.mark.parametrize(
    "words",
    [
        "Write to me@src",
        "An @unknown one",
        "@../secret.txt",
        "@/etc/passwd",
        "@link",
        "@",
        "@@src",
        "@src/a.py:9-2",
        "`@src`",
        "npm i @scope/pkg",
        "@" + "x" * 5_000,
        "@a\0b",
    ],
)
async def test_mention_that_does_not_exist_or_is_outside_of_the_roots_stays_as_typed(
    app: App, talk: "Talking", files: Path, tmp_path: Path, words: str
):
    (tmp_path / "secret.txt").write_text("A private key.")
    (files / "link").symlink_to(tmp_path / "secret.txt")
    async with talk(app().use(mentions)) as it:
        await it.say(words)
        assert it.last_content == words


async def test_editor_buffer_is_read_instead_of_the_disk(app: App, talk: "Talking", files: Path):
    reads = ClientCapabilities(fs=FileSystemCapabilities(read_text_file=True))
    async with talk(app().use(mentions), capabilities=reads) as it:
        it.editor.buffers[str(files / "src" / "a.py")] = "not saved yet"
        await it.say("Look at @src/a.py")
        assert "not saved yet" in it.last_content


async def test_new_file_that_only_the_editor_has_is_attached(app: App, talk: "Talking", files: Path):
    reads = ClientCapabilities(fs=FileSystemCapabilities(read_text_file=True))
    async with talk(app().use(mentions), capabilities=reads) as it:
        it.editor.buffers[str(files / "src" / "new.py")] = "one\ntwo is not saved yet\n"
        await it.say("Look at @src/new.py:2, and at @src/nowhere.py.")
        assert "two is not saved yet" in it.last_content
        assert "one\n" not in it.last_content
        assert it.last_content.count("nowhere.py") == 1


async def test_file_that_the_client_attached_is_not_attached_twice(app: App, talk: "Talking", files: Path):
    resource = ResourceContents(uri=f"file://{files}/src/a.py", text="from the client")
    async with talk(app().use(mentions)) as it:
        await it.editor.prompt(it.session.id, [TextBlock(text="See @src/a.py"), ResourceBlock(resource=resource)])
        assert it.last_content.count("<resource") == 1
        assert "line 1" not in it.last_content


async def test_mentions_and_their_text_are_limited(app: App, talk: "Talking", files: Path):
    for n in range(60):
        (files / f"{n}.txt").write_text("x" * 10_000)
    os.mkfifo(files / "pipe")
    (files / "many").mkdir()
    for n in range(300):
        (files / "many" / f"{n}").touch()
    async with talk(app().use(mentions)) as it:
        await it.say("@pipe @many " + " ".join(f"@{n}.txt" for n in range(60)))
        assert "pipe: a device, pipe or socket]" in it.last_content
        assert "(100 more)" in it.last_content
        assert len(it.last_content) < 220_000
        assert it.last_content.count("<resource uri=") == 49


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
    | st.text("@./:#~L\"' 0-9asrc\n", min_size=1).filter(str.strip)
)
def test_no_mention_reaches_outside_of_the_project_or_breaks_a_prompt(
    app: App, talk: "Talking", project: Path, words: str
):
    (project / "src").mkdir(exist_ok=True)

    async def ask() -> str:
        async with talk(app().use(mentions)) as it:
            assert await it.say(f"@{words}") == "end_turn"
            return it.last_content

    content = asyncio.run(ask())
    assert content.startswith(f"@{words}")
    for line in content.removeprefix(f"@{words}").splitlines():
        assert not line.startswith("<resource") or f'uri="{project}' in line
