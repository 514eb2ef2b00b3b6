"""A world for the sandbox: a home with credentials, a project in it, and a stranger's project beside it."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from crow_sandbox.layers import remove_tree
from crow_sandbox.policy import Level, Policy
from crow_sandbox.sandbox import Sandbox, SandboxRun
from crow_testing.skipping import unable


@dataclass
class World:
    """Folders of a user, and a sandbox for one of them."""

    base: Path
    home: Path
    root: Path
    beside: Path
    sandbox: Sandbox
    secret: str = "s3cret-of-the-user"
    runs: list[SandboxRun] = field(default_factory=list[SandboxRun])

    def begin(self, level: Level = "review", **fields: object) -> SandboxRun:
        run = asyncio.run(self.sandbox.begin(Policy(level, (str(self.root),), **fields)))  # type: ignore[arg-type]
        self.runs.append(run)
        return run

    def run(
        self, *arguments: str, run: SandboxRun | None = None, env: Mapping[str, str] | None = None, cwd: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the sandbox as crow does."""
        run = run or self.begin()
        wrapped, variables = run.wrap(arguments, {**os.environ, **(env or {})}, cwd or str(self.root), ())
        return subprocess.run(
            wrapped,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=60,
        )

    def shell(self, script: str, **fields: object) -> subprocess.CompletedProcess[str]:
        return self.run("/bin/bash", "-c", script, **fields)  # type: ignore[arg-type]

    def python(self, script: str, **fields: object) -> subprocess.CompletedProcess[str]:
        return self.run(os.path.realpath(sys.executable), "-I", "-S", "-c", script, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="crow-world-") as folder:
        base = Path(folder).resolve()
        home, temporary = base / "home", base / "tmp"
        for path in (home / "project", home / "beside", temporary):
            path.mkdir(parents=True)
        patch.setenv("HOME", str(home))
        sandbox = Sandbox(home / ".local/share/crow/sandbox", temporary=(str(temporary),))
        standing = asyncio.run(sandbox.prove("review"))
        if standing.level != "review":
            unable(f"commands do not run on a copy-on-write view here: {standing.says}")
        world = World(base, home, home / "project", home / "beside", sandbox)
        (world.root / "file").write_text("the root's\n")
        (world.beside / "file").write_text("outside\n")
        yield world
        asyncio.run(sandbox.close())
        assert os.listdir(sandbox.folder) == []
        remove_tree(home)


@pytest.fixture(autouse=True)
def remove_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        world: World = request.getfixturevalue("world")
        while world.runs:
            world.runs.pop().remove()
