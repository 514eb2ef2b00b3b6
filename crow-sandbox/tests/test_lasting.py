"""A view that lasts over several looks: real bubblewrap, a real shell that runs on, and folders that others change."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crow_sandbox.lasting import LastingRun

pytestmark = pytest.mark.posix("there is no sandbox")


class Session:
    """A shell that runs on in a view of the world's project."""

    def __init__(self, world) -> None:
        self.root: Path = world.root
        self.run = world.begin()
        self.lasting = LastingRun(self.run)
        words, env = self.run.wrap(["/bin/bash"], dict(os.environ), str(self.root), ())
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, text=True)
        self.shell(":")

    def shell(self, script: str) -> str:
        """Run lines of the shell, and return what they print."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{script}\necho '<end>'\n")
        self.process.stdin.flush()
        return "".join(iter(self.process.stdout.readline, "<end>\n"))

    def settle(self, *, applies: bool = True) -> list[tuple[str, str, bool]]:
        """Look, apply what is new if it is to be, and return it: the path, the kind, and whether it conflicts."""
        look = self.lasting.look()
        try:
            changes = look.read_changes()
            if applies and changes:
                look.apply(changes)
            elif applies:
                self.lasting.keep(look)
            return [(change.path, change.kind, change.conflicts) for change in changes]
        finally:
            look.remove()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.lasting.close()
        self.run.remove()


@pytest.fixture
def open_session(world) -> Iterator[Callable[[], Session]]:
    opened: list[Session] = []

    def make() -> Session:
        opened.append(Session(world))
        return opened[-1]

    yield make
    for session in opened:
        session.end()
    for path in world.root.iterdir():
        subprocess.run(["rm", "-rf", path], check=True)
    (world.root / "file").write_text("the root's\n")


@pytest.fixture
def session(open_session) -> Session:
    return open_session()


def replace(path: Path, text: str) -> None:
    """Write a file as editors do that leave no half file."""
    path.with_name(".new").write_text(text)
    path.with_name(".new").rename(path)


def test_each_look_tells_only_what_is_new(session: Session):
    session.shell("mkdir -p a/b; echo 1 > a/b/c; echo 2 >> file")
    assert session.settle() == [("a", "added", False), ("file", "changed", False)]
    assert session.settle() == []
    session.shell("echo 3 > a/b/d; rm a/b/c; mv file moved")
    assert session.settle() == [
        ("a/b/c", "removed", False),
        ("a/b/d", "added", False),
        ("file", "removed", False),
        ("moved", "added", False),
    ]
    assert session.settle() == []
    assert (session.root / "moved").read_text() == "the root's\n2\n"
    assert os.listdir(session.root / "a/b") == ["d"]


def test_what_is_not_applied_is_told_again(session: Session):
    session.shell("echo 2 >> file")
    assert session.settle(applies=False) == [("file", "changed", False)]
    assert session.settle() == [("file", "changed", False)]


def test_programs_run_on_while_changes_are_applied(session: Session):
    session.shell("exec 5>>log; echo one >&5")
    assert session.settle() == [("log", "added", False)]
    session.shell("echo two >&5")
    assert (session.root / "log").read_text() == "one\n"  # an open file of the session is not the one of the root
    assert session.settle() == [("log", "changed", False)]
    assert (session.root / "log").read_text() == "one\ntwo\n"


def test_what_is_applied_is_what_was_shown(session: Session):
    session.shell("echo shown > new")
    look = session.lasting.look()
    session.shell("echo later > new")
    look.apply(look.read_changes())
    look.remove()
    assert (session.root / "new").read_text() == "shown\n"
    assert session.settle() == [("new", "changed", False)]
    assert (session.root / "new").read_text() == "later\n"


def test_programs_see_files_that_others_replace_make_and_remove(session: Session):
    (session.root / "gone").write_text("there\n")
    session.shell("cat file gone new")
    replace(session.root / "file", "by the user\n")
    (session.root / "gone").unlink()
    (session.root / "new").write_text("new\n")
    session.lasting.renew()
    assert session.shell("cat file gone new 2>&1") == "by the user\ncat: gone: No such file or directory\nnew\n"
    assert session.settle() == []


def test_programs_see_what_others_change_in_files_that_the_session_has_made(session: Session):
    session.shell("mkdir made; echo 1 > made/one; echo 2 > made/two; cat made/three")
    assert session.settle() == [("made", "added", False)]
    replace(session.root / "made/one", "by the user\n")
    (session.root / "made/two").unlink()
    (session.root / "made/three").write_text("3\n")
    session.lasting.renew()
    assert session.shell("cd made; ls; cat one three; cd ..") == "one\nthree\nby the user\n3\n"
    assert session.settle() == []
    assert (session.root / "made/one").read_text() == "by the user\n"


def test_change_of_both_sides_is_a_conflict(session: Session):
    session.shell("echo 2 >> file; echo 1 > made")
    assert len(session.settle()) == 2
    session.shell("echo 3 >> file; echo 2 > made")
    replace(session.root / "file", "by the user\n")
    (session.root / "made").unlink()
    session.lasting.renew()  # which overwrites no change of the session
    assert session.settle(applies=False) == [("file", "changed", True), ("made", "added", False)]
    assert session.shell("cat file") == "the root's\n2\n3\n"


def test_change_after_a_renewal_is_no_conflict(session: Session):
    replace(session.root / "file", "by crow\n")
    session.lasting.renew([str(session.root / "file")])
    session.shell("echo 2 >> file")
    assert session.settle() == [("file", "changed", False)]
    assert (session.root / "file").read_text() == "by crow\n2\n"


def test_folder_that_the_session_replaces_or_removes(session: Session):
    (session.root / "old").mkdir()
    (session.root / "old/one").write_text("1\n")
    assert session.settle() == []
    session.shell("rm -r old; mkdir old; echo 2 > old/two")
    assert session.settle() == [("old/one", "removed", False), ("old/two", "added", False)]
    assert session.settle() == []
    session.shell("rm old/two; echo 3 > old/three")
    assert session.settle() == [("old/three", "added", False), ("old/two", "removed", False)]
    session.shell("rm -r old")
    assert session.settle() == [("old", "removed", False)]
    assert not (session.root / "old").exists()
    assert session.settle() == []


def test_links_modes_and_pipes(session: Session):
    session.shell("ln -s file link; chmod 600 file; mkfifo pipe; mkdir closed; chmod 500 closed")
    found = session.lasting.look()
    assert [(change.path, change.type) for change in found.read_changes()] == [
        ("closed", "folder"), ("file", "file"), ("link", "link"), ("pipe", "other")
    ]  # fmt: skip
    found.apply(found.read_changes())
    found.remove()
    assert os.readlink(session.root / "link") == "file"
    assert (session.root / "file").stat().st_mode & 0o777 == 0o600
    assert not (session.root / "pipe").exists()
    assert session.settle() == []


def test_programs_that_watch_a_folder_are_told_of_what_crow_changed(session: Session):
    watch = "import ctypes, os; l = ctypes.CDLL(None); f = l.inotify_init(); l.inotify_add_watch(f, b'.', 0x80)"
    script = (
        f"{watch}; print('watching', flush=True); print(os.read(f, 999)[16:].rstrip(bytes(1)).decode(), flush=True)"
    )
    session.shell(f'coproc python3 -I -S -c "{script}"; read line <&"${{COPROC[0]}}"')
    (session.root / "made").write_text("by crow\n")
    session.lasting.renew([str(session.root / "made")])
    assert session.shell('read -t 20 line <&"${COPROC[0]}"; echo $line') == "made\n"


def test_private_files_are_not_written_into_the_view(world, open_session, monkeypatch: pytest.MonkeyPatch):
    secret = world.root / ".env"
    secret.write_text("KEY=1\n")
    begin = type(world).begin
    monkeypatch.setattr(type(world), "begin", lambda self: begin(self, private=(str(secret),)))
    session = open_session()
    replace(secret, "KEY=2\n")
    session.lasting.renew([str(secret)])
    assert session.shell("cat .env") == ""
    assert not (session.run.layers[0].upper / ".env").exists()


def test_session_cannot_lead_crow_out_of_its_view(world, session: Session):
    session.shell(f"mkdir d; ln -s {world.beside} out")
    session.settle()
    session.shell(f"rm -r d; ln -s {world.beside} d")
    (session.root / "d/file").write_text("by crow\n")
    session.lasting.renew([str(session.root / "d/file")])
    assert (world.beside / "file").read_text() == "outside\n"


def test_nothing_is_left_when_a_session_has_ended(world, open_session):
    session = open_session()
    session.shell("echo 1 > made")
    session.lasting.renew()
    renewer = session.lasting._renewer
    session.end()
    assert renewer is None or renewer.poll() is not None
    assert not session.run.folder.exists()
    assert not (world.root / "made").exists()
