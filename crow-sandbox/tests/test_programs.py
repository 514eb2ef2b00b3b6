"""Programs that are not reviewed: what they may write, by each applier of this machine."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from crow_sandbox import landlock, programs, sandbox
from crow_sandbox.layers import remove_tree
from crow_sandbox.policy import Level, Policy, SandboxError
from crow_sandbox.seatbelt import make_profile
from crow_testing.skipping import unable

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no sandbox on Windows")
PYTHON = os.path.realpath(sys.executable)


@dataclass
class Place:
    """A home with a project, in which programs are limited."""

    base: Path
    root: Path
    beside: Path
    data: Path

    def run(
        self, *arguments: str, level: Level = "workspace", env: dict[str, str] | None = None, **fields: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as crow starts one."""
        policy = Policy(level, (str(self.root),), **fields)  # type: ignore[arg-type]

        async def run() -> subprocess.CompletedProcess[str]:
            given = {"PATH": os.environ["PATH"], "HOME": str(self.base), **(env or {})}
            async with programs.limit_program(policy, arguments, given, str(self.root), self.data) as (wrapped, start):
                return await asyncio.to_thread(
                    subprocess.run,
                    wrapped,
                    env=start,
                    cwd=self.root,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=60,
                    start_new_session=True,
                )

        return asyncio.run(run())

    def python(self, script: str, **fields: object) -> subprocess.CompletedProcess[str]:
        return self.run(PYTHON, "-I", "-S", "-c", script, **fields)  # type: ignore[arg-type]


