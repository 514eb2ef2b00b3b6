"""The effects of a `_session/rewind`, in words."""

from typing import Any

from crow_terminal.permission import show_path


def describe_rewind(answer: dict[str, Any], folder: str) -> list[str]:
    """Describe what going back changes: a line for each file, and for each effect that stays."""
    own = answer.get("_meta", {}).get("crow", {})
    changes = own.get("changes", [{"path": path} for path in answer["files"].get("filesChanged", [])])
    lines = [describe_change(change, folder) for change in changes]
    lines += [f"{show_path(path, folder)}  is kept: {why}" for path, why in own.get("kept", {}).items()]
    stays = ", ".join(map(str, own.get("stays", [])))
    return [*(lines or ["No file changes."]), *([f"Not taken back: {stays}"] if stays else [])]


def describe_change(change: dict[str, Any], folder: str) -> str:
    """Describe a restored file: the lines that come back and the lines that go, as far as the agent names them."""
    path = show_path(str(change["path"]), folder)
    match change:
        case {"removed": True}:
            return f"{path}  is removed"
        case {"insertions": int(more), "deletions": int(less)}:
            return f"{path}  +{more} -{less}"
        case _:
            return f"{path}  as before"
