"""`crow doctor --machine`: every fault is found and told with what to do, and nothing is sent."""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_agent.settings.home import Home
from crow_cli import machine as checks

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

Spoil = Callable[["Machine"], object]


async def list_faults(machine: "Machine") -> list[tuple[str, str]]:
    """List what is wrong, without remarks that this test environment causes."""
    done = await machine.crow("doctor", "--machine", "--json")
    assert done.err == ""
    found = json.loads(done.out)["machine"]
    faults = [
        (one["check"], one["sentence"])
        for one in found
        if one["verdict"] != "ok" and "no crow on PATH" not in one["sentence"]
    ]
    assert done.code == (1 if any(one["verdict"] == "no" for one in found) else 0)
    return faults


async def test_a_machine_without_faults_and_without_settings(machine: "Machine", no_local_model: None):
    assert await list_faults(machine) == []
    done = await machine.crow("doctor")
    assert (done.code, "crow setup" in done.err) == (2, True)


def hide_programs(machine: "Machine") -> None:
    machine.env["PATH"] = str(machine.home)


def open_folder(machine: "Machine") -> None:
    machine.configure("")
    os.chmod(machine.env["CROW_HOME"], 0o777)


def open_keys(machine: "Machine") -> None:
    file = machine.configure("").with_name(".env")
    file.write_text("A='b'\n")
    file.chmod(0o644)


def block_home(machine: "Machine") -> None:
    Path(machine.env["CROW_HOME"]).write_text("a file")


def add_project(machine: "Machine") -> None:
    (machine.project / ".mcp.json").write_text("{}")


def add_strange_database(machine: "Machine") -> None:
    machine.configure("").with_name("crow.db").write_bytes(b"no database at all" * 100)


NODE = '[mcp.servers.x]\ncommand = "npx"\nargs = ["-y", "x"]\n'
MODEL = '[models.a]\nbase_url = "http://127.0.0.1:1/v1"\nmodel = "a"\n'

FAULTS: dict[str, tuple[Spoil, str, str]] = {
    "no programs": (hide_programs, "programs", "There is no git on PATH. Install it"),
    "not TOML": (lambda m: m.configure("[models\n"), "settings", "config.toml is not valid TOML"),
    "unknown key": (lambda m: m.configure("mood = 1\n"), "settings", "line 1, mood: no such setting"),
    "unknown option": (lambda m: m.configure("[extensions.budgets]\nmony = 1\n"), "settings", "mony: no such setting"),
    "unknown extension": (lambda m: m.configure("[extensions.nosuch]\n"), "settings", "there is no extension 'nosuch'"),
    "unknown default": (lambda m: m.configure("model = 'b'\n" + MODEL), "settings", "names no [models.b]"),
    "unset variable": (lambda m: m.configure(MODEL + "api_key = '${NOPE}'\n"), "settings", "${NOPE}, which is not set"),
    "unknown model": (lambda m: (m.configure(MODEL), m.env.update(CROW_MODEL="b")), "settings", "CROW_MODEL=b is none"),
    "bad address": (lambda m: m.configure(MODEL.replace("http://", "ftp://")), "settings", "is no web address"),
    "open folder": (open_folder, "folders", "can be written by other users"),
    "open keys": (open_keys, "folders", "chmod 600"),
    "a file in the way": (block_home, "folders", "is a file, where crow needs a folder"),
    "untrusted": (add_project, "trust", "has settings that are not used: .mcp.json. Read and use them: crow trust"),
    "damaged database": (add_strange_database, "database", "crow.db"),
    "missing certificates": (
        lambda m: m.env.update(SSL_CERT_FILE="/nope"),
        "network",
        "SSL_CERT_FILE=/nope cannot be read",
    ),
    "proxy without a scheme": (
        lambda m: m.env.update(HTTPS_PROXY="proxy:3128"),
        "network",
        "HTTPS_PROXY is no address",
    ),
    "proxy for local servers": (
        lambda m: m.env.update(http_proxy="http://proxy:3128"),
        "network",
        "Set NO_PROXY=localhost,127.0.0.1",
    ),
    "relative PATH": (lambda m: m.env.update(PATH=m.env["PATH"] + ":bin"), "path", "relative folder 'bin'"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_is_told_with_what_to_do(machine: "Machine", name: str):
    spoil, check, words = FAULTS[name]
    spoil(machine)
    faults = await list_faults(machine)
    assert any(check == found and words in sentence for found, sentence in faults), faults


@pytest.mark.skipif(shutil.which("npx") is not None, reason="Node.js is installed")
async def test_a_server_that_needs_node_says_so(machine: "Machine"):
    machine.configure(NODE)
    assert any("It is part of Node.js: install that." in sentence for _, sentence in await list_faults(machine))


async def test_encodings_other_than_utf8_are_told(machine: "Machine"):
    machine.env |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    process = await machine.finish(await machine.start("doctor", "--machine", stdin=os.open(os.devnull, os.O_RDONLY)))
    assert sys.platform != "linux" or "Set LANG=C.UTF-8" in process.out


def test_a_locked_database_is_told(tmp_path: Path):
    file = tmp_path / "crow.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE a (b)")
        assert list(checks.check_lock(file)) == []
        connection.execute("BEGIN IMMEDIATE")
        ((verdict, sentence),) = checks.check_lock(file)
    assert (verdict, "cannot be written now" in sentence) == ("partly", True)


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(machine: checks.CheckedMachine):
        raise OSError("the disk is gone")
        yield

    monkeypatch.setitem(checks.CHECKS, "folders", fail)
    found = checks.examine({"HOME": str(tmp_path), "PATH": os.defpath}, tmp_path)
    assert Home.find({"HOME": str(tmp_path)}).config.is_relative_to(tmp_path)
    assert ("folders", "This could not be checked: the disk is gone.") in [(one.check, one.sentence) for one in found]
    assert found[-1].check != "folders"
