"""The import of FastMCP, and the private names of it and of the MCP SDK that crow relies on."""

import ast
import inspect
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import crow_core
import pytest
from crow_core.mcp import sdk

HOSTILE = """
FASTMCP_CLIENT_DISCONNECT_TIMEOUT=77
FASTMCP_LOG_ENABLED=true
FASTMCP_LOG_LEVEL=nonsense
FASTMCP_MCP_CAMELCASE_COMPAT=false
"""

EMBED = """
import asyncio, logging, os, sys

changes = []

def audit(event, arguments):
    if event in ("os.putenv", "os.unsetenv"):
        changes.append((event, arguments))

def set_level(logger, level):
    changes.append((logger.name, level))
    plain_set_level(logger, level)

plain_set_level, logging.Logger.setLevel = logging.Logger.setLevel, set_level
environment, finders = dict(os.environ), list(sys.meta_path)
sys.addaudithook(audit)

from crow_core import Crow
from crow_core.testing import Reply, ScriptedModel, connect
from crow_testing.servers import make_faulty_server

async def main():
    model = ScriptedModel([Reply(tool_calls=[{"name": "birds_bad", "arguments": {}}]), Reply("Done.")])
    crow = Crow(model)
    crow.servers_wait = 60
    async with connect(crow) as editor:
        session = await editor.new_session("/", [make_faulty_server("answers others", "birds")])
        await editor.prompt(session.session_id, "go")
    return model.requests[-1]["messages"][-1]["content"]

print(asyncio.run(main()))
import fastmcp
print(fastmcp.settings.client_disconnect_timeout, fastmcp.settings.log_level, fastmcp.settings.mcp_camelcase_compat)
print(changes, environment == dict(os.environ), [each for each in finders if each not in sys.meta_path])
print([each for each in sys.meta_path if "crow" in type(each).__module__], logging.getLogger("fastmcp").handlers)
"""


def run(script: str, folder: Path, **variables: str) -> str:
    """Run a script in a new process, which reads no variables for FastMCP except those given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTMCP_")} | variables
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("owner", "name"), sdk.RELIED_ON, ids=lambda each: getattr(each, "__name__", each))
def test_each_name_that_crow_relies_on_exists(owner: type, name: str):
    installed = {package: metadata.version(package) for package in sdk.VERSIONS}
    exists = hasattr(owner, name) or f"self.{name}" in inspect.getsource(owner)
    assert exists, (
        f"{owner.__qualname__} has no {name!r} any more. crow_core/mcp/sdk.py was written against {sdk.VERSIONS}; "
        f"installed are {installed}."
    )


def test_no_other_module_imports_fastmcp_or_private_parts_of_the_sdk():
    for path in Path(crow_core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for parts in (name.split(".") for name in names):
                assert path.name == "sdk.py" or parts[0] != "fastmcp", path
                assert parts[0] not in ("mcp", "mcp_types") or not any(part.startswith("_") for part in parts), path


def test_a_program_that_embeds_crow_keeps_its_environment_and_loggers_beside_a_hostile_env_file(tmp_path: Path):
    (tmp_path / ".env").write_text(HOSTILE)
    assert run(EMBED, tmp_path).splitlines() == ["caw", "5.0 INFO True", "[] True []", "[] []"]


@pytest.mark.slow
def test_variables_of_the_environment_still_set_fastmcps_settings(tmp_path: Path):
    (tmp_path / ".env").write_text(HOSTILE)
    script = "import crow_core.mcp.sdk, fastmcp; print(fastmcp.settings.client_disconnect_timeout)"
    assert run(script, tmp_path, FASTMCP_CLIENT_DISCONNECT_TIMEOUT="3") == "3.0\n"


@pytest.mark.slow
def test_a_program_that_has_imported_fastmcp_keeps_its_settings(tmp_path: Path):
    (tmp_path / ".env").write_text("FASTMCP_CLIENT_DISCONNECT_TIMEOUT=77\nFASTMCP_LOG_ENABLED=false\n")
    script = "import fastmcp; before = fastmcp.settings; import crow_core.mcp.sdk; "
    script += "print(fastmcp.settings is before, before.client_disconnect_timeout)"
    assert run(script, tmp_path) == "True 77.0\n"
