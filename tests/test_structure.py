"""The structure of the workspace: which module imports which, what importing does (nothing), what is loaded when."""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_core.acp.client import AcpClient
from crow_core.acp.schema import ClientCapabilities
from crow_core.acp.transports import spawn
from crow_core.hooks import Hook
from crow_core.react import react
from crow_core.session.session import Hooks
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect

HEAVY_AT_INITIALIZE = {
    *("fastmcp", "mcp", "pydantic", "httpx2", "openai", "jinja2", "click", "starlette", "uvicorn", "jsonschema"),
    *("sqlalchemy", "alembic", "psycopg", "psutil"),
}
HEAVY_AT_REQUEST = {
    *("fastmcp", "mcp", "pydantic", "openai", "starlette", "uvicorn", "click", "jsonschema"),
    *("sqlalchemy", "alembic", "psycopg", "psutil"),
}


ROOT = Path(__file__).parents[1]
PACKAGES = [path.name for path in sorted(ROOT.glob("crow-*/src/*")) if path.is_dir() and path.name.startswith("crow_")]


def folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def modules_of(package: str) -> dict[str, Path]:
    """Every module of a package with its file."""
    folder = folder_of(package)
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder.parent).with_suffix("")
        if not {"project", "suites"} & {*inside.parts}:  # a demo's project and the suites of tasks are data
            found[".".join(inside.parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or later, also what only the type checker reads."""
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"{path} imports relatively"
                yield from (f"{module}.{name.name}" for name in names)
            case _:
                pass
        todo += ast.iter_child_nodes(node)


def ours(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the same package that a file imports: `a.b` of `from a.b import c`, unless `a.b.c` is one."""
    return {
        name if name in modules else name.rpartition(".")[0]
        for name in imports_of(path)
        if name in modules or name.rpartition(".")[0] in modules
    }


CORE = {"crow_system", "crow_core"}
EXTENSIONS = {"crow_sandbox", "crow_permissions", "crow_extensions", "crow_persistence", "crow_compact", "crow_skills"}
AGENT = {*CORE, *EXTENSIONS, "crow_mcp_server"}
MAY_IMPORT = {
    "crow_system": set[str](),
    "crow_mcp_server": {"crow_system"},
    "crow_core": {"crow_system"},
    "crow_sandbox": {"crow_system"},
    "crow_permissions": {*CORE, "crow_sandbox"},
    "crow_extensions": CORE,
    "crow_persistence": CORE,
    "crow_compact": CORE,
    "crow_skills": CORE,
    "crow_terminal": CORE,
    "crow_acp_tools": CORE,
    "crow_agent": AGENT,
    "crow_cli": {*AGENT, "crow_agent", "crow_terminal"},
    "crow_eval": {*AGENT, "crow_agent", "crow_cli"},
    "crow_web": {*AGENT, "crow_agent", "crow_cli", "crow_eval", "crow_terminal"},
    "crow_testing": {*AGENT, "crow_agent", "crow_cli"},
}
"""The packages from which each package may import, lowest first."""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_downwards_only(package: str):
    for name, path in modules_of(package).items():
        imported = {name.partition(".")[0] for name in imports_of(path)}
        imported = {package for package in imported if package.startswith("crow_")}
        assert imported <= MAY_IMPORT[package] | {package}, name


def test_every_package_has_its_floor_and_says_in_its_readme_what_it_may_import():
    assert {*MAY_IMPORT} == {*PACKAGES}
    for package in PACKAGES:
        assert "import" in (ROOT / package.replace("_", "-") / "README.md").read_text("utf-8"), package


def test_the_wire_imports_nothing_else_of_the_core():
    modules = modules_of("crow_core")
    for name, path in modules.items():
        if name.startswith("crow_core.acp"):
            ours_of = ("crow_core.acp", "crow_system")  # the latter says how the system reads a pipe
            assert all(imported.startswith(ours_of) for imported in ours(path, modules)), name


def test_the_core_does_not_need_its_test_doubles():
    modules = modules_of("crow_core")
    for name, path in modules.items():
        if not name.startswith("crow_core.testing"):
            assert not {imported for imported in ours(path, modules) if "testing" in imported}, name


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str):
    """Also those inside functions, and for the type checker alone: files can be read in one order."""
    modules = modules_of(package)
    graph = {name: ours(path, modules) - {name} for name, path in modules.items()}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert not graph, f"import knots among {sorted(graph)}"


def test_the_map_in_agents_md_lists_every_module_in_import_order():
    modules = modules_of("crow_core")
    _, _, text = (ROOT / "AGENTS.md").read_text("utf-8").partition("\n`crow-core/src/crow_core/`")
    rows = text.partition("\n|---|---|\n")[2].split("\n\n")[0].splitlines()
    row_of: dict[str, int] = {}
    for number, row in enumerate(rows):
        for name in re.findall(r"`([\w/]+)(?:\.py)?`", row.split("|")[1]):
            row_of["crow_core." + name.strip("/").replace("/", ".")] = number

    def find_row(module: str) -> int:
        while module not in row_of:
            assert "." in module, module
            module = module.rpartition(".")[0]
        return row_of[module]

    del modules["crow_core"]
    for name, path in modules.items():
        later = {other for other in ours(path, modules) if find_row(other) > find_row(name)}
        assert not later, f"{name} imports {sorted(later)}, which the map lists behind it"


def test_the_loop_and_what_is_read_with_it_know_no_key_of_a_turn():
    """The session's journal does; the loop is called with the session alone."""
    assert list(inspect.signature(react).parameters) == ["session"]
    for name in ("react.py", "app.py", "session/session.py", "session/log.py"):
        text = (folder_of("crow_core") / name).read_text("utf-8")
        assert not re.findall(r"""["']key["']|["']started["']|["']ended["']|\.key\b|\borigin\b""", text), name


def test_no_extension_imports_another():
    modules = modules_of("crow_extensions")
    extensions = {
        name for name, path in modules.items() if f"def {name.rpartition('.')[2]}(" in path.read_text("utf-8")
    }
    for name, path in modules.items():
        others = (ours(path, modules) & extensions) - {name}
        assert not others, f"{name} imports {sorted(others)}"


@pytest.mark.anyio
async def test_every_tool_of_crow_is_run_by_a_server_or_a_handler(tmp_path: Path):
    """No hook stands in for a tool: `before_tool` only judges."""
    config = "[extensions.subagents]\n[extensions.skills]\ntool = true\n[agents.other]\ncommand = 'other'\n"
    (tmp_path / "config.toml").write_text(config)
    env = {"CROW_HOME": str(tmp_path), "HOME": str(tmp_path)}
    crow = await build(env, models={"scripted": ScriptedModel([Reply("Hello.")])})
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "Hi.")
        (session,) = crow.sessions.values()
        tools = [tool for tool in session.toolbox.tools.values() if tool.server and not tool.server.source]
        assert {"plan", "ask_user", "agent", "skills", "tool_search", "ask_other"} <= {tool.name for tool in tools}
        assert all(tool.server and tool.definition["name"] in tool.server.handlers for tool in tools)


