"""Prompts: named templates whose every render is written down.

Words that come from outside (the user, project files, skills, tools) are only ever variables: a template is never made
of them, so nothing in them is evaluated.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow_core.errors import PromptError

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Prompt:
    """A Jinja2 template under a name; its version is its content."""

    name: str
    template: str

    @classmethod
    def packaged(cls, name: str, package: str = "crow_core") -> "Prompt":
        """The template of that name that ships in a package's folder `templates`."""
        return cls(name, (files(package) / "templates" / f"{name}.md.j2").read_text("utf-8"))

    @classmethod
    def from_file(cls, name: str, path: Path) -> "Prompt":
        """A template of the user's own. Raises OSError."""
        return cls(name, path.read_text("utf-8"))

    @cached_property
    def version(self) -> str:
        """The template's content hash, twelve hexadecimal digits."""
        return hashlib.sha256(self.template.encode()).hexdigest()[:12]

    @cached_property
    def compiled(self) -> "Template":
        """Made once: it takes thirty times as long as to render it."""
        # Here and not above: 5 % of start-up, needed only when the first prompt of a session is rendered.
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
        )
        return environment.from_string(self.template)

    def render(self, **variables: Any) -> str:
        """The finished text. Raises PromptError; an undefined variable is an error, never an empty string."""
        from jinja2 import TemplateSyntaxError  # see above

        try:
            return self.compiled.render(variables).strip()
        except Exception as error:  # whatever a template does wrong is the template's fault
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            said = str(error).rstrip(".")
            raise PromptError(f"The template of the prompt {self.name!r} is wrong{line}: {said}.") from error