@pytest.fixture(params=["bubblewrap", "Landlock"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Begins with each applier; the other one is as if this machine forbade namespaces."""
    home = Path("~").expanduser()  # not in /tmp, of which programs have their own
    with tempfile.TemporaryDirectory(prefix=".crow-programs-", dir=home, ignore_cleanup_errors=True) as folder:
        base = Path(folder).resolve()
        made = Place(base, base / "project", base / "beside", base / "data")
        for each in (made.root, made.beside):
            each.mkdir()
            (each / "file").write_text(f"in {each.name}\n")
        if request.param == "Landlock":
            monkeypatch.setattr(sandbox, "prove", lambda folder: sandbox.Proof(None, None, "Namespaces are forbidden."))
        says = asyncio.run(programs.prove_limits("workspace", made.data))
        if request.param not in says.says or says.level == "off":
            unable(f"{request.param} does not limit programs here: {says.says}")
        yield made
        assert os.listdir(made.data) == []
        remove_tree(base)


def read_all(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the kind and the content of all files of a folder."""
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in (folder, *folder.rglob("*"))
    }


def test_program_writes_to_its_folder_and_to_its_own_temporary_files(place: Place) -> None:
    script = "echo new > new; mkdir -p a/b; mv file a/b/moved; ln a/b/moved a/linked; f=$(mktemp); echo x > $f; cat $f"
    done = place.run("sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")
    assert (place.root / "new").read_text() == "new\n"
    assert (place.root / "a/linked").read_text() == "in project\n"


def test_program_that_may_only_read_has_temporary_files_alone(place: Place) -> None:
    before = read_all(place.root)
    done = place.run(
        "sh", "-c", 'cat file; echo x > "$(mktemp)" && echo made; echo x > new; rm file', level="read-only"
    )
    assert done.stdout == "in project\nmade\n"
    assert read_all(place.root) == before


def test_temporary_files_of_a_program_are_its_own_and_end_with_it(place: Place) -> None:
    first = place.run("sh", "-c", "f=$(mktemp); echo x > $f; echo $f").stdout.strip()
    assert first
    assert not Path(first).exists()
    assert place.run("ls", first).returncode != 0


WRITES = [
    "open(p, 'w').write('evil')",
    "open(p, 'a').write('evil')",
    "open(p + '2', 'x')",
    "os.truncate(p, 0)",
    "os.unlink(p)",
    "os.rename(p, p + '2')",
    "os.rename(p, 'stolen')",
    "os.rename('file', p)",
    "os.link('file', p + '2')",
    "(os.link(p, 'linked'), open('linked', 'w').write('evil'))",
    "(os.symlink(p, 'way'), open('way', 'w').write('evil'))",
    "(os.symlink(os.path.dirname(p), 'up'), open('up/planted', 'w'))",
    "os.mkdir(p + '2')",
    "os.rmdir(os.path.dirname(p) + '/empty')",
    "os.symlink('x', p + '2')",
    "os.mkfifo(p + '2')",
    "os.mknod(p + '2')",
    "open('../beside/file', 'w').write('evil')",
    "os.write(os.open(p, os.O_RDWR), b'evil')",
    "libc.linkat(-100, b'/proc/self/fd/%d' % os.open('../beside', os.O_TMPFILE | 1), -100, p.encode() + b'2', 1024)",
    "open(f'/proc/self/fd/{os.open(p, os.O_RDONLY)}', 'w').write('evil')",
    "os.write(os.open('file', os.O_WRONLY, dir_fd=os.open(os.path.dirname(p), os.O_PATH)), b'evil')",
    "open('/proc/self/root' + p, 'w').write('evil')",
    "os.system('chroot / sh -c \"echo evil > ' + p + '\"')",
    "(libc.mount(os.path.dirname(p).encode(), b'.', None, 4096, None), os.chdir(os.getcwd()), open('empty/x', 'w'))",
    "(libc.unshare(0x10000000), libc.mount(b'none', b'/', None, 16416, None), open(p, 'w').write('evil'))",
    "os.execv('/bin/sh', ['sh', '-c', 'echo evil > ' + p])",
    "(os.fork() or open(p, 'w').write('evil'))",
    "os.system('setsid sh -c \"echo evil > ' + p + '\"')",
    "open('/dev/shm/planted-by-a-program', 'w')",
    "open('/var/tmp/planted-by-a-program', 'w')",
    "open('/etc/planted-by-a-program', 'w')",
    "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/false')",
    "open('/sys/kernel/mm/transparent_hugepage/enabled', 'w').write('always')",
]  # fmt: skip
"""Ways to write outside of the folder; `p` is a file beside it."""


@pytest.mark.parametrize("way", WRITES)
def test_program_writes_nothing_outside_of_its_folder(place: Place, way: str) -> None:
    (place.beside / "empty").mkdir()
    before = read_all(place.beside)
    script = f"import ctypes, os; libc = ctypes.CDLL(None); p = {str(place.beside / 'file')!r}; {way}"
    planted = [Path(f"/{name}/planted-by-a-program") for name in ("dev/shm", "var/tmp", "etc")]
    settings = [Path("/proc/sys/kernel/core_pattern"), Path("/sys/kernel/mm/transparent_hugepage/enabled")]
    values = [path.read_text() if path.exists() else "" for path in settings]
    place.python(script)
    assert read_all(place.beside) == before
    assert not any(path.exists() for path in planted)
    assert [path.read_text() if path.exists() else "" for path in settings] == values


@pytest.mark.parametrize(
    "call",
    [
        "socket.create_connection(('127.0.0.1', port), 2)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', port))",
        "socket.socket(socket.AF_UNIX).connect(path)",
        "socket.socket(socket.AF_UNIX).connect(chr(0) + name)",
    ],
)
def test_program_without_network_reaches_no_socket_outside(place: Place, call: str) -> None:
    name, path = f"crow-{os.getpid()}", str(place.root / "socket")
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with tcp, udp, unix, abstract:
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        unix.bind(path)
        abstract.bind(f"\0{name}")
        for each in (tcp, udp, unix, abstract):
            each.settimeout(0.0)
            if each is not udp:
                each.listen()
        script = f"import socket; port, path, name = {port}, {path!r}, {name!r}; {call}"
        if "(path)" in call and "bubblewrap" in asyncio.run(programs.prove_limits("workspace", place.data)).says:
            pytest.skip("bubblewrap shows the sockets of the folder")
        place.python(script)
        for each in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                each.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(10)


def test_program_with_network_reaches_a_server(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place.python(f"import socket; socket.create_connection({server.getsockname()!r}, 5)", hosts=None)
        server.settimeout(5)
        server.accept()[0].close()


def test_program_ends_no_other_program_and_reads_no_memory_of_it(place: Place) -> None:
    with subprocess.Popen(["sleep", "60"], env={"SECRET_OF_A_PROGRAM": "hush"}) as other:
        script = f"kill -9 {other.pid}; cat /proc/{other.pid}/environ; head -c 10 /proc/{other.pid}/mem"
        done = place.run("sh", "-c", script)
        assert other.poll() is None
        other.send_signal(signal.SIGKILL)
    assert "hush" not in done.stdout


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "BASH_ENV", "ENV"])
def test_variables_of_a_program_start_nothing_outside_of_its_sandbox(place: Place, name: str) -> None:
    """The loader, Python or a shell would run a file before the sandbox begins."""
    planted = place.beside / "planted"
    for each in ("sitecustomize.py", "json.py", "ctypes.py"):
        (place.root / each).write_text(f"open({str(planted)!r}, 'w')\n")
    (place.root / "start.sh").write_text(f"echo > {planted}\n")
    value = {"PYTHONPATH": str(place.root)}.get(name, str(place.root / "start.sh"))
    if name.startswith("LD_"):
        value = compile_trap(place.root, planted)
    done = place.run("env", env={name: value}, exposed=(f"${name}",))
    assert not planted.exists()
    assert f"{name}={value}\n" in done.stdout


