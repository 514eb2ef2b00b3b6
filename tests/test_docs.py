"""The code and the settings in the documentation work."""

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

ROOT = Path(__file__).parents[1]
READMES = [
    f"{folder}README.md" for folder in ("crow-core/", "crow-cli/", "crow-compact/", "crow-skills/", "crow-agent/")
]
"""Those whose code runs with a scripted model. The tests of crow-mcp-server cover its own."""
MODEL = '[models.local]\nbase_url = "http://localhost:8080/v1"\nmodel = "qwen3-coder"\n'
"""The model of examples that show a part of its settings."""


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("name", READMES)
def test_the_python_code_of_every_readme_runs(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CROW_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(ROOT / name)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {"__name__": "readme"}
        exec(compile(block, name, "exec"), names)
        main = names["main"]
        assert callable(main)
        if asyncio.iscoroutine(running := main()):
            asyncio.run(running)
    printed = capsys.readouterr().out.strip()
    assert printed
    assert "Nothing was compacted" not in printed


def test_the_example_in_one_file_runs_and_stays_short():
    file = ROOT / "streaming_async_react.py"
    assert len(file.read_text("utf-8").splitlines()) <= 200
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    assert "● terminal" in done.stdout
    assert "  hello from a real shell" in done.stdout


def toml_blocks(name: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.M | re.S)


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    spec.loader.exec_module(script := importlib.util.module_from_spec(spec))
    return script


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(f"docs/{page}.md" for page in ("agents", "extensions", "models", "permissions", "settings", "tools")),
    ],
)
def test_the_settings_in_a_page_are_valid(name: str, tmp_path: Path):
    from crow_agent.settings.config import load_config
    from crow_agent.settings.home import Home

    variables = {"GITHUB_TOKEN": "a", "BIRDS_KEY": "b", "TICKETS_SECRET": "c"}
    for number, block in enumerate(toml_blocks(name)):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = "" if "[models.local]" in block or "[models.local." not in block else MODEL
        (folder / "config.toml").write_text(model + block)
        load_config(Home(folder, folder), variables)


def test_the_example_in_the_page_on_settings_has_every_table(tmp_path: Path):
    from crow_agent.settings.config import load_config
    from crow_agent.settings.home import Home
    from crow_agent.settings.structs import Config

    (example,) = toml_blocks("docs/settings.md")
    (tmp_path / "config.toml").write_text(example)
    config = load_config(Home(tmp_path, tmp_path), {})
    assert config.models["local"].window == 32768
    assert tomllib.loads(example).keys() == {*Config.__struct_fields__}


@pytest.mark.parametrize("name", ["generate_acp_table", "generate_mcp_table"])
def test_the_tables_of_the_protocols_are_those_of_the_schemas_and_the_code(name: str) -> None:
    script = load_script(name)
    page = script.TARGET.read_text("utf-8")
    assert page == script.render(), f"{script.TARGET.name} is stale: run scripts/{name}.py"


def test_the_page_on_settings_lists_every_key():
    script = load_script("generate_settings")
    text = script.TARGET.read_text("utf-8")
    assert script.insert(text, script.render()) == text, "docs/settings.md is stale: run scripts/generate_settings.py"
    for name, struct in script.iterate_tables():
        named = {field.name for field in msgspec.structs.fields(struct) if f"### `[{field.name}]`" in text}
        assert {*struct.__struct_fields__} <= {*script.find_docstrings(struct)} | (named if not name else set()), name


def test_the_settings_in_the_pages_on_mcp_are_valid(tmp_path: Path):
    from crow_agent.settings.config import load_config
    from crow_agent.settings.home import Home
    from crow_agent.settings.structs import ServerSettings

    blocks = toml_blocks("docs/mcp.md") + toml_blocks("docs/mcp-logins.md")
    (tmp_path / "config.toml").write_text("\n".join(blocks))
    config = load_config(Home(tmp_path, tmp_path), {"GITHUB_TOKEN": "a", "BIRDS_KEY": "b", "TICKETS_SECRET": "c"})
    assert config.mcp.servers["github"].headers == {"Authorization": "Bearer a"}
    assert config.mcp.servers["birds"].args[-1] == "europe"
    assert config.mcp.servers["tickets"].oauth.client_secret == "c"
    assert config.mcp.client_document == "https://example.com/crow.json"
    assert [type(server) for server in config.mcp.servers.values()] == [ServerSettings] * 4
    assert config.extensions["tool_search"] == {"above": 60, "share": 0.1}


@pytest.mark.parametrize(
    ("name", "words"),
    [("permissions", 1100), ("models", 800), ("sessions", 700), ("editors", 500), ("serve", 470), ("systems", 250)],
)
def test_pages_of_the_manual_stay_short(name: str, words: int):
    assert len((ROOT / "docs" / f"{name}.md").read_text("utf-8").split()) <= words


