"""The parts of `crow_system` that every system has, and those that only Windows has."""

import os
import sys
from pathlib import Path

import crow_system as system
import pytest
from crow_core.acp.transports import spawn
from crow_extensions.shell import run_command
from crow_system.files import make_private_folder

pytestmark = pytest.mark.anyio
only_windows = pytest.mark.skipif(sys.platform != "win32", reason="only on Windows")


def test_quoted_words_of_a_command_line_stay_together():
    assert system.split_command('agent "two words" three') == ["agent", "two words", "three"]
    assert system.split_command(" ") == []


@only_windows
def test_backslashes_of_a_command_line_stay():
    assert system.split_command(r'"C:\two words\a.exe" C:\b') == [r"C:\two words\a.exe", r"C:\b"]


async def test_command_of_the_configuration_keeps_its_exit_code(tmp_path: Path):
    assert await run_command("exit 3", str(tmp_path), 60) == (3, "")


async def test_command_that_is_joined_runs_with_its_words(tmp_path: Path):
    script = tmp_path / "a b.py"
    script.write_text("import sys; print(sys.argv[1:])")
    line = system.join_command([sys.executable, str(script), "it is", "c"])
    code, output = await run_command(line, str(tmp_path), 60, with_stdout=True)
    assert (code, output.strip()) == (0, "['it is', 'c']")


async def test_missing_program_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as error:
        await spawn("no-such-program-7", cwd=tmp_path)
    assert error.value.filename == "no-such-program-7"


@only_windows
async def test_program_that_is_a_cmd_file_starts(tmp_path: Path):
    (tmp_path / "agent.cmd").write_text("@echo off\necho hello %1\n")
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    process = await spawn("agent", ["you"], env)
    assert (await process.readline()).split() == [b"hello", b"you"]
    await process.close()


@pytest.mark.posix("looks at the bits of the mode")
def test_private_folder_and_the_missing_ones_above_it_are_for_their_owner_alone(tmp_path: Path) -> None:
    earlier = os.umask(0o022)
    try:
        make_private_folder(tmp_path / "data" / "sandbox" / "run")
        make_private_folder(tmp_path / "data" / "sandbox" / "run")
    finally:
        os.umask(earlier)
    made = [tmp_path / "data", tmp_path / "data" / "sandbox", tmp_path / "data" / "sandbox" / "run"]
    assert [each.stat().st_mode & 0o777 for each in made] == [0o700] * 3
