"""The versions of prompts that an evaluation compares."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from crow_agent.prompt_files import find_prompt_files, load_system_prompt
from crow_agent.settings.faults import to_read_error
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config
from crow_core.app import Crow
from crow_core.errors import ConfigError, PromptError
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_persistence.database import Database
from crow_persistence.prompt_versions import find_variables, find_version
from msgspec import Struct

CURRENT = "current"
"""Names the system prompt that sessions have without an evaluation."""
JUDGE = "judge"
"""The name of the system prompt of judges."""
SYSTEM = ("system", "small")
"""The names of system prompts: crow's, and that of the profile for small models."""
SYSTEM_VARIABLES = ("cwd", "roots", "platform", "date", "tools", "instructions")
"""The variables that the system prompt is rendered with."""


class PromptVersion(Struct, frozen=True):
    """A version of a prompt, which takes the place of the prompt of its name in the sessions of an evaluation."""

    label: str
    """As it was asked for: `current`, `system@3`, or the name of the file."""
    name: str
    template: str

    @property
    def version(self) -> str:
        """The digest of the template, as in stored renders."""
        return Prompt(self.name, self.template).version


def load_prompts(wanted: Sequence[str], config: Config, home: Home, database: Database) -> list[PromptVersion]:
    """Load versions of prompts: files, stored versions such as `system@3`, or `current`, the default.

    Raises ConfigError for a file or a version that there is not, and for a template that cannot be rendered;
    StoreError.
    """
    found = [load_prompt(each, config, home, database) for each in wanted or [CURRENT]]
    labels = [each.label for each in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(f"--prompt {twice[0]} is given twice.")
    for prompt in found:
        check_prompt(prompt)
    return found


def load_prompt(wanted: str, config: Config, home: Home, database: Database) -> PromptVersion:
    """Load one version of a prompt. Raises ConfigError, StoreError."""
    if wanted == CURRENT:
        return PromptVersion(CURRENT, "system", load_system_prompt(config, home).template)
    path = Path(wanted).expanduser()
    if path.is_file():
        try:
            return PromptVersion(wanted, "system", path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise to_read_error(path, error) from error
    if "@" not in wanted or "/" in wanted:
        raise ConfigError(f"--prompt {wanted}: there is no such file. Give a file, NAME@N, or {CURRENT}.")
    with database.begin_read() as connection:
        row = find_version(connection, wanted)
    return PromptVersion(wanted, row.name, row.template)


def load_judge_prompt(config: Config, home: Home) -> Prompt:
    """Load the user's own prompt of judges if there is one, else the packaged one. Raises ConfigError."""
    path = find_prompt_files(config, home).get(JUDGE)
    try:
        return Prompt.from_file(JUDGE, path) if path else Prompt.from_package(JUDGE, "crow_eval")
    except (OSError, UnicodeDecodeError) as error:
        assert path
        raise to_read_error(path, error) from error


def check_prompt(prompt: PromptVersion) -> None:
    """Check a prompt.

    Raises ConfigError for a template that is wrong, or a system prompt with a variable that no session gives it.
    """
    try:
        _ = Prompt(prompt.name, prompt.template).compiled_template
    except Exception as error:  # jinja2's errors are of many kinds
        raise ConfigError(f"--prompt {prompt.label}: the template is wrong: {error}.") from error
    if prompt.name not in SYSTEM:
        return
    if unknown := sorted({*find_variables(prompt.template)} - {*SYSTEM_VARIABLES}):
        given = ", ".join(SYSTEM_VARIABLES)
        raise ConfigError(f"--prompt {prompt.label} uses {unknown[0]}, which is not defined. Sessions give it {given}.")
    sample = {"cwd": "/", "roots": ["/"], "platform": "", "date": "", "tools": [], "instructions": []}
    try:
        Prompt(prompt.name, prompt.template).render(**sample)
    except PromptError as error:
        raise ConfigError(f"--prompt {prompt.label}: {error}") from error


def replace_prompts(crow: Crow, *, prompts: Mapping[str, Prompt]) -> None:
    """Use these prompts, by their names, in every session, whatever the configuration names."""

    @crow.session_start
    def replace(session: Session) -> None:
        session.prompts.templates.update(prompts)
