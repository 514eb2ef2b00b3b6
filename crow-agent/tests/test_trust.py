"""Trusted folders: the files that count, links, bad input, and the list."""

import json
import multiprocessing
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from crow_agent.settings import project_files
from crow_agent.settings.config import load_project_config
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import UnusableFolder, list_settings, take_snapshot
from crow_agent.settings.trust import TrustedFolders


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "crow", tmp_path / "crow")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def trust_now(trust: TrustedFolders, folder: Path) -> None:
    trust.add(take_snapshot(folder, keep=True))


def test_folder_is_not_trusted_until_it_is_added(home: Home, project: Path) -> None:
    write(project / ".mcp.json", "{}")
    assert list_settings(project) == [".mcp.json"]
    assert not TrustedFolders(home.data).is_trusted(project)
    trust_now(TrustedFolders(home.data), project)
    assert TrustedFolders(home.data).is_trusted(project)
    assert not TrustedFolders(home.data).is_trusted(project.parent)


@pytest.mark.parametrize("name", [".mcp.json", ".crow/config.toml", ".claude/skills/pdf/scripts/deep/read.py"])
@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_trust_is_lost_when_a_file_changes(home: Home, project: Path, name: str, change: str) -> None:
    trust = TrustedFolders(home.data)
    file = project / name
    if change != "added":
        write(file, "before")
    trust_now(trust, project)
    assert trust.is_trusted(project)

    if change == "removed":
        file.unlink()
    else:
        write(file, "after")
    assert not trust.is_trusted(project)
    trust_now(trust, project)
    assert trust.is_trusted(project)


@pytest.mark.parametrize("name", ["scripts/__pycache__/read.cpython-311.pyc", ".hidden/x", "a/b/.git/hooks/run"])
def test_caches_and_hidden_files_of_a_skill_count(home: Home, project: Path, name: str) -> None:
    skill = project / ".agents" / "skills" / "pdf"
    write(skill / "SKILL.md", "---\ndescription: d\n---\n")
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    write(skill / name, "compiled")
    assert not trust.is_trusted(project)


def test_trust_is_lost_when_content_moves_to_another_file(home: Home, project: Path) -> None:
    file = write(project / ".mcp.json", "{}")
    trust_now(TrustedFolders(home.data), project)
    (project / ".crow").mkdir()
    file.rename(project / ".crow" / "config.toml")
    assert not TrustedFolders(home.data).is_trusted(project)


def test_trusting_one_folder_keeps_the_others(home: Home, project: Path) -> None:
    other = project / "other"
    other.mkdir()
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    trust_now(trust, other)
    assert trust.is_trusted(project)
    assert trust.is_trusted(other)


def test_folder_is_trusted_by_its_real_path(home: Home, project: Path) -> None:
    link = project.parent / "link"
    link.symlink_to(project)
    trust_now(TrustedFolders(home.data), link)
    assert TrustedFolders(home.data).is_trusted(project)


@pytest.mark.posix("files have no modes there")
def test_list_of_trusted_folders_is_readable_only_by_its_owner(home: Home, project: Path) -> None:
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    assert trust.file.stat().st_mode & 0o777 == 0o600
    assert home.data.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in home.data.rglob("*")} == {0}
    assert {path.name for path in home.data.iterdir()} == {"trust.json", "trust"}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"\xff": ""}', b"[" * 100_000])
def test_broken_list_of_trusted_folders_trusts_none(home: Home, project: Path, content: bytes) -> None:
    home.data.mkdir()
    trust = TrustedFolders(home.data)
    trust.file.write_bytes(content)
    assert not trust.is_trusted(project)
    assert trust.is_broken
    trust_now(trust, project)
    assert trust.is_trusted(project)
    assert [kept.read_bytes() for kept in home.data.glob("trust.broken-*")] == [content]


