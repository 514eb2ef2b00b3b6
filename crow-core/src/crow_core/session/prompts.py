"""Prompts: named templates. The log records each render.

Texts of users, project files, skills and tools are passed as variables only. They are never a part of a template, so
nothing in them is evaluated.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow_core.errors import PromptError
from crow_core.messages.message import marker_kind
from crow_core.messages.passes import drop_rewound
from crow_core.session.log import SessionLog

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Prompt:
    """A Jinja2 template with a name; the template's content is its version."""

    name: str
    template: str

    @classmethod
    def from_package(cls, name: str, package: str = "crow_core") -> "Prompt":
        """Read the template of that name in a package's folder `templates`."""
        return cls(name, (files(package) / "templates" / f"{name}.md.j2").read_text("utf-8"))

    @classmethod
    def from_file(cls, name: str, path: Path) -> "Prompt":
        """Read a template from a file. Raises OSError."""
        return cls(name, path.read_text("utf-8"))

    @cached_property
    def version(self) -> str:
        """The first twelve hexadecimal digits of the template's SHA-256."""
        return hashlib.sha256(self.template.encode()).hexdigest()[:12]

    @cached_property
    def compiled_template(self) -> "Template":
        """The compiled template. Compiling takes thirty times as long as rendering."""
        # Imported here because it takes 5 % of the start-up time, and only the first render needs it.
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False
        )
        return environment.from_string(self.template)

    def render(self, **variables: Any) -> str:
        """Render the template. Raises PromptError, also for an undefined variable."""
        from jinja2 import TemplateSyntaxError  # see above

        try:
            return self.compiled_template.render(variables).strip()
        except Exception as error:  # a template can raise any error
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            said = str(error).rstrip(".")
            raise PromptError(f"The template of the prompt {self.name!r} is wrong{line}: {said}.") from error


class SessionPrompts:
    """The prompts of one session. Every rendering is appended to its log: which version became which text."""

    def __init__(self, templates: dict[str, Prompt], log: SessionLog) -> None:
        self.templates = templates
        """By name; `system` is the system prompt."""
        self.system: str | None = None
        """The rendered system prompt; None until the first request, or after a rewind behind it."""
        self.instructions: list[str] = []
        """The client's instructions for the system prompt; they come before those of extensions."""
        self._log = log

    def render(self, prompt: Prompt, purpose: str, **variables: Any) -> str:
        """Render a prompt, and append a marker with its version, its variables and the text. Raises PromptError."""
        text = prompt.render(**variables)
        self._log.append(
            {
                "crow": {
                    "kind": "render",
                    "purpose": purpose,
                    "prompt": prompt.name,
                    "version": prompt.version,
                    "template": prompt.template,
                    "variables": variables,
                    "text": text,
                }
            }
        )
        return text

    def render_system(
        self, cwd: str, roots: Sequence[str], tools: Sequence[Mapping[str, Any]], instructions: Sequence[str]
    ) -> None:
        """Render the system prompt from its template and the instructions of the client and of extensions.

        It is rendered once a session, before the first request. Raises PromptError.
        """
        self.system = self.render(
            self.templates["system"],
            "system",
            cwd=cwd,
            roots=[*roots],
            platform=f"{platform.system()} {platform.machine()}",
            date=date.today().isoformat(),
            tools=[tool["function"]["name"] for tool in tools],
            instructions=[*self.instructions, *instructions],
        )

    def set_instructions(self, text: str, *, alone: bool = False) -> None:
        """Put the client's instructions into the system prompt: behind crow's own, or `alone` in their place.

        A stored session keeps the system prompt that was sent, unless its instructions were different.
        """
        self.instructions = [text]
        if alone:
            self.templates["system"] = Prompt.from_package("client")
        notes = [entry.get("crow", {}) for entry in drop_rewound(self._log) if marker_kind(entry) == "render"]
        last = next((render for render in reversed(notes) if render.get("purpose") == "system"), None)
        if last:
            before = last.get("prompt"), last.get("variables", {}).get("instructions", [])[:1]
            if before != (self.templates["system"].name, [text]):
                self.system = None
