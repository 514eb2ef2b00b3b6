"""The rules that an answer to the question about a tool call may store, and those that cover a tool call."""

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from crow_core.acp.schema import McpServer, PermissionOption
from crow_core.mcp.server_source import ServerSource
from crow_core.mcp.tool import Tool, ToolCall
from crow_core.session.session import Session
from crow_system.repository import find_main_folder

from crow_permissions.kept_answers import AnswerRule, KeptAnswer, Scope, now
from crow_permissions.programs import load_programs, read_usage
from crow_permissions.subjects import (
    find_own_folder,
    find_path,
    find_subject,
    has_posix_shell,
    is_for_terminal_session,
    parse_url,
)

LASTING_LIMIT = 5
"""The most lasting answers that a question offers, in addition to allowing and rejecting once."""
SUBCOMMAND_LENGTH = 2_000
"""The longest command for which a rule with its subcommand is looked for."""
SINGLE_COMMAND = re.compile(r"(?:[\w./:=@,+% -]|'[^'\0]*'|\"[^\"$`\\!\0]*\")+", re.ASCII)
"""One command of plain words and of quoted texts that the shell takes as they are."""


def list_covering_rules(session: Session, tool_call: ToolCall) -> list[AnswerRule]:
    """List the rules that cover a tool call, the narrowest first. Input for a terminal session has none: what a running
    program makes of it depends on what happened there."""
    name, kind, arguments = tool_call.name, tool_call.kind, tool_call.arguments
    own = tool_call.tool is not None and tool_call.tool.server is not None and tool_call.tool.server.built_in
    if kind == "execute" and is_for_terminal_session(tool_call):
        return []
    if kind == "execute":
        if own and isinstance(arguments.get("command"), str) and arguments["command"]:
            command = find_subject(session, tool_call)
            typed = arguments["command"].strip(" \t\n") if find_own_folder(session, tool_call) else command
            subcommand = find_subcommand(typed) if has_posix_shell(tool_call) else ""
            more = [AnswerRule("subcommand", name, subcommand)] if subcommand else []
            return [AnswerRule("command", name, command), *more]
        return [AnswerRule("arguments", name, to_json(arguments), identify(tool_call.tool))]
    if own and kind == "fetch" and isinstance(url := arguments.get("url"), str):
        return [AnswerRule("host", name, parse_url(url)[1])]
    if own and kind == "edit" and isinstance(arguments.get("path"), str):
        return [AnswerRule("path", name, find_path(session, tool_call)), AnswerRule("edits", name, kind)]
    return [AnswerRule("tool", name, kind, identify(tool_call.tool))]


def find_subcommand(command: str) -> str:
    """Find the program and its subcommand, such as `git commit`, if an answer may cover the command with all that
    programs.toml lists.

    Returns "" for more than one simple command, and for a command whose text does not tell everything.
    """
    if len(command) > SUBCOMMAND_LENGTH or not SINGLE_COMMAND.fullmatch(command):
        return ""
    words = shlex.split(command)
    usage = read_usage(words)
    name = " ".join(words[:2])
    is_kept = usage.program is load_programs().get(name) and usage.program is not None and usage.program.entry.kept
    return name if is_kept and not (usage.unlisted or usage.writes) else ""


def identify(tool: Tool | None) -> str:
    """Make a digest of a tool's definition, and of the program or address of its server."""
    if tool is None:
        return ""
    server = tool.server
    place: list[object] = [server.name if server else ""]
    if server and isinstance(server.source, ServerSource):
        place += describe_server(server.source.config)
    return hashlib.sha256(msgspec.json.encode([tool.digest, place])).hexdigest()


def describe_server(config: McpServer) -> list[object]:
    """List the settings of a server that say which program or address it is."""
    return [None if value is msgspec.UNSET else value for value in (config.command, config.args, config.url)]


def to_json(arguments: dict[str, object]) -> str:
    """Convert arguments to JSON, in one spelling."""
    return msgspec.json.encode(arguments, order="sorted").decode()


@dataclass(frozen=True)
class Offer:
    """An answer for longer than once that the question offers, and its option."""

    option_id: str
    answer: KeptAnswer

    def to_option(self) -> PermissionOption:
        """Convert it to the option. Its name shows the rule, `_meta.crow.answer` holds all that would be stored."""
        answer = self.answer
        verb = "Apply" if answer.rule.kind == "changes" else "Allow" if answer.allows else "Reject"
        places = {"session": f"{verb} for this session", "folder": f"{verb} in this folder", "always": f"Always {verb}"}
        own = {
            "allows": answer.allows,
            "scope": answer.scope,
            "folder": answer.folder,
            "rule": {"kind": answer.rule.kind, "tool": answer.rule.tool, "value": answer.rule.value},
            "text": str(answer.rule),
        }
        return PermissionOption(
            option_id=self.option_id,
            name=f"{places[answer.scope].capitalize()}: {answer.rule.describe()}",
            kind="allow_always" if answer.allows else "reject_always",
            meta={"crow": {"answer": own}},
        )


def list_offers(rules: Sequence[AnswerRule], folder: str, *, kept: bool) -> list[Offer]:
    """List the answers to offer for longer than once, at most five.

    `rules` are those that an answer may store, the narrowest first. `kept` says whether answers outlast the session.
    For the session, the narrowest rule is offered, but for edits that of all edits. In this folder, each other rule;
    always, the widest one, unless it is about a file or about a command whose text does not tell everything.
    """
    if not rules or (len(rules) == 1 and rules[0].kind == "path" and not kept):  # a protected file is asked about anew
        return []
    narrow, wide = rules[0], rules[-1]
    short = wide if wide.kind == "edits" else narrow
    lasting = [rule for rule in rules if rule.kind != "edits"] if kept else []
    offers: list[tuple[str, bool, AnswerRule, Scope]] = [("allow-session", True, short, "session")]
    for rule in lasting:
        name = "allow-folder-subcommand" if rule.kind == "subcommand" else "allow-folder"
        offers.append((name, True, rule, "folder"))
    everywhere = bool(lasting) and may_hold_everywhere(wide)
    if everywhere:
        offers.append(("allow-always", True, wide, "always"))
    offers.append(("reject-session", False, short, "session"))
    if lasting and len(offers) < LASTING_LIMIT:
        offers.append(
            ("reject-always", False, narrow, "always") if everywhere else ("reject-folder", False, narrow, "folder")
        )
    return [
        Offer(name, KeptAnswer(allows, rule, scope, folder if scope == "folder" else "", now()))
        for name, allows, rule, scope in offers
    ]


def offer_rule(rule: AnswerRule, folder: str, *, kept: bool) -> list[Offer]:
    """Offer to store a rule for the session and, if answers are `kept` for longer, in this folder."""
    offers = [Offer("allow-session", KeptAnswer(True, rule, "session", "", now()))]
    return [*offers, Offer("allow-folder", KeptAnswer(True, rule, "folder", folder, now()))] if kept else offers


def may_hold_everywhere(rule: AnswerRule) -> bool:
    """Test whether a permission may hold in all folders: not for a file, nor for a command that is not a single one."""
    return rule.kind not in ("path", "edits") and (rule.kind != "command" or bool(SINGLE_COMMAND.fullmatch(rule.value)))


def get_folder(session: Session) -> str:
    """Return the folder of a session, by which answers are kept: of a linked work tree, that of the main one."""
    return os.path.realpath(find_main_folder(session.cwd))