def test_file_that_cannot_be_read_is_not_trusted(home: Home, project: Path) -> None:
    file = write(project / ".mcp.json", "{}")
    trust_now(TrustedFolders(home.data), project)
    file.unlink()
    file.symlink_to("/proc/self/mem")
    if not file.is_file():
        pytest.skip("only Linux has a file that even root cannot read")
    assert not TrustedFolders(home.data).is_trusted(project)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"command": "python", "args": ["tools/server.py"]}, "tools/server.py"),
        ({"command": "./run"}, "run"),
        ({"command": "tools/run", "args": []}, "tools/run"),
        ({"command": "PROJECT/run"}, "run"),
        ({"command": "${HOME}/run"}, "run"),
        ({"command": "${ROOT:-tools}/run"}, "tools/run"),
        ({"command": "sh", "args": ["-c", "cd tools && python server.py --fast"]}, "tools/server.py"),
        ({"command": "bash", "args": ["-lc", "exec './my run.sh'"]}, "my run.sh"),
        ({"command": "python", "args": ["server.py"], "cwd": "tools"}, "tools/server.py"),
        ({"command": "python", "args": ["-m", "pkg"]}, "pkg/__main__.py"),
        ({"command": "python", "args": ["-m", "pkg.sub"]}, "pkg/__init__.py"),
        ({"command": "python", "args": ["-m", "pkg.sub"]}, "src/pkg/sub.py"),
        ({"command": "python", "args": ["-m", "server"], "env": {"PYTHONPATH": "lib:tools"}}, "tools/server.py"),
        ({"command": "uvicorn", "args": ["pkg.main:app"]}, "pkg/main.py"),
        ({"command": "node", "args": ["tools"]}, "tools/index.js"),
        ({"command": "node", "args": ["tools/server"]}, "tools/server.js"),
        ({"command": "node", "args": ["--import=./hook.mjs", "x"]}, "hook.mjs"),
        ({"command": "npm", "args": ["start"]}, "package.json"),
        ({"command": "make", "args": ["serve"]}, "Makefile"),
        ({"command": "uv", "args": ["--directory", "tools", "run", "server"]}, "tools/pyproject.toml"),
        ({"command": "uv", "args": ["run", "server"]}, "pyproject.toml"),
        ({"command": "python3.12", "args": ["."]}, "__main__.py"),
        ({"command": "x", "env": {"BASH_ENV": "./setup.sh"}}, "setup.sh"),
        ({"command": "x", "env": {"NODE_OPTIONS": "--require ./hook.js"}}, "hook.js"),
        ({"command": "serve", "env": {"PATH": "./bin:/usr/bin"}}, "bin/serve"),
        ({"command": ".venv/bin/python", "args": ["x.py"]}, ".venv/bin/python"),
        ({"url": "https://x.example", "headersHelper": "./tools/headers.sh"}, "tools/headers.sh"),
    ],
)
@pytest.mark.parametrize("form", ["json", "toml", "agent"])
def test_a_script_that_settings_name_counts(
    home: Home, project: Path, settings: dict[str, Any], name: str, form: str
) -> None:
    (project / "tools").mkdir()
    (project / "lib").mkdir()
    (project / "bin").mkdir()
    settings = json.loads(json.dumps(settings).replace("PROJECT", project.as_posix()))
    if form == "json":
        write(project / ".mcp.json", json.dumps({"mcpServers": {"one": settings}}))
    else:
        table = "mcp.servers.one" if form == "toml" else "agents.one"
        env = settings.pop("env", {})
        lines = [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
        lines += [f"[{table}.env]", *(f"{key} = {json.dumps(value)}" for key, value in env.items())]
        write(project / ".crow" / "config.toml", "\n".join(lines))
    script, trust = write(project / name, "before"), TrustedFolders(home.data)
    trust_now(trust, project)
    assert trust.is_trusted(project)
    script.write_text("after!")
    assert not trust.is_trusted(project)
    assert name in (trust.find_change(project) or "")


def test_scripts_of_a_manifest_count(home: Home, project: Path) -> None:
    write(project / ".mcp.json", '{"mcpServers": {"one": {"command": "npm", "args": ["start"]}}}')
    write(project / "package.json", '{"name": "x", "scripts": {"start": "node dist/server.js"}}')
    script, trust = write(project / "dist" / "server.js", "before"), TrustedFolders(home.data)
    trust_now(trust, project)
    script.write_text("after")
    assert not trust.is_trusted(project)


def test_ordinary_work_in_the_folder_keeps_the_trust(home: Home, project: Path) -> None:
    servers = {
        "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "."]},
        "db": {"command": "uvx", "args": ["mcp-server-sqlite", "--db-path", "./test.db"]},
        "web": {"url": "https://example.com/mcp"},
    }
    write(project / ".mcp.json", json.dumps({"mcpServers": servers}))
    write(project / ".crow" / "skills" / "a" / "SKILL.md", "Run src/main.py, read README.md.")
    with closing(sqlite3.connect(project / "test.db")) as database, database:
        database.execute("create table t (a)")
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    with closing(sqlite3.connect(project / "test.db")) as database, database:
        database.execute("insert into t values (1)")
    for name in ("src/main.py", "README.md", "AGENTS.md", "tests/test_x.py", ".crow/notes.md"):
        write(project / name, "changed")
    assert trust.is_trusted(project)
    (project / "test.db").write_text("print('a script now')")
    assert not trust.is_trusted(project)


@pytest.mark.posix("there are no named pipes in folders")
def test_no_link_leads_out_of_a_folder(home: Home, project: Path, tmp_path: Path) -> None:
    secret = write(tmp_path / "ssh" / "id_rsa", "A private key.").parent
    write(secret / "SKILL.md", "A private key.")
    (project / ".crow" / "skills").mkdir(parents=True)
    (project / ".crow" / "skills" / "x").symlink_to(secret)
    (project / ".crow" / "skills" / "loop").symlink_to(project / ".crow")
    (project / ".crow" / "skills" / "self").symlink_to("self")
    (project / ".crow" / "skills" / "nothing").symlink_to("nowhere")
    (project / ".crow" / "commands").symlink_to(secret)
    (project / ".claude").symlink_to(secret)
    (project / ".mcp.json").symlink_to(secret / "id_rsa")
    os.mkfifo(project / ".crow" / "config.toml")
    snapshot = take_snapshot(project, keep=True)
    assert "id_rsa" not in " ".join(snapshot.files)
    assert all(b"private" not in (file.content or b"") for file in snapshot.files.values())
    assert snapshot.left_out == [
        ".mcp.json is a link that leads out of the folder",
        ".crow/config.toml is not a file",
        ".crow/skills/loop is a link to a folder that holds it",
        ".crow/skills/nothing is a link to nothing",
        ".crow/skills/self is a link to nothing",
        ".crow/skills/x is a link that leads out of the folder",
        ".claude is a link that leads out of the folder",
        ".crow/commands is a link that leads out of the folder",
    ]
    assert load_project_config(project, {}).mcp.servers == {}
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    (secret / "id_rsa").write_text("changed")
    assert trust.is_trusted(project)
    (project / ".mcp.json").unlink()
    (project / ".mcp.json").symlink_to(secret / "other")
    assert not trust.is_trusted(project)


def test_a_link_inside_a_folder_is_followed_and_its_target_counts(home: Home, project: Path) -> None:
    target = write(project / "shared" / "pdf" / "SKILL.md", "before")
    (project / ".claude").mkdir()
    (project / ".claude" / "skills").symlink_to("../shared")
    write(project / "mcp" / "servers.json", '{"mcpServers": {"a": {"command": "x"}}}')
    (project / ".mcp.json").symlink_to("mcp/servers.json")
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    assert list(load_project_config(project, {}).mcp.servers) == ["a"]
    target.write_text("after")
    assert not trust.is_trusted(project)
    trust_now(trust, project)
    (project / "mcp" / "servers.json").write_text("{}")
    assert not trust.is_trusted(project)


def test_a_folder_that_is_too_large_is_not_trusted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / ".mcp.json", "{}")
    with (project / ".mcp.json").open("r+b") as file:
        file.truncate(10**12)  # a sparse file, of which nothing is read
    with pytest.raises(UnusableFolder, match=r"more than 100 MB \(at \.mcp\.json\)"):
        take_snapshot(project)
    monkeypatch.setattr(project_files, "MAX_FILES", 10)
    (project / ".mcp.json").unlink()
    for number in range(11):
        write(project / ".crow" / "prompts" / f"{number}.md.j2", "x")
    with pytest.raises(UnusableFolder, match="more than 10 files"):
        take_snapshot(project)


