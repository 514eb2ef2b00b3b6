"""Judge a call that no model makes, and say by which rule: for people who write rules, and for their tests."""

import asyncio
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import crow_mcp_server
from crow_agent.settings.config import load_config, load_environment, load_project_config
from crow_agent.settings.home import Home
from crow_agent.settings.trust import TrustedFolders
from crow_core.mcp.server import Server
from crow_core.mcp.tool import Tool, ToolCall
from crow_core.messages.message import RawToolCall
from crow_core.session.folders import Folders
from crow_core.session.session import Hooks, Session
from crow_permissions.exits import find_exit
from crow_permissions.git_judgement import judge_git
from crow_permissions.judgement import Mode, SessionPermissions, judge
from crow_permissions.kept_answers import KeptAnswers
from crow_permissions.review import can_review
from crow_permissions.rules import Rule, Rules, Verdict, parse_rules
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import CommandLine, read_command_line

CALL = re.compile(r"(\w[\w-]*):(.*)", re.DOTALL)
"""A tool and its subject."""


@dataclass(frozen=True)
class Explanation:
    """The decision about a call, and its source."""

    tool: str
    verdict: Verdict
    reason: str
    """The rule, the answer or the mode that decided, in words."""
    source: str
    """The file of the rule, or that of the answer; "" for neither."""
    commands: Sequence[str] = field(default_factory=list[str])
    """The simple commands of a command line, with `…` for what only the shell can know."""
    is_clear: bool = True
    """False if parts of the command line cannot be known before it runs, such as the value of a variable."""
    sandbox: bool = False
    """True if the command may run in the sandbox instead, so that the question is about what it changes."""
    taint: str = ""
    """Why a session that has read private data and untrusted content is asked about the call; "" if it is not."""


def make_tools(definitions: Sequence[dict[str, Any]]) -> dict[str, Tool]:
    """Make the tools of crow's own from their definitions, by their names."""
    server = Server("crow", definitions=list(definitions), built_in=True)
    return {tool["name"]: Tool(tool["name"], server, tool) for tool in definitions}


def parse_call(text: str, tools: Mapping[str, Tool], *, command: bool = False) -> ToolCall:
    """Convert `TOOL:SUBJECT` to a call. With `command`, a text without a known tool is a command of `terminal`.

    Raises ValueError.
    """
    found = CALL.fullmatch(text)
    if found is None or (command and found[1] not in tools and "_" not in found[1]):
        if not command or not text.strip():
            raise ValueError(f"{text!r} is no call: write TOOL:SUBJECT, such as 'terminal:git status'")
        return make_call("terminal", {"command": text}, tools)
    name, subject = found[1], found[2].strip()
    properties = tools[name].properties if name in tools else {}
    if name == "terminal":
        return make_call(name, {"command": subject}, tools)
    if "path" in properties:
        edits = {"command": "create", "file_text": ""} if "command" in properties else {}
        return make_call(name, {**edits, "path": subject}, tools)
    if "url" in properties:
        return make_call(name, {"url": subject}, tools)
    try:
        arguments: Any = json.loads(subject or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"the subject of {name!r} is its arguments as a JSON object, such as {name}:{{}}")
    return make_call(name, cast("dict[str, Any]", arguments), tools)


