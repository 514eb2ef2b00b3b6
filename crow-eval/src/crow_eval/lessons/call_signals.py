"""Signals in the tool calls of a turn: failures, detours, loops, refused arguments, output that was read twice."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.messages.message import Message, get_id, parse_arguments, to_parts
from crow_core.text import to_line
from crow_extensions.loop_guard import is_remark
from crow_system.shortening import LEFT_OUT

REFUSED = re.compile(
    r"\S{1,100} was not run\. .{0,500}Correct the arguments and call again\."
    r"|The call was not run: its arguments are not|There is no tool '"
    r"|(?:<tool_use_error>)?InputValidationError|(?:<tool_use_error>)?(?:Error: )?No such tool available"
    r"|The \S{1,100} tool was called with invalid arguments|failed to parse function arguments",
    re.DOTALL,
)
"""The beginning of the result of a call that its tool did not take, in crow and in other agents."""
CUT = re.compile(
    rf"{LEFT_OUT.pattern}"
    r"|\[[^\]\n]{0,80}truncated[^\]\n]{0,80}\]|(?:Output|Response) (?:was )?truncated"
    r"|\.\.\. ?\[?\d+ (?:lines|characters) truncated"
)
"""The note in a result that was too long to be shown whole."""
CUT_WORDS = ("left out", "truncated")
"""Words of each such note, which are found faster."""
NOT_RUN = re.compile(
    r"This was not run|The user doesn't want to|Interrupted before|\[Request interrupted|.{0,20}rejected by user"
)
"""The beginning of a result that says nothing about the call itself."""
FAILED_EXIT = re.compile(
    r'"exit_code": ?-?[1-9]|^Exit code:? [1-9]|^Process exited with code [1-9]'
    r"|^\[?exit(?:ed with)? (?:code|status):? [1-9]",
    re.MULTILINE | re.IGNORECASE,
)
"""An exit code of a command that failed, in the results of other agents."""
ENVIRONMENT = re.compile(
    r"command not found|: not found|No module named|ModuleNotFoundError|No such file or directory|Permission denied"
    r"|not a git repository|unrecognized (?:argument|option)"
    r"|(?:unknown|invalid|illegal) (?:option|argument|flag|command|subcommand)"
    r"|no such (?:option|command|subcommand|service)|Missing script|No rule to make target|is not recognized as"
    r"|Connection refused|Could not resolve host|Cannot find module|externally-managed-environment|timed out",
    re.IGNORECASE,
)
"""Words in output that blame the command's form, not the work that it did."""
EXIT_LIMIT = 200
"""Characters at the beginning and the end of a result in which its exit code is looked for."""
COMMAND_KEYS = ("command", "cmd")
EDITS = re.compile(r"edit|write|patch|str_replace|create|insert|replace", re.IGNORECASE)
"""Names of tools that change files."""
FREQUENT_WORDS = frozenset(
    (
        "bash",
        "cat",
        "dev",
        "echo",
        "find",
        "git",
        "grep",
        "head",
        "null",
        "python",
        "python3",
        "run",
        "sed",
        "sudo",
        "tail",
    )
)
"""Words of commands that do not show that two commands are about the same."""
LOOP_LENGTH = 3
"""Equal calls with equal results, one after the other, that are a loop."""
DETOUR_LENGTH = 3
"""Failed commands before one that succeeds that are a detour."""
QUOTE_LIMIT = 300
"""Characters of a quotation."""
RESULT_LIMIT = 60_000
"""Characters of a result that are looked at, from its beginning."""


@dataclass(frozen=True)
class Signal:
    """One thing that went wrong."""

    kind: str
    session: str
    entry: str
    """The id of the log's entry that shows it."""
    cwd: str
    quote: str
    line: str = ""
    """A line of instructions that could prevent it; "" if none follows from it."""
    key: str = ""
    """Signals of a kind with one key are about the same; "" if their words decide."""
    skill: str = ""
    """The folder of the skill that the turn used."""


@dataclass
class Use:
    """A tool call with its result."""

    name: str
    arguments: str
    command: str = ""
    """The command line; "" for a tool other than a shell."""
    entry: str = ""
    """The id of the entry with the result."""
    text: str = ""
    failed: bool = False


@dataclass
class TurnCalls:
    """The tool calls of a turn."""

    session: str
    cwd: str
    uses: list[Use] = field(default_factory=list[Use])
    skill: str = ""
    """The folder of the skill that the turn used."""

    def make_signal(self, kind: str, entry: str, quote: str, line: str = "", key: str = "") -> Signal:
        """Make a signal of an entry of the session."""
        return Signal(kind, self.session, entry, self.cwd, shorten_quote(quote), line, key, self.skill)


def get_text(entry: Message) -> str:
    return "\n".join(str(part["text"]) for part in to_parts(entry.get("content")) if part.get("type") == "text")


def shorten_quote(text: str) -> str:
    """Return the beginning of a text as one line."""
    line = to_line(text)
    return line if len(line) <= QUOTE_LIMIT else f"{line[: QUOTE_LIMIT - 1]}…"


def make_use(call: Any) -> Use:
    """Make a tool call without its result."""
    arguments = parse_arguments(call) or {}
    command = next((arguments[key] for key in COMMAND_KEYS if arguments.get(key)), "")
    if isinstance(command, list):  # of Codex: ["bash", "-lc", "…"]
        words = [str(word) for word in command]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        command = words[-1] if len(words) == 3 and words[1].startswith("-") else " ".join(words)
    function = call["function"]
    return Use(function["name"], function["arguments"], command.strip() if isinstance(command, str) else "")


