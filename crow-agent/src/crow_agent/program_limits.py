"""The sandbox of programs that crow starts: MCP servers, the commands of hooks, and the checks of evaluations."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from crow_core.mcp.limit import Limit
from msgspec.structs import replace

from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config, PluginServer, ProgramLevel, ServerSettings

if TYPE_CHECKING:
    from crow_extensions.shell_hooks import ShellHook

STRICTNESS: Sequence[ProgramLevel] = ("off", "workspace", "read-only")


def limit_server(settings: ServerSettings, roots: Sequence[str], home: Home) -> Limit | None:
    """Return what starts a server's command in its sandbox; None if it has none."""
    if settings.url or settings.sandbox == "off":
        return None
    data = [settings.data] if isinstance(settings, PluginServer) else []
    variables = [*settings.env]
    return make_limit(settings.sandbox, [*roots, *data], home, has_network=settings.network, variables=variables)


def limit_hook(hook: "ShellHook", roots: Sequence[str], *, home: Home) -> Limit | None:
    """Return what starts a hook's command in its sandbox; None if it has none."""
    return None if hook.sandbox == "off" else make_limit(hook.sandbox, roots, home, has_network=hook.network)


def make_limit(
    level: ProgramLevel,
    roots: Sequence[str],
    home: Home,
    *,
    has_network: bool,
    variables: Sequence[str] = (),
    readable: Sequence[str] = (),
) -> Limit:
    """Make what starts a program in the sandbox, where it sees the `readable` folders also if they lie in a hidden one.

    It raises ConnectionError where there is none.
    """
    return partial(limit_program, level, roots, home, has_network, variables, readable)


@asynccontextmanager
async def limit_program(
    level: ProgramLevel,
    roots: Sequence[str],
    home: Home,
    has_network: bool,
    variables: Sequence[str],
    readable: Sequence[str],
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
) -> AsyncGenerator[tuple[list[str], dict[str, str]]]:
    """Yield the arguments and the environment that start a program in the sandbox."""
    from crow_sandbox.policy import Policy, SandboxError  # imported here: most programs have no sandbox
    from crow_sandbox.programs import limit_program

    own = (str(home.config), str(home.data))
    hosts = None if has_network else ()
    policy = Policy(level, tuple(roots), hidden=own, hosts=hosts, exposed=tuple(f"${name}" for name in variables))
    try:
        async with limit_program(policy, arguments, env, cwd, home.data / "sandbox", readable) as limited:
            yield limited
    except SandboxError as error:
        raise ConnectionError(str(error)) from error


def tighten(settings: ServerSettings, level: ProgramLevel) -> ServerSettings:
    """Return the settings of a project's server in this sandbox, or a stricter one that it names itself."""
    strictest = max(level, settings.sandbox, key=STRICTNESS.index)
    return replace(settings, sandbox=strictest, network=settings.network and level == "off")


async def find_project_level(config: Config, home: Home) -> tuple[ProgramLevel, str]:
    """Return the sandbox of the servers of projects: what the user sets, or else what this machine can apply. With it,
    a sentence that says why there is none, if the user did not set that."""
    from crow_sandbox.programs import prove_limits  # imported here: most sessions have no such server

    if config.mcp.project_sandbox is not None:
        return config.mcp.project_sandbox, ""
    standing = await prove_limits("workspace", home.data / "sandbox")
    return ("off", standing.says) if standing.level == "off" else ("workspace", "")


def can_limit(settings: ServerSettings) -> bool:
    """Return whether a server has a command that crow starts."""
    return bool(settings.command) and not settings.url and not settings.disabled
