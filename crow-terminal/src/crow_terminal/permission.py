"""The answers to a question for permission: what the agent offers, as rows, and the response that is sent. Pure."""

import os
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from crow_core.acp.client import answer_permission
from crow_core.acp.schema import PermissionOption, RequestPermissionRequest, RequestPermissionResponse
from crow_core.text import show_invisible
from msgspec import Struct

from crow_terminal.dialogs import Row
from crow_terminal.printable_text import clip, escape_line

YES = ("allow", "allow once", "yes", "accept", "approve", "ok")
"""Names that agents give to allowing once, in lower case."""
NO = ("reject", "reject once", "no", "deny", "decline")
"""The same for rejecting once."""
LASTING = "and do not ask again for"
"""The words between an answer that lasts and its rule; where these do not fit, `always for`."""
RULE = 48
"""Columns of a rule in the first step; the second shows it whole."""
PLACES = {"session": "for this session", "folder": "always in this folder", "always": "always in all folders"}
"""The scope of an answer of crow in words."""


class Answer(Struct, frozen=True):
    """An answer that the agent offers."""

    id: str
    """The id of its option."""
    name: str
    allows: bool
    wants: str = ""
    """The question whose answer the user writes before choosing the option; empty for none."""
    text: str = ""
    """The text to begin with."""
    key: str = ""
    """The key of the text in `_meta.crow` of the answer."""
    rule: str = ""
    """The calls that it covers, if it lasts and the agent names them."""


def list_answers(
    request: RequestPermissionRequest, folder: str, takes: Collection[str] = ()
) -> tuple[list[Row], list[Row]]:
    """List the rows of a question, and those of its second step: the answers for longer than once.

    `takes` may hold `reason`, a text with a rejection, and `command`, another command to run instead. A row whose value
    is None leads to the second step. Each row has its letter: y, a, n, e, and digits for further options of an agent.
    """
    by_kind: dict[str, list[PermissionOption]] = {}
    for option in request.options:
        by_kind.setdefault(option.kind, []).append(option)
    allowing, rejecting = by_kind.get("allow_once", []), by_kind.get("reject_once", [])
    yes, no = (options[0] if options else None for options in (allowing, rejecting))
    yes_name, no_name = name_answer(yes, YES, "Yes"), name_answer(no, NO, "No")
    lasting = list_lasting(
        [*by_kind.get("allow_always", []), *by_kind.get("reject_always", [])], folder, yes_name, no_name
    )
    digits = chain("123456789", [""] * len(request.options))
    rows = [Row(yes_name, value=Answer(yes.option_id, yes_name, True), letter="y")] if yes else []
    rows += [make_row(one, next(digits)) for one in allowing[1:]]
    if lasting:
        rows.append(Row(describe_lasting(lasting, yes_name, no_name), letter="a"))
    if no and "reason" in takes:
        wants = "Why, or what to do instead (may be empty)"
        value = Answer(no.option_id, no_name, False, wants, "", "reason")
        rows.append(Row(f"{no_name}, and say why", "Shift-N: without a word", value, letter="n"))
    elif no:
        rows.append(Row(no_name, value=Answer(no.option_id, no_name, False), letter="n"))
    rows += [make_row(one, next(digits)) for one in rejecting[1:]]
    match request.tool_call.raw_input:
        case {"command": str(command)} if "command" in takes and request.tool_call.kind == "execute" and yes:
            name = "Edit first" if yes_name == "Yes" else f"{no_name}, and run another command"
            value = Answer(yes.option_id, name, True, "The command to run instead", command, "command")
            rows.append(Row(name, value=value, letter="e"))
        case _:
            pass
    return rows, lasting


def name_answer(option: PermissionOption | None, usual: Collection[str], word: str) -> str:
    """Name the answer that allows or rejects once: by one word, unless the agent says what happens."""
    name = clean(option.name) if option else word
    return word if name.lower() in usual else name


def make_row(option: PermissionOption, letter: str) -> Row:
    name = clean(option.name)
    return Row(name, value=Answer(option.option_id, name, option.kind.startswith("allow")), letter=letter)


def list_lasting(options: Sequence[PermissionOption], folder: str, yes: str, no: str) -> list[Row]:
    """List the answers for longer than once; those for one rule stand together."""
    answers: list[Answer] = []
    for option in options:
        allows = option.kind == "allow_always"
        scope, rule = find_rule(option, folder)
        name = f"{yes if allows else no}, {PLACES[scope]}" if scope in PLACES and rule else clean(option.name)
        answers.append(Answer(option.option_id, name, allows, rule=rule if scope in PLACES else ""))
    rules = [*dict.fromkeys(answer.rule for answer in answers)]
    sorted_answers = sorted(answers, key=lambda answer: rules.index(answer.rule))
    return [Row(one.name, value=one, letter=f"{n}" if n < 10 else "") for n, one in enumerate(sorted_answers, 1)]


def find_rule(option: PermissionOption, folder: str) -> tuple[str, str]:
    """Find the scope and the rule of an option of crow; empty for another agent."""
    meta: Any = option.meta
    match meta:
        case {"crow": {"answer": {"scope": str(scope), "rule": {"kind": "path", "value": str(path)}}}}:
            return scope, f"changes to {show_path(path, folder)}"
        case {"crow": {"answer": {"scope": str(scope), "text": str(rule)}}}:
            return scope, clean(rule)
        case _:
            return "", ""


def describe_lasting(lasting: Sequence[Row], yes: str, no: str) -> str:
    """Describe the answers for longer than once on a line."""
    first: Answer = lasting[0].value
    if len(lasting) == 1 and not first.rule:
        return first.name
    return f"{yes if first.allows else no}, {LASTING} {clip(first.rule, RULE) or '…'}"


def make_answer(answer: Answer, text: str) -> RequestPermissionResponse:
    return answer_permission(answer.id, **({answer.key: text} if answer.key and text.strip() else {}))


def clean(text: str) -> str:
    """Return a text of the agent on one line, in which all characters are seen."""
    return show_invisible(escape_line(text))


def show_path(path: str, folder: str) -> str:
    """Return a path from the folder of the session, or with `~` for the home folder."""
    home = os.path.expanduser("~")
    for start, short in ((folder, ""), (home, "~/")):
        if start and path.startswith(f"{start.rstrip('/')}/"):
            return clean(short + path[len(start.rstrip("/")) + 1 :])
    return clean(path)
