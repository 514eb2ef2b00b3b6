"""No tool may flood the context: what is too long is cut in the middle, and the whole is kept in a file."""

from crow_core.app import Crow
from crow_core.content import ToolResult
from crow_core.messages import ToolUse
from crow_core.session import Session


def truncate(crow: Crow, *, limit: int = 50_000) -> None:
    """Cut each text of a tool's result to `limit` characters, head and tail."""

    @crow.after_tool
    def cut(result: ToolResult, session: Session, call: ToolUse) -> ToolResult | None:
        if all(len(block.get("text", "")) <= limit for block in result.content):
            return None
        return ToolResult([shorten(block, session, call) for block in result.content], result.is_error, result.meta)

    def shorten(block: dict[str, str], session: Session, call: ToolUse) -> dict[str, str]:
        text = block.get("text", "")
        if len(text) <= limit:
            return block
        path = session.scratch() / f"{call['id']}.txt"
        path.write_text(text, "utf-8", errors="replace")
        middle = f"\n\n[{len(text) - limit:,} of {len(text):,} characters left out; the whole is in {path}]\n\n"
        return {**block, "text": text[: limit // 2] + middle + text[-(limit // 2) :]}