@pytest.mark.posix("names there are Unicode")
def test_names_that_are_not_utf8_can_be_trusted(home: Home, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    file = folder / ".crow" / "skills" / os.fsdecode(b"\xff\n") / "SKILL.md"
    write(file, "x")
    trust = TrustedFolders(home.data)
    trust_now(trust, folder)
    assert trust.is_trusted(folder)
    file.write_text("y")
    assert not trust.is_trusted(folder)
    assert trust.revoke([str(folder)]) == [str(folder)]


def test_a_folder_that_is_gone_is_not_trusted(home: Home, project: Path) -> None:
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    project.rmdir()
    assert not trust.is_trusted(project)
    assert "cannot be read" in (trust.find_change(project) or "")


def test_settings_nested_too_deep_are_no_fault(home: Home, project: Path) -> None:
    write(project / ".mcp.json", "[" * 100_000)
    write(project / ".crow" / "config.toml", "a = " + "[" * 5_000)
    trust = TrustedFolders(home.data)
    trust_now(trust, project)
    assert trust.is_trusted(project)


def add_folders(data: Path, folders: list[Path]) -> None:
    for folder in folders:
        trust_now(TrustedFolders(data), folder)


@pytest.mark.posix("processes cannot fork there")
def test_processes_that_write_the_list_at_once_lose_nothing(home: Home, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(40)]
    for folder in folders:
        write(folder / ".mcp.json", "{}")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=add_folders, args=(home.data, folders[at::4])) for at in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(TrustedFolders(home.data).read()) == {str(folder) for folder in folders}


def test_a_change_is_seen_although_digests_are_remembered(home: Home, project: Path) -> None:
    file, trust = write(project / ".crow" / "skills" / "a" / "SKILL.md", "before"), TrustedFolders(home.data)
    trust_now(trust, project)
    past = time.time() - 100
    os.utime(file, (past, past))
    assert trust.is_trusted(project)
    file.write_text("after!")
    os.utime(file, (past, past))
    assert not trust.is_trusted(project)
