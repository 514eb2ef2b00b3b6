"""The prompt that a search begins with: the one that sessions use today, a stored version, or a file."""

from collections.abc import Mapping
from tempfile import TemporaryDirectory

from crow_agent.agent import Agent
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.app import Crow
from crow_core.errors import ConfigError
from crow_core.session.session import Session
from crow_extensions.tool_descriptions import TOOL
from crow_persistence.database import Database

from crow_eval.compared_prompts import CURRENT, JUDGE, PromptVersion, load_judge_prompt, load_prompt
from crow_eval.context_files import read_context_file

MARKS = ("{{", "{%", "{#")
"""The marks of Jinja, which a description may hold as plain text."""


async def find_current(
    name: str, model: str, database: Database, env: Mapping[str, str], *, runs: bool
) -> PromptVersion:
    """Return the version of a prompt that sessions with a model use today, the stored one that `NAME@N` names, or an
    AGENTS.md or SKILL.md. Without `runs`, the sessions are stored ones, which are asked again with a system prompt.

    Raises ConfigError for a prompt or a tool that there is not, StoreError, AgentError.
    """
    home = Home.find(env)
    config = load_config(home, env)
    if "@" in name:
        return load_prompt(name, config, home, database)
    if name == JUDGE:
        return PromptVersion(name, name, load_judge_prompt(config, home).template)
    if found := read_context_file(name):
        return PromptVersion(name, *found)
    if not runs and name == "system":
        return load_prompt(CURRENT, config, home, database)
    return await read_session_prompt(name, model, env)


async def read_session_prompt(name: str, model: str, env: Mapping[str, str]) -> PromptVersion:
    """Return a prompt of a new session with a model; for `system`, the system prompt of its profile.

    Raises ConfigError, AgentError.
    """
    opened: list[tuple[Crow, Session]] = []

    def use(crow: Crow) -> None:
        @crow.session_start
        def note(session: Session) -> None:
            opened.append((crow, session))

    with TemporaryDirectory(prefix="crow-") as folder:
        async with Agent(model, extensions=[use], store=False, env=env) as agent:
            await agent.session(cwd=folder)
            ((crow, session),) = opened
            async with session.turns.lock:
                await crow.update_tools(session)
            templates, sent = session.prompts.templates, session.toolbox.sent or []
            if name in templates:
                return PromptVersion(name, templates[name].name, templates[name].template)
    tools = {schema["function"]["name"]: schema["function"]["description"] for schema in sent}
    if not name.startswith(TOOL):
        names = ", ".join(sorted(templates))
        raise ConfigError(f"There is no prompt {name}. Give one of {names}; or {TOOL}NAME, NAME@N, or a file.")
    if (text := tools.get(name.removeprefix(TOOL))) is None:
        raise ConfigError(f"Sessions with this model have no tool {name.removeprefix(TOOL)}, but {', '.join(tools)}.")
    return PromptVersion(name, name, f"{{% raw %}}{text}{{% endraw %}}" if any(map(text.__contains__, MARKS)) else text)
