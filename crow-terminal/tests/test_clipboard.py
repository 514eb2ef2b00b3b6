"""Images from the clipboard, by programs that are not there or misbehave, and the paths of images that are pasted."""

import asyncio
import base64
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from crow_terminal import clipboard
from crow_terminal.clipboard import NoImage, read_clipboard
from crow_terminal.prompt_content import find_images, find_pasted_image
from crow_testing.process_states import is_alive

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is alone in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\nPATH={os.defpath}\n{script}\n")
    (folder / name).chmod(0o755)


def paste() -> bytes:
    return base64.b64decode(asyncio.run(read_clipboard()).data)


def test_the_first_program_that_has_an_image_is_used(programs: Path):
    (programs / "image").write_bytes(PNG)
    install(programs, "wl-paste", "echo No Wayland here; exit 1")
    install(programs, "xclip", f"cat {programs}/image; echo asked >> {programs}/log")
    install(programs, "pngpaste", f"echo asked >> {programs}/log")
    assert paste() == PNG
    assert (programs / "log").read_text() == "asked\n"


def test_an_image_that_is_no_png_has_its_own_type(programs: Path):
    (programs / "image").write_bytes(b"\xff\xd8\xff\xe0 and so on")
    install(programs, "xclip", f'[ "$4" = image/jpeg ] && cat {programs}/image')
    assert asyncio.run(read_clipboard()).mime_type == "image/jpeg"


def test_macos_without_another_program(programs: Path):
    install(programs, "osascript", f"echo '«data PNGf{PNG.hex().upper()}»'")
    assert paste() == PNG


def test_no_program_reads_the_clipboard(programs: Path):
    with pytest.raises(NoImage, match="install wl-clipboard"):
        paste()


@pytest.mark.parametrize("script", ["echo just text", "exit 1", "cat /dev/null", "kill -9 $$"])
def test_a_clipboard_without_an_image(programs: Path, script: str):
    install(programs, "xclip", script)
    with pytest.raises(NoImage, match="There is no image in the clipboard"):
        paste()


def test_an_image_that_is_too_large(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clipboard, "TIMEOUT", 100.0)
    (programs / "head").write_bytes(PNG)
    install(programs, "xclip", f"cat {programs}/head /dev/zero")
    with pytest.raises(NoImage, match="larger than 10 MB"):
        paste()


def test_a_program_that_does_not_answer_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clipboard, "TIMEOUT", 0.5)
    install(programs, "xclip", f"sleep 1000 & echo $! > {programs}/pid; wait")
    with pytest.raises(NoImage, match="did not answer"):
        paste()
    gc.collect()  # reports what was left open
    pid = int((programs / "pid").read_text() or 0) if (programs / "pid").exists() else 0
    end = time.monotonic() + 90
    while pid and is_alive(pid):
        assert time.monotonic() < end


def test_a_program_that_leaves_the_pipe_to_another_process(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clipboard, "TIMEOUT", 0.5)
    install(programs, "xclip", f"setsid sleep 1000 & echo $! > {programs}/pid; wait")
    try:
        with pytest.raises(NoImage, match="did not answer"):
            paste()
        gc.collect()  # reports what was left open
    finally:
        if pid := (programs / "pid").read_text():
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    "name", ["a.png", "a b.png", "it's.jpg", 'say "hi".gif', "100%20.webp", "値段.png", "a\\b.png", "(1).PNG"]
)
def test_a_pasted_path_is_found_again_in_the_prompt(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(PNG)
    escaped = str(path).translate({ord(each): f"\\{each}" for each in " '\"\\()"})
    for pasted in (
        str(path),
        f" {path}\n",
        path.as_uri(),
        path.as_uri().replace("file://", "file://localhost"),
        escaped,
    ):
        found = find_pasted_image(pasted, str(tmp_path))
        assert find_images(f"look at {found} please", "/") == [path], pasted


@pytest.mark.parametrize("text", ["", "none.png", "see a.png", "a.png b.png", "a.txt", "\0.png", "x" * 5000 + ".png"])
def test_other_pastes_are_text(tmp_path: Path, text: str):
    for name in ("a.png", "b.png", "a.txt"):
        (tmp_path / name).write_bytes(PNG)
    assert find_pasted_image(text, str(tmp_path)) == ""
