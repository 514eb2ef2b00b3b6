"""`crow acp --print-config`: what to paste where, so that a client starts this crow and no other."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

Config = Callable[[Sequence[str], Mapping[str, str]], str]
"""Takes the agent's command line, and at most one variable for it."""


def command(argv0: str, executable: str) -> list[str]:
    """How this crow is started from anywhere: its absolute path, or Python's where it runs as `python -m`.

    Links stay as they are: the one that `uv tool` makes outlives an upgrade, what it leads to need not.
    """
    found = shutil.which(argv0) if Path(argv0).suffix != ".py" else None
    return [os.path.abspath(found)] if found else [executable, "-m", "crow_cli"]


def zed(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return servers({"type": "custom", **started(agent, env)})


def jetbrains(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return servers(started(agent, env))


def vscode(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return as_json({"acp.agents": {"Crow": started(agent, env)}})


def acpx(agent: Sequence[str], env: Mapping[str, str]) -> str:
    return as_json({"agents": {"crow": {"argv": list(agent)}}})


def codecompanion(agent: Sequence[str], env: Mapping[str, str]) -> str:
    variables = "".join(f"\n          env = {{ {name} = {quoted(value)} }}," for name, value in env.items())
    return f"""\
require("codecompanion").setup({{
  adapters = {{
    acp = {{
      crow = function()
        return require("codecompanion.adapters").extend("goose", {{
          name = "crow",
          formatted_name = "Crow",
          commands = {{ default = {{ {", ".join(map(quoted, agent))} }} }},{variables}
        }})
      end,
    }},
  }},
  interactions = {{ chat = {{ adapter = "crow" }} }},
}})"""


def agent_shell(agent: Sequence[str], env: Mapping[str, str]) -> str:
    program, *args = map(quoted, agent)
    indent = "\n" + " " * 45
    variables = "".join(f"{indent}:environment-variables '({quoted(f'{name}={env[name]}')})" for name in env)
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


def started(agent: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    return {"command": agent[0], "args": list(agent[1:]), "env": dict(env)}


def servers(agent: dict[str, Any]) -> str:
    return as_json({"agent_servers": {"crow": agent}})


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def quoted(text: str) -> str:
    """A string as Lua and Emacs Lisp both read it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


CLIENTS: dict[str, tuple[Config, str]] = {
    "zed": (zed, "Into Zed's settings (~/.config/zed/settings.json, or the command `zed: open settings file`)."),
    "jetbrains": (jetbrains, "Into ~/.jetbrains/acp.json; in the IDE: AI Chat, Add Custom Agent."),
    "codecompanion": (codecompanion, "Into the setup of codecompanion.nvim, in Neovim's init.lua."),
    "agent-shell": (agent_shell, "Into Emacs's init file, after (require 'agent-shell); then M-x crow."),
    "toad": (toad, "In a shell, in the project's folder."),
    "vscode": (vscode, "Into VS Code's settings.json, for the extension ACP Client (formulahendry.acp-client)."),
    "acpx": (acpx, "Into ~/.acpx/config.json; then: acpx crow exec 'What is this?'"),
}
"""What each client wants, and where."""


def show(client: str, model: str) -> None:
    """Print what to paste on standard output, and where to put it on standard error."""
    config, where = CLIENTS[client]
    agent = [*command(sys.argv[0], sys.executable), "acp", *(["-m", model] if model else [])]
    home = os.environ.get("CROW_HOME")  # the one variable that an editor does not have and crow may need
    env = {"CROW_HOME": os.path.abspath(home)} if home else {}
    click.echo(where, err=True)
    click.echo(config(agent, env))