def test_class_names_are_unique_in_the_workspace():
    """Apart from the structs that are generated from the ACP schema."""
    places: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name, path in modules_of(package).items():
            if name not in ("crow_core.acp.schema", "crow_core.acp.schema_v2"):
                for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                    if isinstance(node, ast.ClassDef):
                        places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


HOOKS_OF_ONE = {
    "question": "tells the user's own commands that crow waits, wherever the question is shown",
    "must_ask": "makes another extension's question part of the one question about a call",
}
"""Hooks that one module uses, with the reason why each is a hook."""


def test_every_hook_has_two_users_or_a_reason_and_there_are_few():
    users: dict[str, set[str]] = {name: set() for name, hook in vars(Hooks).items() if isinstance(hook, Hook)}
    for package in {*PACKAGES} - {"crow_testing"}:
        for name, path in modules_of(package).items():
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                match node:
                    case ast.FunctionDef() | ast.AsyncFunctionDef():
                        registered = node.decorator_list
                    case ast.Call(func=function):
                        registered = [function]
                    case _:
                        continue
                for one in registered:
                    match one:
                        case ast.Attribute(value=ast.Name(id="crow" | "self" | "app"), attr=hook) if hook in users:
                            users[hook].add(name)
                        case _:
                            pass
    assert {hook for hook, modules in users.items() if len(modules) < 2} == {*HOOKS_OF_ONE}, users
    assert len(users) <= 22


def test_no_file_of_the_core_is_longer_than_500_lines():
    """Apart from the structs that are generated from the ACP schema."""
    folder = folder_of("crow_core")
    lengths = {
        path.relative_to(folder).as_posix(): len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py")
    }
    long = {name for name, length in lengths.items() if length > 500}
    assert long == {"acp/schema.py", "acp/schema_v2.py"}


def test_the_core_itself_is_read_in_an_afternoon():
    _, _, text = (ROOT / "AGENTS.md").read_text("utf-8").partition("\nThe core itself, to be read in an afternoon: ")
    names = re.findall(r"`([\w/]+\.py)`", text.partition(". ")[0])
    assert {"react.py", "app.py", "session/session.py"} <= {*names}
    assert sum(len((folder_of("crow_core") / name).read_text("utf-8").splitlines()) for name in names) <= 2000


def test_few_file_names_repeat_in_the_workspace():
    """A name says what is in its file, also without its folder."""
    files = [path for package in PACKAGES for path in modules_of(package).values()]
    counts = Counter(path.name for path in files if path.name not in ("__init__.py", "__main__.py"))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    assert len(repeated) <= 30, repeated


