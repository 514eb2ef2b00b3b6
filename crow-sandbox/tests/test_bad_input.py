"""What a machine or a command gives that cannot be handled: one sentence, and nothing is lost.

Elsewhere are tested: no bubblewrap, AppArmor, a network share, a view of a view, a mount in a root and names of any
bytes (test_sandbox.py); devices, sockets and kills (test_applying.py); processes that are left (test_review.py of
crow-agent).
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crow_sandbox import bubblewrap, programs, sandbox
from crow_sandbox.policy import Policy, SandboxError
from crow_sandbox.sandbox import Sandbox


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Mount an empty file system in the memory; skip the test where that is not possible."""
    if os.geteuid():
        pytest.skip("only root mounts")
    if subprocess.run(["mount", "-t", "tmpfs", *options, "none", str(place)], capture_output=True).returncode:
        pytest.skip("this machine does not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def begin(world, root: Path):
    run = asyncio.run(world.sandbox.begin(Policy("review", (str(root),))))
    world.runs.append(run)
    return run


def test_full_disk_while_applying_takes_everything_back(world, monkeypatch):
    """The changes lie on another file system than the folder, which has no room for them."""
    place = world.home / "small"
    place.mkdir()
    with mounted(place, "-o", "size=1m"):
        (place / "kept").write_text("as it was\n")
        monkeypatch.setattr("crow_sandbox.layers.find_places", lambda root, folder: [False])
        run = begin(world, place)
        done = world.shell("echo new > kept; head -c 3000000 /dev/zero > large", run=run, cwd=str(place))
        assert done.returncode == 0, done.stderr
        changes = run.read_changes()
        with pytest.raises(SandboxError, match="No space left on device"):
            run.apply(changes)
        assert {name: (place / name).read_text() for name in os.listdir(place)} == {"kept": "as it was\n"}
        assert run.read_changes() == changes, "they can be applied once there is room"
        run.remove()
    place.rmdir()


def test_file_system_that_is_mounted_in_the_folder_meanwhile_gets_no_changes(world):
    place = world.root / "below"
    place.mkdir()
    run = begin(world, world.root)
    world.shell("echo new > below/made", run=run)
    with mounted(place):
        with pytest.raises(SandboxError, match="is on another file system"):
            run.apply(run.read_changes())
        assert os.listdir(place) == []
    assert os.listdir(place) == []
    run.remove()
    place.rmdir()


def test_hard_links_across_the_border_of_the_folder_stay_as_they_are(world):
    """A file of the folder has a second name outside of it; a command can make none."""
    outside, inside = world.beside / "outside", world.root / "inside"
    outside.write_text("one\n")
    os.link(outside, inside)
    run = begin(world, world.root)
    done = world.shell(f"echo two > inside; ln {world.beside}/file here; ln inside also", run=run)
    assert "Invalid cross-device link" in done.stderr
    run.apply(run.read_changes())
    assert (outside.read_text(), inside.read_text(), (world.root / "also").read_text()) == ("one\n", "two\n", "two\n")
    assert not (world.root / "here").exists()
    for path in (outside, inside, world.root / "also"):
        path.unlink()


LISTED: list[str] = []
"""The folders that this process lists while a test notes them."""
NOTES = [False]


def note(event: str, arguments: tuple[object, ...]) -> None:
    if NOTES[0] and event in ("os.listdir", "os.scandir"):
        path = arguments[0]
        LISTED.append(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(str(path or ".")))


def test_large_folder_is_never_listed(world):
    """Only folders of the layer are, so that a run costs the same with 500,000 files beside what it changes."""
    place = world.home / "work/here"
    for name in ("large/sub", "changed/deep"):
        (place / name).mkdir(parents=True)
        (place / name / "file").touch()
    sys.addaudithook(note)
    NOTES[0] = True
    try:
        run = begin(world, place)
        world.shell("echo new > changed/deep/file; mkdir changed/made", run=run, cwd=str(place))
        run.apply(run.read_changes())
        run.remove()
    finally:
        NOTES[0] = False
    assert (place / "changed/deep/file").read_text() == "new\n"
    assert any("/upper/changed" in path for path in LISTED)
    assert [path for path in LISTED if path.startswith(str(place))] == []
    subprocess.run(["rm", "-r", place.parent], check=True)


def test_kernel_without_views_still_limits_programs(tmp_path, monkeypatch):
    """As where users may make namespaces, but no overlays in them."""
    real = next(bubblewrap.find_programs(), "")
    program = tmp_path / "bwrap"
    program.write_text(
        '#!/bin/sh\ncase " $* " in *" --overlay "*)\n'
        '    echo "bwrap: Can\'t make overlay mount: Operation not permitted" >&2; exit 1;;\n'
        f'esac\nexec "{real}" "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    monkeypatch.setattr(sandbox, "proofs", {})
    standing = asyncio.run(Sandbox(tmp_path / "data").prove("review"))
    if standing.level == "off":
        pytest.skip(standing.says)
    assert standing.level == "workspace"
    assert f"{program.resolve()} says: bwrap: Can't make overlay mount: Operation not permitted" in standing.says
    assert asyncio.run(programs.prove_limits("workspace", tmp_path / "data")).level == "workspace"
    with pytest.raises(SandboxError, match="overlay mount"):
        asyncio.run(Sandbox(tmp_path / "data").begin(Policy("review", (str(tmp_path),))))