def test_pages_but_the_reference_have_at_most_1200_words():
    reference = {"acp", "cli", "hooks", "mcp-server-tools", "notices", "python", "schema", "settings"}
    counts = {file.stem: len(file.read_text("utf-8").split()) for file in (ROOT / "docs").glob("*.md")}
    assert {name: words for name, words in counts.items() if words > 1200 and name not in reference} == {}


def test_links_between_pages_lead_to_files_and_headings():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for file, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text("utf-8")):
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name}: {file}"
            if heading:
                text = (target / "README.md" if target.is_dir() else target).read_text("utf-8")
                headings = [re.sub(r"[^\w\- ]", "", one.lower()) for one in re.findall(r"^#+ (.*)$", text, re.M)]
                assert heading in [one.replace(" ", "-") for one in headings], f"{page.name}: {file}#{heading}"


def test_agents_md_is_short_and_names_files_that_exist():
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    assert len(text.splitlines()) <= 70
    source = ROOT / "crow-core" / "src" / "crow_core"
    rows = re.findall(r"^\| (`.+?) \|", text, re.M)
    for name in re.findall(r"`([\w./]+)`", " ".join(rows)):
        assert (source / name).exists(), name


def test_every_package_has_the_same_version():
    from crow_core import __version__

    files = [ROOT / "pyproject.toml", *ROOT.glob("crow-*/pyproject.toml")]
    versions = {re.search(r'^version = "(.+?)"', file.read_text("utf-8"), re.M)[1] for file in files}  # type: ignore[index]
    assert versions == {__version__}


def test_the_page_on_mcp_and_acp_names_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "mcp-bridge.md").read_text("utf-8")))
    tests = (path.read_text("utf-8") for path in [*ROOT.glob("crow-*/tests/**/*.py"), *ROOT.glob("tests/*.py")])
    assert named
    assert named <= set(re.findall(r"def (test_\w+)", "\n".join(tests)))


def test_the_page_on_scripts_describes_the_json_and_every_exit_code():
    from crow_cli import outcome
    from crow_cli.run_command import run

    text = (ROOT / "docs" / "scripts.md").read_text("utf-8")
    table = text.split("## JSON")[1].split("With `--output-format stream-json`")[0]
    keys = {key for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for key in re.findall(r"`(\w+)`", row)}
    assert keys == set(outcome.Outcome.__struct_fields__)
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    assert codes == {
        *(outcome.DONE, outcome.FAILED, outcome.USAGE, outcome.NOT_PERMITTED),
        *(outcome.LIMIT, outcome.TRANSIENT, outcome.INTERRUPTED),
    }
    known = {name for parameter in run.params for name in parameter.opts}
    used = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", text)) - {"--help", "--body-file"}
    assert used <= known


@pytest.mark.skipif(
    not shutil.which("jq") and os.environ.get("CROW_TEST_ALL") != "1",  # which `.ci/run` sets: there it fails
    reason="jq is not installed; `apt-get install jq` installs it",
)
@pytest.mark.parametrize(
    ("base", "crow", "code", "comment"),
    [
        ("HEAD", """echo '{"text": "a.py:2 divides by zero.", "error": null}'""", 0, "a.py:2 divides by zero.\n"),
        ("HEAD", """echo '{"text": "", "error": "overloaded"}'; exit 75""", 0, None),
        ("HEAD", """echo '{"text": "half", "error": "refused"}'; exit 1""", 1, None),
        ("no-such-commit", """echo '{"text": "I see no change.", "error": null}'""", 128, None),
    ],
    ids=["reviewed", "busy", "failed", "git failed"],
)
def test_the_workflow_comments_on_what_was_reviewed_and_fails_otherwise(
    base: str, crow: str, code: int, comment: str | None, tmp_path: Path
):
    text = (ROOT / "docs" / "scripts.md").read_text("utf-8")
    workflow = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)[0])
    review, post = workflow["jobs"]["review"]["steps"][-2:]
    project, programs = tmp_path / "project", tmp_path / "bin"
    project.mkdir()
    programs.mkdir()
    for name, script in {"crow": f"cat > /dev/null; {crow}", "gh": 'cat "$5" > ../posted'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "BASE": base, "NUMBER": "1", "HOME": str(tmp_path)}
    for words in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m one"):
        subprocess.run(["git", *words.split()], cwd=project, check=True, env=env)
    assert review["shell"] == "bash"  # for which GitHub adds these options
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", review["run"]], cwd=project, env=env, check=False)
    assert done.returncode == code
    if code == 0:
        subprocess.run(["bash", "-e", "-c", post["run"]], cwd=project, env=env, check=True)
    posted = tmp_path / "posted"
    assert (posted.read_text() if posted.exists() else None) == comment