def compile_trap(folder: Path, planted: Path) -> str:
    """Make a library that makes a file when it is loaded."""
    if shutil.which("cc") is None:
        unable("there is no C compiler here")
    source, library = folder / "trap.c", folder / "trap.so"
    source.write_text(
        "#include <fcntl.h>\nunsigned la_version(unsigned v) { return v; }\n"
        f'__attribute__((constructor)) void go(void) {{ open("{planted}", O_CREAT | O_WRONLY, 0644); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_program_gets_the_secrets_that_are_given_to_it_and_no_others(place: Place) -> None:
    env = {"GITHUB_TOKEN": "given", "AWS_SECRET_ACCESS_KEY": "inherited"}
    done = place.run("env", env=env, exposed=("$GITHUB_TOKEN",))
    assert "GITHUB_TOKEN=given" in done.stdout
    assert "inherited" not in done.stdout


def test_other_programs_cannot_read_the_variables_in_the_arguments(place: Place) -> None:
    done = place.run(
        "sh", "-c", "cat /proc/*/cmdline; exit 3", env={"GITHUB_TOKEN": "s3cret"}, exposed=("$GITHUB_TOKEN",)
    )
    assert done.returncode == 3
    assert "s3cret" not in done.stdout + json.dumps(done.args)


def test_program_that_does_not_exist_is_named(place: Place) -> None:
    done = place.run("no-such-program-7")
    assert done.returncode != 0
    assert "no-such-program-7" in done.stderr


def test_program_has_no_capabilities_and_gains_none(place: Place) -> None:
    done = place.run("grep", "-E", "CapEff|CapPrm|CapBnd|NoNewPrivs", "/proc/self/status")
    values = dict(line.split(":\t") for line in done.stdout.splitlines())
    assert values["NoNewPrivs"] == "1"
    assert int(values["CapEff"], 16) == int(values["CapPrm"], 16) == 0


@pytest.mark.parametrize("root", ["/", "~"])
def test_folder_that_holds_everything_is_refused(place: Place, root: str) -> None:
    policy = Policy("workspace", (str(Path(root).expanduser()),))

    async def begin() -> None:
        async with programs.limit_program(policy, ["true"], {}, "/", place.data):
            pytest.fail("it started")

    with pytest.raises(SandboxError, match="holds the"):
        asyncio.run(begin())


def test_hosts_are_refused_where_they_cannot_be_told_apart(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if not landlock.read_version():
        unable("there is no Landlock here")
    with pytest.raises(SandboxError, match="some hosts"):
        landlock.limit(Policy("workspace", (), hosts=("pypi.org",)), ["true"], {}, place.base / "temporary")


def test_sentence_says_what_holds_and_what_does_not() -> None:
    old, new = landlock.describe(1), landlock.describe(7)
    assert "can end other programs" in old
    assert "can end other programs" not in new
    for each in (old, new):
        assert "read credentials" in each
        assert "/tmp is read-only" in each


def test_nothing_is_limited_where_no_applier_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "prove", lambda folder: sandbox.Proof(None, None, "Namespaces are forbidden."))
    monkeypatch.setattr(landlock, "read_version", lambda: 0)
    monkeypatch.setattr(programs, "proofs", {})
    if sys.platform != "linux":
        pytest.skip("asks the kernel of Linux")
    standing = asyncio.run(programs.prove_limits("workspace", tmp_path / "data"))
    assert standing.level == "off"
    assert standing.says == "The kernel has no Landlock, or it is switched off. Namespaces are forbidden."

    async def begin() -> None:
        async with programs.limit_program(Policy("workspace", ()), ["true"], {}, "/", tmp_path / "data"):
            pytest.fail("it started")

    with pytest.raises(SandboxError, match="no Landlock"):
        asyncio.run(begin())


def test_profile_of_macos_allows_writing_to_the_folders_alone() -> None:
    policy = Policy("workspace", ('/Users/me/a "quoted\\" project',), hidden=("/Users/me/project/.env",))
    profile = make_profile(policy, ["/Users/me/.ssh"], "/private/tmp/own")
    assert profile.startswith("(version 1)\n(deny default)\n")
    assert [line for line in profile.splitlines() if "file-write*" in line and "/dev" not in line] == [
        r'(allow file-write* (subpath "/Users/me/a \"quoted\\\" project"))',
        '(allow file-write* (subpath "/private/tmp/own"))',
    ]
    rules = profile.splitlines()
    hidden, shown = '(deny file-read* (subpath "/Users/me/.ssh"))', '(allow file-read* (subpath "/private/tmp/own"))'
    assert (
        rules.index(hidden) < rules.index(shown) < rules.index('(deny file-read* (subpath "/Users/me/project/.env"))')
    )
    assert "network" not in profile


def test_profile_of_macos_that_may_only_read_or_use_the_network() -> None:
    profile = make_profile(Policy("read-only", ("/Users/me/project",), hosts=None), [], "/private/tmp/own")
    assert '(allow file-write* (subpath "/Users/me/project"))' not in profile
    assert '(allow network-outbound (remote ip "*:*"))' in profile
    assert "unix-socket" not in profile


def test_profile_of_macos_names_no_path_with_a_line_break() -> None:
    with pytest.raises(SandboxError, match="cannot name"):
        make_profile(Policy("workspace", ("/Users/me/a\n(allow default)",)), [], "/private/tmp/own")
