"""The network of a session's commands: a namespace that they share, whose only way out is a proxy of crow."""

import asyncio
import os
import shutil
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from crow_sandbox.hosts import HostRules
from crow_sandbox.policy import SandboxError
from crow_sandbox.proxy import Decision, Proxy

LISTENER = Path(__file__).with_name("listener.py")
MAX_DECISIONS = 1000  # that are remembered
MAX_NAMED = 10  # hosts in the line for the model
START_TIMEOUT = 10.0  # seconds
LOCAL = "localhost,127.0.0.1,::1"
ONCE = {
    "PIP_RETRIES": "1",
    "UV_HTTP_RETRIES": "0",
    "CARGO_NET_RETRY": "0",
    "npm_config_fetch_retries": "0",
    "npm_config_update_notifier": "false",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
"""Programs try again for up to a minute otherwise, although a refusal stays one. pip says why at a retry only. Without
this, npm and pip look for their own updates, and the user would be asked about that."""


class Network:
    """The network of a session's commands: a namespace, in which they reach each other's servers on loopback."""

    def __init__(self) -> None:
        self._free: list[socket.socket] = []
        """Sockets that listen in the namespace, each for the proxy of one command at a time."""
        self._namespaces: Sequence[int] = ()
        self._serving: set[asyncio.Task[None]] = set()
        self.says = "Commands have no network."
        """The state, as a sentence for a person."""

    async def open(self, bubblewrap: str) -> None:
        """Make the namespace, by a bubblewrap that was proven to work. Call it once.

        If that does not work, commands get a namespace each without a way out, and `says` tells why.
        """
        nsenter = shutil.which("nsenter")
        if not nsenter:
            self.says = "Commands have no network, not even allowed hosts: nsenter (of util-linux) is not installed."
            return
        try:
            listener, *self._namespaces = await make_namespace(bubblewrap)
            self._free.append(listener)
            self._nsenter = nsenter
            namespaces = ["--unshare-all", "--unshare-user", *self.bubblewrap_arguments]
            await run([*self.enter, bubblewrap, *namespaces, "--ro-bind", "/", "/", "true"])
        except (OSError, TimeoutError, ValueError) as error:
            self._close_sockets()
            self.says = f"Commands have no network, not even allowed hosts: {error or 'bubblewrap does not answer'}."
            return
        except BaseException:
            self._close_sockets()
            raise
        self.says = "Commands have no network but for the hosts that are allowed."

    async def begin(self, rules: HostRules) -> "CommandNetwork":
        """Return the network of one command, which reaches what the rules allow.

        Raises SandboxError if there is no proxy for the command.
        """
        listener = None
        if self._namespaces:
            try:
                listener = self._free.pop() if self._free else await self._make_listener()
            except (OSError, TimeoutError, ValueError) as error:
                raise SandboxError(f"The sandbox has no network for one more command: {error}.") from error
        command = CommandNetwork(self, rules, listener.getsockname()[1] if listener else 0)
        if listener:
            command.serving = asyncio.create_task(Proxy(rules, command.record).serve(listener))
            command.serving.add_done_callback(lambda _: self._free.append(listener))
            command.serving.add_done_callback(self._serving.discard)
            self._serving.add(command.serving)
        return command

    async def _make_listener(self) -> socket.socket:
        listener, *namespaces = await receive_listener([*self.enter, sys.executable, "-I", "-S", str(LISTENER)])
        for number in namespaces:
            os.close(number)
        return listener

    @property
    def enter(self) -> Sequence[str]:
        """The start of the arguments, before bubblewrap's path: it joins the namespace."""
        if not self._namespaces:
            return ()
        user, net = (f"/proc/{os.getpid()}/fd/{number}" for number in self._namespaces)
        return (self._nsenter, f"--user={user}", f"--net={net}", "--preserve-credentials", "--")

    @property
    def bubblewrap_arguments(self) -> Sequence[str]:
        """Arguments of bubblewrap after `--unshare-all --unshare-user`. It holds for a command that begins with
        `enter`."""
        assert sys.platform != "win32"
        return ("--share-net", "--uid", str(os.getuid()), "--gid", str(os.getgid())) if self._namespaces else ()

    async def close(self) -> None:
        """End the proxies and all connections. Commands that run have no way out then."""
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._free:
            listener.close()
        for number in self._namespaces:
            os.close(number)
        self._free, self._namespaces = [], ()


class CommandNetwork:
    """The network of one command: that of its session, and a proxy of its own as the only way out."""

    def __init__(self, network: Network, rules: HostRules, port: int) -> None:
        self._network = network
        self._rules = rules
        self._port = port
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self.serving: asyncio.Task[None] | None = None
        """The proxy, until `end`; None where there is no way out."""

    @property
    def enter(self) -> Sequence[str]:
        """As `Network.enter`."""
        return self._network.enter

    @property
    def bubblewrap_arguments(self) -> Sequence[str]:
        """As `Network.bubblewrap_arguments`."""
        return self._network.bubblewrap_arguments

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which programs find the proxy, and give up at a refusal; they override those of the user."""
        if not self._port:
            return ONCE
        proxy = f"http://127.0.0.1:{self._port}"
        lower = {"http_proxy": proxy, "https_proxy": proxy, "all_proxy": proxy, "no_proxy": LOCAL}
        return {
            **{name.upper(): value for name, value in lower.items()},
            **lower,
            "npm_config_proxy": proxy,
            "npm_config_https_proxy": proxy,
            "npm_config_noproxy": LOCAL,
            "NODE_USE_ENV_PROXY": "1",
            **ONCE,
        }

    def allow(self, pattern: str) -> None:
        """Allow a host until the command ends, such as `Decision.pattern`. Raises SandboxError if it is not a
        pattern."""
        self._rules.add(pattern)

    def change(self, hosts: Sequence[str], denied: Sequence[str]) -> None:
        """Allow these hosts instead of those until now, for new connections. Raises SandboxError for no pattern."""
        self._rules.change(hosts, denied)

    def mark(self) -> int:
        """Return the number of decisions until now, for `decided` and `refused`."""
        return self._count

    def decided(self, mark: int = 0) -> Sequence[Decision]:
        """Return the decisions since a mark; of more than MAX_DECISIONS the last ones."""
        return list(self._decisions)[-(self._count - mark) :] if self._count > mark else []

    def refused(self, mark: int = 0) -> Sequence[Decision]:
        """Return the refusals since a mark, each host and port once."""
        return list({(each.host, each.port): each for each in self.decided(mark) if not each.allowed}.values())

    def record(self, decision: Decision) -> None:
        """Add a decision of the proxy."""
        self._decisions.append(decision)
        self._count += 1

    def end(self) -> None:
        """End the proxy and its connections, as the command has ended. It may be called in any thread."""
        if self.serving:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.serving.cancel)


def describe_refused(refused: Sequence[Decision], because: str = "") -> str:
    """Return the line for the model about refused hosts, and why that stays; "" if there are none."""
    if not refused:
        return ""
    asked = ", ".join(each.where for each in refused[:MAX_NAMED]) + (", and more" if refused[MAX_NAMED:] else "")
    asked += f", and {because}" if because else ""
    inner = "".join(f" {each.reason}." for each in refused[:MAX_NAMED] if not each.pattern)
    return f"The network is off for this command, but for hosts that the user allows; it asked for {asked}.{inner}"


async def make_namespace(bubblewrap: str) -> tuple[socket.socket, int, int]:
    """Make a network namespace; return a socket that listens in it, and the descriptors of its user and network
    namespace, which keep it. No process stays in it. Raises OSError and TimeoutError."""
    command = [bubblewrap, "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-net", "--die-with-parent"]
    return await receive_listener([*command, "--ro-bind", "/", "/", sys.executable, "-I", "-S", str(LISTENER)])


async def receive_listener(command: Sequence[str]) -> tuple[socket.socket, int, int]:
    """Run a command that starts `listener.py` in another network namespace; return what that sends. Raises OSError and
    TimeoutError."""
    assert sys.platform == "linux"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            await run(command, theirs.fileno())
        ours.setblocking(False)
        _, numbers, _, _ = socket.recv_fds(ours, 1, 3, socket.MSG_CMSG_CLOEXEC)
    listener, user, net = numbers
    if os.fstat(net).st_ino == os.stat("/proc/self/ns/net").st_ino:
        raise OSError("bubblewrap made no network namespace")
    return socket.socket(fileno=listener), user, net


async def run(command: Sequence[str], stdin: int = asyncio.subprocess.DEVNULL) -> None:
    """Run a program until it has ended. Raises OSError with what it said if it fails, and TimeoutError."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=null, stderr=pipe)
    try:
        async with asyncio.timeout(START_TIMEOUT):
            _, said = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise OSError(said.decode(errors="replace").strip() or f"{command[0]} failed")
