"""Test that crow depends on one kind of system in few places only, and works with what other systems have."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
POSIX_ONLY = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
ROOM = "crow_system/posix.py"

NO_PROC = '''
"""Loaded by each Python that the tests start: a read of /proc by a module of crow ends the process."""
import os
import sys


def refuse_proc(event, arguments):
    if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith("/proc"):
        return
    caller = sys._getframe(1)
    while caller.f_code.co_filename.startswith("<frozen"):
        caller = caller.f_back
    if os.sep + "src" + os.sep + "crow_" in caller.f_code.co_filename:
        os.write(2, f"{caller.f_code.co_filename} reads {arguments[0]}\\n".encode())
        os._exit(99)


sys.addaudithook(refuse_proc)
'''

HELD = '''
"""Loaded by each Python that the tests start: no file can be replaced, as where Windows has it open elsewhere."""
import os


def refuse(old, new):
    error = PermissionError(13, "The process cannot access the file")
    error.winerror = 32
    raise error


os.replace = refuse
'''


def find_imports(path: Path) -> set[str]:
    """Return the top-level modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


OTHERS = ("crow-testing", "crow-sandbox")


def list_sources() -> list[Path]:
    """List the sources that run on every system: not those for tests, nor the sandbox, which is for Linux."""
    return [path for path in ROOT.glob("crow-*/src/**/*.py") if path.relative_to(ROOT).parts[0] not in OTHERS]


def test_only_the_module_for_posix_imports_what_windows_lacks():
    places = {path: find_imports(path) & POSIX_ONLY for path in list_sources()}
    assert {path.as_posix().partition("/src/")[2] for path, found in places.items() if found} == {ROOM}


def test_files_are_replaced_in_one_place_since_another_program_may_hold_them():
    for path in list_sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="replace", value=ast.Name(id="os"))):
                    assert path.name == "held.py", path
                case ast.Call(func=ast.Attribute(attr="replace" | "rename"), args=[_], keywords=[]):
                    assert path.match(ROOM), f"{path}:{node.lineno}"
                case _:
                    pass


def test_psutil_is_not_imported_at_the_top_of_a_module():
    for path in ROOT.glob("crow-*/src/**/*.py"):
        top = ast.parse(path.read_text("utf-8")).body
        assert not [node for node in top if isinstance(node, ast.Import) and node.names[0].name == "psutil"], path


@pytest.mark.skipif(sys.platform == "win32", reason="these tests look at process groups and descriptors")
def test_what_other_systems_take_works_here_and_reads_nothing_in_proc(tmp_path: Path):
    """A choice of the tests of the front door, of processes and of files; `just systems` runs all tests so."""
    (tmp_path / "sitecustomize.py").write_text(NO_PROC)
    chosen = {"CROW_TEST_SYSTEM": "paths,psutil,threads", "PYTHONPATH": str(tmp_path), "CROW_TEST_ALL": ""}
    files = (
        "crow-core/tests/acp/test_transports.py",
        "crow-cli/tests/test_acp_process.py",
        "crow-cli/tests/test_own_tree.py",
        "crow-mcp-server/tests/test_file_editor.py",
        "crow-mcp-server/tests/test_search.py",
        "crow-mcp-server/tests/test_terminal.py",
        "crow-persistence/tests/test_leases.py",
    )
    names = (
        "updates_arrive_in_order or data_written_before or files_can_be_input or terminal_can_be or does_not_read"
        " or user_has_started or view_of_a_folder or creates_parents or symlink"
        " or cancelled_call_kills or killed_process_expires or program_holds or program_that_holds"
    )
    command = [sys.executable, "-m", "pytest", "-n0", "--timeout=120", "-p", "no:cacheprovider", *files, "-k", names]
    environment = {**os.environ, **chosen}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " reads /proc" not in done.stdout + done.stderr


def test_console_that_lacks_a_character_shows_its_number(tmp_path: Path):
    """As code page 437, the default of consoles of Windows in English."""
    command = [sys.executable, "-m", "crow_cli", "acp", "--print-config", "zed"]
    environment = {**os.environ, "CROW_HOME": str(tmp_path / "\N{EURO SIGN}"), "PYTHONIOENCODING": "cp437"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="cp437", check=False)
    assert (done.returncode, json.loads(done.stdout)["agent_servers"]["crow"]["env"]) == (
        0,
        {"CROW_HOME": str(tmp_path / "\N{EURO SIGN}")},
    )


def test_settings_that_another_program_holds_stay_as_they_are_and_crow_says_so(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(HELD)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text("max_requests = 7\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CROW_HOME": str(home)}
    command = [sys.executable, "-m", "crow_cli", "config", "set", "max_requests", "8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines() == [
        f"crow: {home / 'config.toml'} cannot be written (another program has it open). Nothing was changed."
    ]
    assert (home / "config.toml").read_text() == "max_requests = 7\n"
    assert [each.name for each in home.iterdir()] == ["config.toml"]
