"""The slash commands of the terminal itself; those of the agent are sent to it. Pure."""

from collections.abc import Callable

from crow_core.acp.schema import AvailableCommand, DiffContent, ToolCall
from msgspec import Struct

from crow_terminal.background_list import call_background
from crow_terminal.blocks import Call, Note
from crow_terminal.dialogs import Row
from crow_terminal.effects import Copy, Effect, ExportSession, Fold, Leave, ListSessions, Open, OpenPage, SetTheme, Show
from crow_terminal.markdown import Prose
from crow_terminal.permission import show_path
from crow_terminal.pickers import pick_any_option, pick_mode, pick_option, pick_turn
from crow_terminal.state import State
from crow_terminal.theme import THEMES

HELP = """\
**Keys**

- Enter sends; Alt-Enter or Ctrl-J begins a new line; Ctrl-G opens your editor
- ↑ ↓ bring back earlier prompts, Ctrl-R searches them
{working}
- Ctrl-O shows folded output, Ctrl-T hides thoughts
- Shift-Tab changes the mode, Alt-M the model; F2 goes back to the model before
- Alt-N begins a new session, Alt-R goes on with a stored one, Alt-U takes back the last turn
- Ctrl-V pastes an image
- `@` adds a file; `!ls` runs a command for you and the agent, `!!ls` for you alone
- Ctrl-C twice, or Ctrl-D, leaves
"""
QUEUEING = "- While it works: Enter sends after the turn; Esc stops it"
STEERING = "- While it works: Enter tells it at its next step, Alt-Q sends after the turn; Esc stops it"


class LocalCommand(Struct, frozen=True):
    """A command of the terminal."""

    name: str
    description: str
    run: Callable[[State, str], list[Effect]]
    """Called with the state and the words behind the name."""
    hint: str = ""
    takes_words: bool = False
    """True if words behind the name are for it, though the agent has a command of the same name."""
    works_in_turn: bool = True
    """True if it can be used while a turn runs."""
    yields: bool = False
    """True if the agent's command of the same name is used instead."""
    group: str = "Session"
    """The heading in the list of commands."""
    words: str = ""
    """Other words by which a person may look for it."""


def show_help(state: State, words: str) -> list[Effect]:
    lists = [
        f"- **{group}**: " + " ".join(f"`/{name}`" for name, _ in commands)
        for group, commands in group_commands(state).items()
    ]
    help = HELP.format(working=STEERING if state.abilities.steers else QUEUEING)
    return [Show(Prose(help)), Show(Prose("\n".join(lists) + "\n\nThe menu after `/` says what each does."))]


