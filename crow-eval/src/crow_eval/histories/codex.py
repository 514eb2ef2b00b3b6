"""Codex: a file of JSON lines for each session, `~/.codex/sessions/YEAR/MONTH/DAY/rollout-TIME-ID.jsonl`.

The lines of type `response_item` are items of the Responses API; those of other types repeat them for the screen.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crow_core.messages.message import Message

from crow_eval.histories.history import (
    ForeignSession,
    get_dict,
    get_list,
    make_reply,
    make_use,
    read_files,
    read_lines,
    to_line,
    to_text,
    to_time,
)

DEFAULT = ".codex/sessions"
"""The place below the home folder where Codex keeps its sessions."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of all files below a folder. Raises OSError."""
    yield from read_files(path, "rollout-*.jsonl", read_file)


def read_file(file: Path) -> Iterator[ForeignSession]:
    """Read a file. Raises OSError."""
    session = ForeignSession("codex", file.stem, file)
    reasoning: list[str] = []
    is_named = False
    for line in read_lines(file, session.left_out):
        at, kind = to_time(line.get("timestamp")), line.get("type")
        item: Mapping[str, Any] = get_dict(line, "payload") if "payload" in line else line  # earlier files: the item
        match kind:
            case "session_meta" if not is_named:  # a fork has that of its origin behind its own
                is_named = True
                session.id = to_line(item.get("id")) or session.id
                session.cwd = to_line(item.get("cwd"))
            case "session_meta":
                pass
            case "turn_context":
                session.model = to_line(item.get("model")) or session.model
                session.cwd = session.cwd or to_line(item.get("cwd"))
            case "event_msg" if item.get("type") == "thread_rolled_back":
                session.drop_turns(item.get("num_turns"))
                reasoning.clear()
            case "event_msg":
                pass  # it repeats an item
            case "response_item" | None | "message" | "function_call" | "function_call_output" | "reasoning":
                add_item(session, at, item, reasoning)
            case _:
                session.left_out[f"lines of type {kind}"] += 1
    yield session


def add_item(session: ForeignSession, at: int, item: Mapping[str, Any], reasoning: list[str]) -> None:
    """Add an item of the Responses API. Reasoning waits for the reply that it belongs to."""
    thought = "\n\n".join(reasoning)
    match item.get("type"):
        case "message" if item.get("role") == "assistant":
            session.add(at, make_reply(to_text(item.get("content")), thought))
            reasoning.clear()
        case "message" if item.get("role") == "user":
            text = to_text(item.get("content"))
            if text.lstrip().startswith(("<environment_context>", "<user_instructions>", "# AGENTS.md instructions")):
                session.left_out["notes of the program"] += 1
            else:
                session.add_prompt(at, item.get("content"))
        case "message":
            session.left_out["instructions"] += 1
        case "reasoning":
            found = [to_text(part) for part in [*get_list(item, "summary"), *get_list(item, "content")]]
            reasoning += filter(None, found)
        case "function_call" | "custom_tool_call" | "local_shell_call" as kind:
            arguments = item.get("arguments", item.get("input"))
            if kind == "custom_tool_call":
                arguments = json.dumps({"input": arguments}, ensure_ascii=False)
            if kind == "local_shell_call":
                arguments = get_dict(item, "action")
            name = item.get("name") or "shell"
            use = make_use(item.get("call_id") or item.get("id"), name, arguments)
            last: Message = session.entries[-1][1] if session.entries else {}
            if last.get("role") == "assistant" and not thought:  # calls of one reply are items that follow each other
                last.setdefault("tool_calls", []).append(use)
            else:
                session.add(at, make_reply("", thought, [use]))
            reasoning.clear()
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            output = item.get("output")
            failed = get_dict(item, "output").get("success") is False
            content = get_dict(item, "output").get("content", output)
            session.add_result(at, str(item.get("call_id")), content, failed=failed)
        case kind if kind is None and "id" in item and "timestamp" in item:  # the first line of earlier files
            session.id = str(item["id"])
        case kind:
            session.left_out[f"items of type {kind}"] += 1