def make_call(name: str, arguments: dict[str, Any], tools: Mapping[str, Tool]) -> ToolCall:
    """Make a call of a tool; one that is not known is that of an MCP server."""
    tool = tools.get(name)
    use: RawToolCall = {"id": "", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return ToolCall(use, arguments, kind=tool.kind(arguments) if tool else "other", tool=tool, original=arguments)


def make_session(folder: Path) -> Session:
    """Make a session that has no client and no model, in a folder."""
    cwd = os.path.realpath(folder)
    nobody: Any = None
    return Session(Hooks(), nobody, "", Folders(cwd, [cwd]), {"": nobody}, {})


async def explain(
    session: Session,
    permissions: SessionPermissions,
    tool_call: ToolCall,
    rules: Sequence[tuple[str, Rule]],
    *,
    trusts_folder: bool,
    has_taint: bool = True,
) -> Explanation:
    """Judge a call and name the source of the decision. `rules` are all rules, with the file of each.

    `has_taint` says whether the extension `taint` is used.
    """
    judgement = judge(session, permissions, tool_call)
    if judgement.by_pattern and tool_call.kind == "execute" and not trusts_folder:
        judgement = await judge_git(session, tool_call, judgement)
    reason = judgement.reason or judgement.remark
    if judgement.verdict == "ask" and not reason:
        reason = f"no rule and no answer allows it in the mode {permissions.mode}"
    source = next((file for file, rule in rules if repr(str(rule)) in reason), "")
    if judgement.answer and permissions.kept:
        reason, source = f"the kept answer {judgement.answer.id}: {judgement.answer}", str(permissions.kept.file)
    command = tool_call.arguments.get("command")
    line = read_command_line(command) if tool_call.kind == "execute" and isinstance(command, str) else None
    return Explanation(
        tool_call.name,
        judgement.verdict,
        reason,
        source,
        sorted(each.replace(UNKNOWN, "…") for each in line.commands) if line else [],
        is_clear=not (line and line.unclear),
        sandbox=judgement.may_review and can_review(session, tool_call),
        taint=find_taint(tool_call, line) if has_taint and judgement.verdict != "deny" else "",
    )


def find_taint(tool_call: ToolCall, line: CommandLine | None) -> str:
    """Find the reason why a session that has read private data and untrusted content is asked about a call."""
    if tool_call.tool is None:  # that of an MCP server
        return "another program gets the arguments" if tool_call.arguments else ""
    program = line.find_project_runner() if line else ""
    return find_exit(tool_call) or (f"{program} runs code of this folder (asked once)" if program else "")


@dataclass
class Context:
    """The rules, the mode and the answers of a folder."""

    folder: Path
    permissions: SessionPermissions
    tools: Mapping[str, Tool]
    rules: Sequence[tuple[str, Rule]]
    """All rules, with the file of each."""
    trusts_folder: bool
    notes: list[str]
    """Sentences about rules that do not count."""
    has_taint: bool = True

    def explain(self, call: str, *, command: bool = False) -> Explanation:
        """Explain the decision about a call. Raises ValueError."""
        session, tool_call = make_session(self.folder), parse_call(call, self.tools, command=command)
        options = {"trusts_folder": self.trusts_folder, "has_taint": self.has_taint}
        return asyncio.run(explain(session, self.permissions, tool_call, self.rules, **options))


def load_context(folder: Path, mode: str | None) -> Context:
    """Load what decides in a folder. `mode` replaces the configured one. Raises ConfigError."""
    home = Home.find(os.environ)
    trust, store, notes = TrustedFolders(home.data), KeptAnswers(home.data), list[str]()
    project_file = folder.absolute() / ".crow" / "config.toml"
    own = load_config(home, os.environ).permissions
    asked: Sequence[str] = ()
    denied: Sequence[str] = ()
    if trusts_folder := trust.is_trusted(folder):
        project = load_project_config(folder, load_environment(home, os.environ)).permissions
        asked, denied = project.ask, project.deny
    notes += list_ignored_settings(project_file, is_trusted=trusts_folder)
    store.list_all()
    if store.fault:
        notes.append(store.fault)
    file = str(home.config / "config.toml")
    rules = Rules(parse_rules(own.allow), parse_rules([*own.ask, *asked]), parse_rules([*own.deny, *denied]))
    sources = [(file, rule) for rule in parse_rules([*own.deny, *own.ask, *own.allow])]
    sources += [(str(project_file), rule) for rule in parse_rules([*denied, *asked])]
    known = SessionPermissions(cast(Mode, mode or own.mode), rules, [str(home.config), str(home.data)], own.protected)
    known.kept = store
    return Context(
        folder, known, make_tools(crow_mcp_server.tools(os.environ)), sources, trusts_folder, notes, own.taint
    )


def list_ignored_settings(file: Path, *, is_trusted: bool) -> Iterator[str]:
    """Yield a sentence for the permissions of a project's file that do not count."""
    try:
        content: Any = tomllib.loads(file.read_text("utf-8")).get("permissions")
    except (OSError, ValueError):
        return
    if not isinstance(content, dict):
        return
    names = sorted(cast("dict[str, Any]", content))
    if loosening := [name for name in names if name not in ("ask", "deny")]:
        yield f"{file}: a project may only tighten permissions, so {', '.join(loosening)} is ignored."
    if not is_trusted and {"ask", "deny"} & set(names):
        yield f"{file}: its rules are ignored until you trust the folder: crow trust"


def list_useless_rules(context: Context) -> Iterator[str]:
    """Yield a sentence for each rule whose tool is misspelled: it can never match."""
    for file, rule in context.rules:
        if set(rule.tool) & set("*?[") or rule.tool in context.tools:
            continue
        if meant := difflib.get_close_matches(rule.tool, context.tools, n=1, cutoff=0.8):
            yield f"{file}: the rule {str(rule)!r} can never match: there is no tool {rule.tool!r}, but {meant[0]!r}"
