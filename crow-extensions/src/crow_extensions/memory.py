"""Notes on the repository, which every session in it begins with. The model adds one if the user agrees."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow_core.acp.schema import DiffContent, ToolCallFields
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Command, Session

if TYPE_CHECKING:
    from crow_extensions.repository_memory import RepositoryMemory

NAME = "remember"
DESCRIPTION = """\
Propose a note on this repository for all later sessions; the user decides. One sentence, only for what stays true,
took effort to find out, and is in no file: how to run a test, a trap, a wish of the user. Never a secret."""
DEFINITION: dict[str, Any] = {
    "name": NAME,
    "description": DESCRIPTION,
    "inputSchema": {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]},
    "_meta": {"crow/kind": "think", "crow/replaces": ["save_memory", "add_memory", "update_memory"]},
}
INSTRUCTIONS = """Notes on this repository from earlier sessions. What you see now is right where they differ.

{}"""


def memory(crow: Crow, *, folder: Path) -> None:
    """Keep notes on each repository in `folder`: the tool `remember`, the command /remember, and a part of the system
    prompt."""

    def find(session: Session) -> "RepositoryMemory":
        from crow_extensions.repository_memory import RepositoryMemory  # imported here: few use this extension

        return RepositoryMemory(folder, session.cwd)

    @crow.instructions
    async def read(session: Session) -> str | None:
        from crow_extensions.repository_memory import NoteRefused

        try:
            notes = find(session).read()
        except NoteRefused as error:
            await session.notice(f"No notes are used: {error}", "warning")
            return None
        return INSTRUCTIONS.format("\n".join(map(str, notes))) if notes else None

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command(NAME, "Add a note on this repository for all later sessions", run, hint="WORDS")]

    async def run(session: Session, words: str) -> str:
        from crow_extensions.repository_memory import NoteRefused, make_note

        kept, note = find(session), make_note(words, f"session {session.id[:12]}")
        try:
            if not note.text:
                return (
                    "\n".join(map(str, kept.read()))
                    or "There are no notes on this repository. /remember WORDS adds one."
                )
            kept.add(note, session.secrets)
        except NoteRefused as error:
            return str(error)
        return f"Later sessions in {kept.repository} begin with this note. To change it: crow memory edit\n\n{note}"

    async def remember(session: Session, tool_call: ToolCall) -> ToolResult:
        from crow_extensions.repository_memory import NoteRefused, add_note, make_note

        kept, text = find(session), str(tool_call.arguments.get("note", ""))
        note = make_note(text, f"session {session.id[:12]}")
        try:
            before = kept.read()
            diff = DiffContent(
                path=str(kept.file),
                old_text=kept.to_text(before) if before else None,
                new_text=kept.to_text(add_note(before, note, session.secrets)),
            )
            about = ToolCallFields(
                tool_call_id=tool_call.id,
                title=f"Remember in all later sessions here: {note.text}",
                kind="edit",
                name=NAME,
                content=[diff],
                raw_input=tool_call.arguments,
            )
            answer = await session.user.ask_allowed(about, yes="Remember", no="Do not remember")
            if not answer.allowed:
                return ToolResult.error(f"The note was not kept: {answer.reason}.")
            kept.add(note, session.secrets)
        except NoteRefused as error:
            return ToolResult.error(f"The note was not kept. {error}")
        return ToolResult.text("Later sessions in this repository begin with this note.")

    crow.servers.append(
        Server("memory", definitions=[DEFINITION], handlers={NAME: remember}, built_in=True, shared=True)
    )
