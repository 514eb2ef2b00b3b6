"""`crow acp --print-config`: print the settings that make a client start this crow."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from crow_cli.process import find_command

FormatConfig = Callable[[Sequence[str], Mapping[str, str]], str]
"""Takes the agent's command line and at most one environment variable; returns the settings as text."""


def zed(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return to_agent_servers({"type": "custom", **to_launch(agent, env)})


def jetbrains(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return to_agent_servers(to_launch(agent, env))


def vscode(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return to_json({"acp.agents": {"Crow": to_launch(agent, env)}})


def acpx(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return to_json({"agents": {"crow": {"argv": list(agent)}}})


def codecompanion(agent: Sequence[str], env: Mapping[str, str]) -> str:
    variables = "".join(f"\n          env = {{ {name} = {quote(value)} }}," for name, value in env.items())
    return f"""\
require("codecompanion").setup({{
  adapters = {{
    acp = {{
      crow = function()
        return require("codecompanion.adapters").extend("goose", {{
          name = "crow",
          formatted_name = "Crow",
          commands = {{ default = {{ {", ".join(map(quote, agent))} }} }},{variables}
        }})
      end,
    }},
  }},
  interactions = {{ chat = {{ adapter = "crow" }} }},
}})"""


def agent_shell(agent: Sequence[str], env: Mapping[str, str]) -> str:
    program, *args = map(quote, agent)
    indent = "\n" + " " * 45
    variables = "".join(f"{indent}:environment-variables '({quote(f'{name}={env[name]}')})" for name in env)
    return f"""\
(defun crow ()
  "Start a shell with the agent crow."
  (interactive)
  (agent-shell-start
   :config (agent-shell-make-agent-config
            :identifier 'crow
            :mode-line-name "Crow"
            :buffer-name "Crow"
            :shell-prompt "Crow> "
            :shell-prompt-regexp "Crow> "
            :client-maker (lambda (buffer)
                            (acp-make-client :command {program}
                                             :command-params '({" ".join(args)}){variables}
                                             :context-buffer buffer)))))"""


def toad(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return f"toad acp {shlex.quote(shlex.join(agent))} ."


def to_launch(agent: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    return {"command": agent[0], "args": list(agent[1:]), "env": dict(env)}


def to_agent_servers(agent: dict[str, Any]) -> str:
    return to_json({"agent_servers": {"crow": agent}})


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def quote(text: str) -> str:
    """Quote a string for Lua and for Emacs Lisp."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


CLIENTS: dict[str, tuple[FormatConfig, str]] = {
    "zed": (zed, "Into Zed's settings (~/.config/zed/settings.json, or the command `zed: open settings file`)."),
    "jetbrains": (jetbrains, "Into ~/.jetbrains/acp.json; in the IDE: AI Chat, Add Custom Agent."),
    "codecompanion": (codecompanion, "Into the setup of codecompanion.nvim, in Neovim's init.lua."),
    "agent-shell": (agent_shell, "Into Emacs's init file, after (require 'agent-shell); then M-x crow."),
    "toad": (toad, "In a shell, in the project's folder."),
    "vscode": (vscode, "Into VS Code's settings.json, for the extension ACP Client (formulahendry.acp-client)."),
    "acpx": (acpx, "Into ~/.acpx/config.json; then: acpx crow exec 'What is this?'"),
}
"""For each client, the function that formats its settings, and a sentence that says where to put them."""


def print_client_config(client: str, model: str) -> None:
    """Print the settings on standard output, and the place for them on standard error."""
    format_config, where = CLIENTS[client]
    agent = [*find_command(sys.argv[0], sys.executable), "acp", *(["-m", model] if model else [])]
    home = os.environ.get("CROW_HOME")  # an editor does not set it, and crow may need it
    env = {"CROW_HOME": os.path.abspath(home)} if home else {}
    click.echo(where, err=True)
    click.echo(format_config(agent, env))
