"""The command groups of `crow`: commands that are imported when they run, and the list that `crow --help` shows."""

import re
from importlib.metadata import EntryPoint, entry_points

import click

from crow_cli.own_tree import guard
from crow_cli.process import fail
from crow_cli.run_command import to_run_arguments, told_as

GROUP = "crow.commands"
"""The entry points with which packages add commands: `eval`, or `acp.check` for a command of the group `acp`."""
OWN = {
    name: EntryPoint(name, f"crow_cli.{value}", GROUP)
    for name, value in {
        "acp.setup": "settings_commands:acp_setup",
        "audit": "audit_commands:audit",
        "calls": "calls_command:calls",
        "completion": "settings_commands:completion",
        "config": "settings_commands:config",
        "db": "db_commands:db",
        "mcp": "mcp_commands:mcp",
        "memory": "memory_commands:memory",
        "perms": "perms_commands:perms",
        "prompts": "prompts_commands:prompts",
        "sandbox": "sandbox_commands:sandbox",
        "sessions": "sessions_commands:sessions",
        "sessions.share": "share_command:share",
        "setup": "settings_commands:setup",
        "skills": "skills_commands:skills",
        "status": "settings_commands:status",
        "trust": "trust_command:trust",
        "undo": "undo_command:undo",
        "worker": "workflow_commands:worker",
        "workflows": "workflow_commands:workflows",
        "worktrees": "worktrees_command:worktrees",
    }.items()
}
"""The commands of this package, imported when they run: `crow web` and `crow run` need none of them."""
PACKAGES = {
    **dict.fromkeys(("eval", "import", "lessons", "reask", "prompts.improve", "sessions.to-task"), "crow-eval"),
    "web": "crow-web",
    **dict.fromkeys(("acp.check", "acp.record", "acp.replay"), "crow-acp-tools"),
}
"""The packages of this repository that add commands, by the command's name."""
SECTIONS = {
    "Start": ("setup", "run", "chat", "demo"),
    "Connect": ("acp", "serve", "mcp", "skills"),
    "Look back": ("web", "sessions", "lessons", "calls", "prompts", "undo"),
    "Settings and safety": ("config", "status", "doctor", "perms", "sandbox"),
}
"""The commands that `crow --help` describes; the others are only named."""


def find_entry_points(prefix: str) -> dict[str, EntryPoint]:
    """Return the commands of a group that are imported when they run. `prefix` is empty for `crow`, or `acp.`."""
    found = {**{point.name: point for point in entry_points(group=GROUP)}, **OWN}
    inside = {name.removeprefix(prefix): point for name, point in found.items() if name.startswith(prefix)}
    return {name: point for name, point in inside.items() if "." not in name}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run; other packages can add some."""

    prefix = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *find_entry_points(self.prefix)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (command := super().get_command(ctx, cmd_name)) is not None:
            return command
        if point := OWN.get(self.prefix + cmd_name) or find_entry_points(self.prefix).get(cmd_name):
            command = point.load()
            guard(command, told_as, f"{self.prefix}{cmd_name}".replace(".", " "))
            self.add_command(command, cmd_name)
            return command
        if (name := self.prefix + cmd_name) in PACKAGES:
            command, package = f"crow {name.replace('.', ' ')}", PACKAGES[name]
            fail(f"`{command}` comes with {package}. In a clone: uv tool install ./crow-cli --with ./{package}")
        return None


CONTINUING = re.compile(r"-[crw]|--continue$|--(resume|worktree)(=|$)")
"""An option of `crow chat` that `crow` alone takes, too."""


class AcpGroup(LazyGroup):
    """The commands of `crow acp`."""

    prefix = "acp."


class PromptsGroup(LazyGroup):
    """The commands of `crow prompts`."""

    prefix = "prompts."


class SessionsGroup(LazyGroup):
    """The commands of `crow sessions`."""

    prefix = "sessions."


class CrowGroup(LazyGroup):
    """The commands of `crow`; `crow -p PROMPT` is `crow run PROMPT`; `crow -c`, `-r` and `-w` are those of
    `crow chat`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = to_run_arguments(args)
        return super().parse_args(ctx, ["chat", *args] if args and CONTINUING.match(args[0]) else args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Describe the everyday commands in sections, and name the others."""
        listed = self.list_commands(ctx)
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names if name in listed]
            width = formatter.width - max(map(len, names)) - 6
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in commands if command])
        described = {name for names in SECTIONS.values() for name in names}
        with formatter.section("More"):
            formatter.write_text(", ".join(name for name in listed if name not in described))
