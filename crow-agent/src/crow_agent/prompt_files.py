"""Find the files that replace crow's own prompts."""

from pathlib import Path

from crow_core.errors import ConfigError
from crow_core.session.prompts import Prompt
from crow_system.files import is_inside

from crow_agent.settings.faults import to_read_error
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config


def find_prompt_files(
    config: Config, home: Home, project: Path | None = None, given: Prompt | None = None
) -> dict[str, Path]:
    """Find the templates that replace crow's own, by the prompt's name; `project` is a trusted folder.

    This is where the system prompt of a session is chosen. The first of these that is there counts:

    | the system prompt | is set by | for |
    |---|---|---|
    | the client's | ACP `systemPrompt` with the mode `override`, `crow run --system-prompt` | one session |
    | the program's, `given` | `Agent(system=)` | the sessions of a program |
    | the project's | `.crow/prompts/system.md.j2`, `crow prompts pin` | a trusted folder |
    | the user's setting | `[prompts] system` | all folders |
    | the user's file | `prompts/system.md.j2`, `crow prompts promote` | all folders |
    | crow's own | the package's `templates/system.md.j2` | all folders |

    The mode `append` and `--append-system-prompt` add to whichever it is. `/prompts use` replaces it in a session that
    is open.
    """
    files = list_prompts(home.config / "prompts")
    if config.prompts.system:
        files["system"] = home.config / Path(config.prompts.system).expanduser()
    if project:
        own = list_prompts(project / ".crow" / "prompts")
        files |= {name: path for name, path in own.items() if is_inside(path, project) and path.is_file()}
    if given:
        files.pop("system", None)
    return files


def list_prompts(folder: Path) -> dict[str, Path]:
    """List the templates in a folder, by the name of the prompt."""
    return {path.name.removesuffix(".md.j2"): path for path in sorted(folder.glob("*.md.j2"))}


def load_system_prompt(config: Config, home: Home) -> Prompt:
    """Load the user's own system prompt if there is one, else the packaged one. Raises ConfigError."""
    path = find_prompt_files(config, home).get("system")
    try:
        return Prompt.from_file("system", path) if path else Prompt.from_package("system")
    except (OSError, UnicodeDecodeError) as error:
        assert path
        raise ConfigError(f"The prompt 'system': {to_read_error(path, error)}") from error