def test_one_module_says_how_much_of_a_text_is_left_out():
    said = re.compile(r"characters (more|left out)|more characters")
    assert [path.name for path in ROOT.glob("crow-*/src/crow_*/**/*.py") if said.search(path.read_text("utf-8"))] == []


def test_public_names_are_listed_once():
    text = (folder_of("crow_core") / "api.py").read_text("utf-8")
    names = [
        name.asname or name.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    assert len(names) == len(set(names))
    for name in names:
        assert getattr(importlib.import_module("crow_core"), name) is not None
    assert "api" in (folder_of("crow_core") / "__init__.py").read_text("utf-8")
    assert not {*names} & {*re.findall(r"\w+", (folder_of("crow_core") / "__init__.py").read_text("utf-8"))}


def test_pyright_checks_every_package():
    """It does not expand a `*` in `include`: with one it would check nothing, and say that all is well."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    sources = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("crow-*/src/crow_*")}
    assert sources <= {*settings["tool"]["pyright"]["include"]}


def test_files_that_scripts_verbs_and_the_gate_name_exist():
    names = re.compile(r"\b(?:crow-[\w-]+|scripts|docs|benchmarks|tests)/[\w./-]*\w")
    for file in [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py"), ROOT / "justfile", ROOT / ".ci" / "run"]:
        missing = [name for name in names.findall(file.read_text("utf-8")) if not (ROOT / name).exists()]
        assert missing == [], file


IMPORT_ALL = """
import importlib, os, platform, sys, threading
effects = []
platform.uname()  # on Windows it starts a program, once; keyring asks for it

def hear(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in {"os.mkdir", "os.rename", "subprocess.Popen", "socket.connect", "socket.bind", "os.putenv"}:
        effects.append(f"{event} {arguments}")

environment = dict(os.environ)
sys.addaudithook(hear)
for name in sys.argv[1:]:
    importlib.import_module(name)
    if threading.active_count() > 1:
        effects.append(f"{name} started {threading.enumerate()}")
assert not effects, effects
assert environment == dict(os.environ)
assert not os.listdir(), os.listdir()
"""


def test_importing_does_nothing(tmp_path: Path):
    """No file, folder, thread, process, connection or variable comes of it."""
    names = [
        name
        for package in sorted(set(PACKAGES) - {"crow_mcp_server", "crow_agent", "crow_testing"})
        for name in modules_of(package)
    ]
    names = [
        name for name in names if not name.endswith(("__main__", ".inspect")) and ".migrations." not in name
    ]  # Alembic's
    others = {"linux": "windows", "darwin": "procfs|windows", "win32": "procfs|posix"}[sys.platform]
    names = [name for name in names if not re.search(rf"^crow_system\.({others})$", name)]
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(tmp_path),
        "CROW_HOME": str(tmp_path / "x"),
    }
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


REPORT = """
import json, os, signal, sys

def report(name):
    with open(os.path.join(os.environ["REPORTS"], name), "w") as file:  # a pipe: somebody reads at its other end
        json.dump(sorted({module.partition(".")[0] for module in sys.modules}), file)

def hear(event, arguments):
    if event == "socket.connect" and not asked:
        asked.append(arguments)
        report("at request")

asked = []
sys.addaudithook(hear)
signal.signal(signal.SIGUSR1, lambda *_: report("now"))
"""


@pytest.mark.posix("a signal asks for the report, through a named pipe")
@pytest.mark.anyio
async def test_what_is_heavy_is_loaded_only_when_it_is_needed(tmp_path: Path):
    """When `initialize` is answered, and when the agent turns to the model for the first time."""
    (tmp_path / "sitecustomize.py").write_text(REPORT)
    for name in ("now", "at request"):
        os.mkfifo(tmp_path / name)

    async def read(name: str) -> set[str]:
        return set(json.loads(await asyncio.to_thread((tmp_path / name).read_text)))

    async def ignore(_: Any) -> None: ...

    async with ScriptedServer([Reply("Hello.")]) as model:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "REPORTS": str(tmp_path),
            "CROW_HOME": str(tmp_path / "home"),
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "secret",
            "CROW_MODEL": "scripted",
        }
        child = await spawn(sys.executable, ["-m", "crow_cli", "acp"], environment, tmp_path)
        client = AcpClient(child, {"session/update": ignore})
        async with client.serving():
            await client.initialize("editor", ClientCapabilities())
            child.process.send_signal(signal.SIGUSR1)
            assert not await read("now") & HEAVY_AT_INITIALIZE
            at_request = asyncio.ensure_future(read("at request"))
            session = await client.new_session(str(tmp_path))
            answer = await client.prompt(session.session_id, "hi")
            assert answer.stop_reason == "end_turn"
            loaded = await at_request
            assert "httpx2" in loaded
            assert not loaded & HEAVY_AT_REQUEST
