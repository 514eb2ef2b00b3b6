"""Describe tools to the model by prompts of the user or of a trusted project. Their schemas stay."""

from dataclasses import replace
from typing import Any

from crow_core.app import Crow
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.session_state import StateKey

from crow_extensions.simple_tools import REQUIRED

TOOL = "tool."
"""The beginning of the name of a prompt that describes a tool; the tool's name follows."""
TEXTS = StateKey("tool_descriptions", dict[str, tuple[str, str]])
"""The version and the text of each description, by the tool's name."""
CHECKED = StateKey("tool_descriptions_checked", bool)
"""True if the names of the tools have been checked."""


def tool_descriptions(crow: Crow) -> None:
    """Send the prompt `tool.NAME` as the description of the tool NAME, if there is such a prompt."""

    @crow.tools
    async def describe(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]] | None:
        prompts = {
            name.removeprefix(TOOL): prompt
            for name, prompt in session.prompts.templates.items()
            if name.startswith(TOOL)
        }
        if not prompts:
            return None
        tools = session.toolbox.tools
        await report_unknown(session, prompts.keys() - tools.keys())
        for name in prompts.keys() & tools.keys():
            text = find_text(session, name, prompts[name])
            if tools[name].description != text:
                tools[name] = replace(tools[name], description=text)
        names = [schema["function"]["name"] for schema in schemas]
        return [tools[name].schema if name in prompts else schema for name, schema in zip(names, schemas, strict=True)]


def find_text(session: Session, name: str, prompt: Prompt) -> str:
    """Return the description of a tool; append a render to the log if the log has none. Raises PromptError."""
    texts = session.state[TEXTS]
    if name not in texts or texts[name][0] != prompt.version:
        renders = [entry.get("crow", {}) for entry in session.view.find_kind("render")]
        last = next((notes.get("version") for notes in reversed(renders) if notes.get("prompt") == prompt.name), "")
        text = prompt.render() if last == prompt.version else session.prompts.render(prompt, "tool")
        texts[name] = (prompt.version, text)
    return texts[name][1]


async def report_unknown(session: Session, names: set[str]) -> None:
    """Tell the user once about descriptions of tools that a session does not have, after its servers have started."""
    servers = session.toolbox.external_servers()
    if session.state[CHECKED] or not all(server.connected or server.error for server in servers):
        return
    session.state[CHECKED] = True
    if (unknown := sorted(names - REQUIRED.keys())) and session.parent is None:
        files = ", ".join(f"{TOOL}{name}.md.j2" for name in unknown)
        await session.notice(f"{files} is not used: there is no such tool in this session.", "warning")
