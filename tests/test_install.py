"""The commands of the README and the release install crow, from a clone and from a package index on this machine."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = shutil.which("uv")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.posix("a POSIX shell"),
    pytest.mark.skipif(not UV, reason="uv is not installed; `pip install uv` installs it"),
]


more = pytest.mark.skipif(
    os.environ.get("CROW_TEST_INSTALL") != "1", reason="installs once more; `just packages` runs it"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, without git's own, in a folder whose name has blanks."""
    folder = tmp_path_factory.mktemp("a folder with blanks") / "crow"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which uv installs programs into `tmp_path`, and crow has an empty home."""
    left_out = {"VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT"}
    return {key: value for key, value in os.environ.items() if key not in left_out} | {
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_PYTHON": sys.executable,
        "CROW_HOME": str(tmp_path / "crow"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }


def run(command: str | list[str], folder: Path, env: dict[str, str]) -> str:
    words = ["sh", "-ec", command] if isinstance(command, str) else command
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def read_commands(page: str, starting: str) -> list[str]:
    """Return the commands of the one shell block of a page that has a line with this beginning."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
    (block,) = [one for one in blocks if re.search(f"^{re.escape(starting)}", one, re.M)]
    return [line.partition(" #")[0].strip() for line in block.splitlines()]


@more
def test_the_first_two_commands_of_the_readme_fix_a_bug(clone: Path, env: dict[str, str]):
    """`pip install uv` is not run: uv is here."""
    install, demo = read_commands("README.md", "uv run crow demo")
    assert install == "pip install uv"
    assert "**Fixed.**" in run(demo, clone, env)


def test_the_install_command_of_the_readme_brings_the_command_crow(clone: Path, env: dict[str, str], tmp_path: Path):
    install, *_ = read_commands("README.md", "uv tool install .")
    run(install, clone, env)
    assert run("crow --version", tmp_path, env).startswith("crow ")
    assert "**Fixed.**" in run("crow demo", tmp_path, env)
    run("uv tool uninstall crow-workspace", tmp_path, env)
    assert not list((tmp_path / "bin").iterdir())


@more
def test_the_script_installs_and_removes_the_command(clone: Path, env: dict[str, str], tmp_path: Path):
    script = ["sh", str(clone / "packaging" / "install.sh")]
    assert "Next: crow demo, then crow setup." in run(script, tmp_path, env)
    assert run("crow --version", tmp_path, env).startswith("crow ")
    run([*script, "--remove"], tmp_path, env)
    assert not list((tmp_path / "bin").iterdir())


def test_the_script_outside_of_a_clone_says_so(clone: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    script = shutil.copy(clone / "packaging" / "install.sh", tmp_path / "elsewhere")
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"crow was not installed: {tmp_path} is not a clone of crow")


def test_the_script_without_uv_and_python_says_what_to_install(clone: Path, tmp_path: Path):
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = str(clone / "packaging" / "install.sh")
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr.startswith("crow was not installed: there is no uv, pipx or python3 here.")


def test_the_script_installs_no_uv_to_remove_crow(clone: Path, tmp_path: Path):
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    command = ["sh", str(clone / "packaging" / "install.sh"), "--remove"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert done.stderr == "crow was not removed: there is no uv here, which would have installed it.\n"


@more
def test_the_command_of_the_formula_and_the_container_installs_the_locked_packages(
    clone: Path, env: dict[str, str], tmp_path: Path
):
    command = "uv sync --quiet --locked --no-dev --no-editable"
    for file in ("crow-acp.rb", "Containerfile"):
        text = (ROOT / "packaging" / file).read_text("utf-8")
        assert all(option in text for option in ("--locked", "--no-dev", "--no-editable")), file
    run(command, clone, env | {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "opt")})
    alone = {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'opt' / 'bin'}:/usr/bin:/bin"}
    assert "**Fixed.**" in run("crow demo", tmp_path, alone)


@pytest.fixture(scope="module")
def index(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a package index on this machine that has our packages alone."""
    root = tmp_path_factory.mktemp("index")
    subprocess.run(
        ["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", root / "all"], cwd=clone, check=True
    )
    for wheel in (root / "all").glob("*.whl"):
        folder = root / "simple" / wheel.name.partition("-")[0].replace("_", "-")
        folder.mkdir(parents=True)
        wheel.rename(folder / wheel.name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def test_uvx_runs_the_command_from_a_package_index(index: str, env: dict[str, str], tmp_path: Path):
    """As the ACP registry starts it, once the packages are published."""
    uvx = f"uvx --quiet --index {index}"
    assert run(f"{uvx} crow-acp --version", tmp_path, env).startswith("crow ")
    assert "**Fixed.**" in run(f"{uvx} crow-acp demo", tmp_path, env)


@more
def test_each_command_that_a_package_brings_runs_from_a_package_index(index: str, env: dict[str, str], tmp_path: Path):
    for name in ("crow-acp-tools", "crow-mcp-server"):
        assert name in run(f"uvx --quiet --index {index} {name} --help", tmp_path, env)