def group_commands(state: State) -> dict[str, list[tuple[str, str]]]:
    """Return the usages and the descriptions of all commands by their heading, the agent's own last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for one in find_local_commands(state):
        groups.setdefault(one.group, []).append((one.name, one.description))
    if theirs := [(one.name, one.description) for one in find_agent_commands(state)]:
        groups["More"] = sorted(theirs)
    return groups


def show_diff(state: State, words: str) -> list[Effect]:
    if not state.transcript.diffs:
        return state.remark("This session has changed no files, as far as was shown here.")
    effects: list[Effect] = []
    for diff in join_changes(state):
        call = ToolCall(
            tool_call_id="diff",
            title=show_path(diff.path, state.folder),
            kind="edit",
            status="completed",
            content=[diff],
        )
        effects.append(Show(Call(call), whole=True))
    return effects


def join_changes(state: State) -> list[DiffContent]:
    """Join the edits to each file to one."""
    joined: dict[str, DiffContent] = {}
    for diff in state.transcript.diffs:
        first = joined.get(diff.path)
        # Tools send the whole file, or a part of it: only whole texts that follow each other can be joined.
        if first is not None and first.new_text == (diff.old_text or ""):
            joined[diff.path] = DiffContent(path=diff.path, old_text=first.old_text, new_text=diff.new_text)
        elif first is None:
            joined[diff.path] = diff
        else:
            joined[f"{diff.path}\0{len(joined)}"] = diff
    return list(joined.values())


def copy_answer(state: State, words: str) -> list[Effect]:
    text = state.transcript.answer
    return [Copy(text)] if text else state.remark("There is no answer to copy yet.")


def export(state: State, words: str) -> list[Effect]:
    return [ExportSession(words.strip())]


def set_theme(state: State, words: str) -> list[Effect]:
    name = words.strip()
    if name in THEMES:
        return [SetTheme(name)]
    rows = [Row(each, "", each) for each in THEMES]
    return state.pick("Theme", rows, lambda row, _: [SetTheme(row.value)])


def set_details(state: State, words: str) -> list[Effect]:
    state.fold_output = not state.fold_output
    what = "is folded" if state.fold_output else "is printed whole"
    return [Fold(output=state.fold_output), Show(Note(f"From now on the output of tools {what}."))]


def begin_worktree(state: State, words: str) -> list[Effect]:
    if len(words.split()) > 1:
        return state.remark("The name of a worktree has no spaces: /worktree " + "-".join(words.split()))
    return [Leave(worktree=words.strip())]


LOCAL_COMMANDS = (
    LocalCommand(
        "new", "begin a new session", lambda state, _: [Open()], works_in_turn=False, words="clear reset start empty"
    ),
    LocalCommand(
        "resume",
        "go on with a stored session",
        lambda state, _: [ListSessions()],
        works_in_turn=False,
        words="sessions continue load open history",
    ),
    LocalCommand(
        "undo",
        "take back the last turn, with its files",
        lambda state, _: pick_turn(state, last=True),
        works_in_turn=False,
        words="revert back restore",
    ),
    LocalCommand(
        "rewind",
        "go back to before an earlier message, with its files",
        lambda state, _: pick_turn(state),
        words="back restore undo revert checkpoint",
    ),
    LocalCommand(
        "worktree",
        "begin a session in a git worktree of its own",
        begin_worktree,
        takes_words=True,
        works_in_turn=False,
        words="branch isolated parallel git",
    ),
    LocalCommand("quit", "leave", lambda state, _: [Leave()], words="exit close end bye"),
    LocalCommand(
        "model",
        "choose the model",
        lambda state, words: pick_option(state, "model", words),
        group="Choices",
        words="llm switch provider",
    ),
    LocalCommand(
        "thinking",
        "choose how much the model thinks",
        lambda state, words: pick_option(state, "thought_level", words),
        group="Choices",
        words="reasoning effort",
    ),
    LocalCommand(
        "mode",
        "choose when you are asked for permission",
        lambda state, words: pick_mode(state, words),
        group="Choices",
        words="permissions yolo plan accept approve safe",
    ),
    LocalCommand(
        "settings",
        "all settings of this session",
        lambda state, _: pick_any_option(state),
        group="Choices",
        words="options config preferences",
    ),
    LocalCommand(
        "background",
        "background work and sub-agents",
        call_background,
        takes_words=True,
        words="jobs ps tasks fg bg agents runs list bring back tell stop",
    ),
    LocalCommand("diff", "the changes of files in this session", show_diff, group="Results", words="edits files git"),
    LocalCommand("copy", "copy the last answer to the clipboard", copy_answer, group="Results", words="yank"),
    LocalCommand(
        "export", "write this session to a Markdown file", export, "[file]", yields=True, group="Results", words="save"
    ),
    LocalCommand(
        "web",
        "show this session in a browser",
        lambda state, _: [OpenPage()],
        group="Results",
        words="page html inspect requests costs",
    ),
    LocalCommand("help", "the keys and the commands", show_help, group="Screen", words="keys shortcuts ?"),
    LocalCommand(
        "details",
        "fold the output of tools, or print it whole",
        set_details,
        group="Screen",
        words="verbose expand show hide",
    ),
    LocalCommand("theme", "change the colours", set_theme, "|".join(THEMES), group="Screen", words="colors dark light"),
)


def find_local_commands(state: State) -> list[LocalCommand]:
    """Return the terminal's commands that this agent makes possible."""
    theirs = {one.name for one in state.commands}
    impossible = {
        *(() if state.abilities.lists and state.abilities.loads else ("resume",)),
        *(() if state.abilities.undoes else ("rewind", "undo")),
        *(() if state.has_page else ("web",)),
        *(() if state.abilities.lists_background else ("background",)),
        *(() if state.has_worktrees else ("worktree",)),
        *(() if state.options.find("thought_level") else ("thinking",)),
        *(() if state.options.find("model") else ("model",)),
        *(() if state.options.modes or state.options.find("mode") else ("mode",)),
        *(() if state.options.config else ("settings",)),
    }
    return [one for one in LOCAL_COMMANDS if one.name not in impossible and not (one.yields and one.name in theirs)]


def find_agent_commands(state: State) -> list[AvailableCommand]:
    """Return the agent's commands that are not the terminal's, too."""
    ours = {one.name for one in find_local_commands(state)}
    return [one for one in state.commands if one.name not in ours]


def find_command(state: State, text: str) -> tuple[LocalCommand, str] | None:
    """Return the terminal's command that a text calls, and its words; None if it is a prompt."""
    if not text.startswith("/"):
        return None
    name, _, words = text[1:].strip().partition(" ")
    name = {"exit": "quit", "clear": "new", "sessions": "resume"}.get(name, name)
    found = next((one for one in find_local_commands(state) if one.name == name), None)
    takes_words = found is not None and found.takes_words and (name != "background" or " " in words)
    if words and not takes_words and any(one.name == name for one in state.commands):
        return None  # such as /mode plan, or "/background NAME", which goes on in a turn
    return (found, words) if found else None