def add_result(use: Use, entry: Message) -> None:
    notes = entry.get("crow", {})
    use.entry, use.text = get_id(entry), get_text(entry)[:RESULT_LIMIT]
    exit = notes.get("shown", {}).get("exit")
    use.failed = bool(
        notes.get("failed")
        or exit
        or (use.command and FAILED_EXIT.search(use.text[:EXIT_LIMIT] + use.text[-EXIT_LIMIT:]))
    )


def find_call_signals(turn: TurnCalls) -> Iterator[Signal]:
    """Yield what the tool calls of a turn show."""
    ended = [use for use in turn.uses if use.entry]
    for at, use in enumerate(ended):
        if REFUSED.match(use.text):
            yield turn.make_signal("refused", use.entry, use.text, key=use.name)
        elif use.failed and not NOT_RUN.match(use.text) and (fault := find_fault(use)):
            line = make_run_line(find_success(ended, at), use)
            quote = f"{use.command or use.name}: {fault}"
            yield turn.make_signal("failure", use.entry, quote, line, f"{use.name} {generalize(fault)}")
        if (note := find_cut(use)) and asks_again(use, note["hint"] or "", ended[at + 1 :]):
            subject = to_subject(use)
            line = f"Limit the output of `{subject}`: it is longer than what is shown." if use.command else ""
            yield turn.make_signal("cut", use.entry, f"{use.command or use.name}: {note[0]}", line, subject)
    for use in find_loops(ended):
        yield turn.make_signal("loop", use.entry, f"{use.name} {use.arguments}", key=use.name)
    for first, count, last in find_detours(ended):
        quote = f"{count} failed commands from `{first.command}` to `{last.command}`"
        yield turn.make_signal("detour", last.entry, quote, make_run_line(last, first))


def make_run_line(instead: Use | None, failed: Use) -> str:
    """Make a line that names the command to run in place of one that failed."""
    return f"Run `{to_line(instead.command)}`, not `{to_line(failed.command)}`." if instead else ""


def find_fault(use: Use) -> str:
    """Return the line of a failed result that says why; "" if the work failed that a command did."""
    lines = use.text.splitlines()
    if use.command and (found := ENVIRONMENT.search(use.text)):
        return use.text[: found.end()].splitlines()[-1].strip() + use.text[found.end() :].partition("\n")[0].rstrip()
    return "" if use.command else next((line.strip() for line in lines if line.strip()), "")


def find_cut(use: Use) -> re.Match[str] | None:
    """Find the note in a result that was too long to be shown whole."""
    return CUT.search(use.text) if any(word in use.text for word in CUT_WORDS) else None


def generalize(fault: str) -> str:
    """Return a line of output without what differs each time: numbers and paths."""
    return re.sub(r"\d+", "#", re.sub(r"(?:~|\.{0,2})?/[\w./@+-]+", "PATH", fault))[:200]


def to_subject(use: Use) -> str:
    """Return the first words of a command, or the name of a tool."""
    return " ".join(use.command.split()[:3]) or use.name


def find_success(uses: Sequence[Use], at: int) -> Use | None:
    """Return the next command of a turn that succeeds where this one failed: another one, with a word of it, before any
    file is changed."""
    failed = uses[at]
    words = list_words(failed.command)
    for use in uses[at + 1 :]:
        if not use.command and EDITS.search(use.name):
            return None
        if use.command and not use.failed and use.command != failed.command and words & list_words(use.command):
            return use
    return None


def list_words(command: str) -> set[str]:
    """List the words of a command by which another one is known to be about the same."""
    words = {word for word in re.findall(r"[\w.@-]{3,}", command) if not word.startswith("-")}
    return words - FREQUENT_WORDS


def asks_again(cut: Use, hint: str, later: Sequence[Use]) -> bool:
    """Return whether a turn reads again what a result left out: the file with all of it, or the command, shortened."""
    if path := hint.rpartition(" ")[2]:
        return any(path in use.arguments for use in later)
    return bool(cut.command) and any(
        use.command != cut.command and use.command.startswith(to_subject(cut)) and re.search(r"\||>", use.command)
        for use in later
    )


def find_loops(uses: Sequence[Use]) -> Iterator[Use]:
    """Yield a call for each loop: the same calls with the same results, and nothing new between."""
    counts: dict[tuple[str, str, str], int] = {}
    for use in uses:
        key = (use.name, use.arguments, "" if is_remark(use.text) else use.text)
        if key[2] == "":
            key = next((known for known in counts if known[:2] == key[:2]), key)
        if key not in counts:
            counts = dict.fromkeys(counts, 0)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] == LOOP_LENGTH:
            yield use


def find_detours(uses: Sequence[Use]) -> Iterator[tuple[Use, int, Use]]:
    """Yield the first failed command, their number, and the one that succeeds, of each detour."""
    failed: list[Use] = []
    for use in uses:
        if not use.command:
            if EDITS.search(use.name):
                failed = []
        elif use.failed and not NOT_RUN.match(use.text):
            failed.append(use)
        elif failed:
            about = [each for each in failed if list_words(each.command) & list_words(use.command)]
            if len(about) >= DETOUR_LENGTH and all(each.command != use.command for each in about):
                yield about[0], len(about), use
            if about:
                failed = []
