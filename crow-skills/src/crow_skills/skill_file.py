"""Find, parse and validate skills: folders with a SKILL.md, as specified at agentskills.io."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from crow_core.mcp.server import Server
from crow_core.text import to_line
from crow_system.files import UnusableFile, is_inside

from crow_skills.text_files import read_text, split_frontmatter

SKILL_FOLDERS = (".crow/skills", ".agents/skills", ".claude/skills")
"""Folders of a project, or of the user's home, that hold skills; the first has priority."""
FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
"""The fields of the frontmatter that the specification allows."""
MAX_SKILLS = 500
"""Entries of one folder that are searched for skills."""
MAX_CHARACTERS = 100_000
"""Characters read from a SKILL.md."""


@dataclass(frozen=True)
class Skill:
    """A skill, as its SKILL.md describes it."""

    name: str
    description: str
    body: str
    """The instructions; empty if `server` has them."""
    source: str
    """The path or the URI of its SKILL.md."""
    origin: str = "given"
    """"project", "user", "given" (a configured folder), "plugin NAME", or the name of an MCP server."""
    triggers: tuple[str, ...] = ()
    """Words in a prompt that select the skill, besides its name."""
    problems: tuple[str, ...] = ()
    """Violations of the specification, as sentences; the skill is used all the same."""
    server: Server | None = None
    """The MCP server that has it as a resource; None for a file."""
    fields: Mapping[str, Any] | None = None
    """The frontmatter that its server lists; None for a file, and for a server without the skills extension."""

    @property
    def folder(self) -> str:
        """The path or the URI of the folder that relative paths in the body start from."""
        return self.source.rpartition("/")[0]


@dataclass(frozen=True)
class SkillFolder:
    """A folder whose subfolders are skills."""

    folder: Path
    origin: str
    """The `origin` of its skills."""
    root: Path | None = None
    """The folder that no link may lead out of; None for no limit."""
    is_strict: bool = False
    """True if a skill that violates the specification is left out."""


@dataclass
class SkillIndex:
    """The skills that a session has, and reports about the files that are not among them."""

    skills: dict[str, Skill] = field(default_factory=dict[str, Skill])
    """Skills by name."""
    left_out: list[str] = field(default_factory=list[str])
    """Sentences about files that cannot be used."""
    hidden: list[str] = field(default_factory=list[str])
    """Sentences about skills that have the name of an earlier one."""


def find_skills(folders: Iterable[SkillFolder]) -> SkillIndex:
    """Read the skills in these folders; of several with one name, use the first."""
    index = SkillIndex()
    for place in folders:
        for file in find_skill_files(place.folder, place.root):
            try:
                skill = parse_skill(read_text(file, MAX_CHARACTERS, place.root), str(file), place.origin)
            except UnusableFile as error:
                index.left_out.append(f"{to_line(str(file))} {error}.")
                continue
            if place.is_strict and skill.problems:
                index.left_out.append(f"{to_line(str(file))}: {skill.problems[0]}")
                continue
            if (first := index.skills.setdefault(skill.name, skill)) is not skill:
                index.hidden.append(f"{to_line(str(file))} is hidden by {to_line(first.source)}, which has its name.")
    return index


def find_skill_files(folder: Path, root: Path | None = None) -> list[Path]:
    """Return the SKILL.md files of a folder's subfolders; none if a link leads the folder out of `root`."""
    if root and not is_inside(folder, root):
        return []
    try:
        folders = sorted(folder.iterdir())[:MAX_SKILLS]
    except (OSError, ValueError):
        return []
    return [file for folder in folders if (file := find_skill_file(folder))]


def find_skill_file(folder: Path) -> Path | None:
    """Return the SKILL.md of a folder, or None."""
    try:
        return next((file for name in ("SKILL.md", "skill.md") if (file := folder / name).is_file()), None)
    except (OSError, ValueError):
        return None


def parse_skill(text: str, source: str, origin: str) -> Skill:
    """Return the skill that the text of a SKILL.md describes, with its violations of the specification as `problems`.

    Raises UnusableFile if it has no description or no valid frontmatter.
    """
    fields, body = split_frontmatter(text)
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(description, str) or not description.strip():
        raise UnusableFile("has no description in its frontmatter, which says when to use it")
    folder = source.split("/")[-2] if "/" in source else ""
    name = unicodedata.normalize("NFKC", name.strip()) if isinstance(name, str) else ""
    return Skill(
        name=to_line(name or folder)[:64].strip() or "skill",
        description=description.strip()[:1024],
        body=body.strip(),
        source=source,
        origin=origin,
        triggers=read_triggers(fields),
        problems=tuple(check_fields(fields, folder)),
    )


def read_triggers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the `triggers` and `keywords` of the metadata and of the other fields: lists, or comma-separated words."""
    metadata = fields.get("metadata")
    tables = [cast(dict[str, Any], metadata), fields] if isinstance(metadata, dict) else [fields]
    values = [table.get(key) for table in tables for key in ("triggers", "keywords")]
    words: list[Any] = []
    for value in values:
        words += value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(dict.fromkeys(word.strip() for word in words if isinstance(word, str) and word.strip()))


def has_frontmatter(text: str, fields: Mapping[str, Any]) -> bool:
    """Return whether the frontmatter of a SKILL.md is `fields`, which are JSON. Raises UnusableFile."""
    return is_same(split_frontmatter(text)[0], fields)


def is_same(raw: Any, value: Any) -> bool:
    """Return whether a value of YAML, whose scalars are strings, is a value of JSON."""
    import yaml  # here because it takes 15 ms, as in `text_files`

    match raw, value:
        case dict(), dict():
            table = cast(dict[str, Any], raw)
            return table.keys() == value.keys() and all(is_same(table[key], value[key]) for key in table)
        case list(), list():
            items, others = cast(list[Any], raw), cast(list[Any], value)
            return len(items) == len(others) and all(map(is_same, items, others))
        case str(), str():
            return raw == value
        case str(), bool() | int() | float() | None:
            try:
                return yaml.safe_load(raw) == value
            except yaml.YAMLError:
                return False
        case _:
            return False


def validate_skill(folder: Path) -> list[str]:
    """Return the violations of the specification in a skill's folder, as sentences; an empty list if it is valid."""
    file = find_skill_file(folder)
    if file is None:
        return [f"There is no SKILL.md in {folder}."]
    try:
        text = read_text(file, MAX_CHARACTERS)
        if not text.startswith("---"):
            return ["SKILL.md does not begin with frontmatter: a line ---, the fields, a line ---."]
        fields, _ = split_frontmatter(text, strict=True)
        if not fields:
            return ["The frontmatter of SKILL.md is not closed by a line ---."]
    except UnusableFile as error:
        return [f"SKILL.md {error}."]
    return check_fields(fields, folder.absolute().name)


def check_fields(fields: Mapping[str, Any], folder: str) -> list[str]:
    """Return the violations of the specification in the frontmatter of a skill in a folder of that name."""
    problems: list[str] = []
    if unknown := [key for key in fields if key not in FIELDS]:
        problems.append(f"There is no field {', '.join(map(to_line, unknown))}. Put fields of your own under metadata.")
    name = fields.get("name")
    if not isinstance(name, str) or not name.strip():
        problems.append("name is missing or not a string.")
    else:
        problems += check_name(unicodedata.normalize("NFKC", name.strip()), unicodedata.normalize("NFKC", folder))
    description = fields.get("description")
    if not isinstance(description, str) or not description.strip():
        problems.append("description is missing or not a string.")
    elif len(description) > 1024:
        problems.append(f"description has {len(description):,} characters; 1,024 are allowed.")
    for key, limit in (("compatibility", 500), ("license", 0), ("allowed-tools", 0)):
        if key not in fields:
            continue
        value = fields[key]
        if not isinstance(value, str):
            problems.append(f"{key} is not a string.")
        elif limit and not 0 < len(value) <= limit:
            problems.append(f"{key} has {len(value):,} characters; 1 to {limit} are allowed.")
    metadata = fields.get("metadata", {})
    is_plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values())
    if not is_plain:
        problems.append("metadata is not a mapping of names to strings.")
    return problems


def check_name(name: str, folder: str) -> list[str]:
    """Return the violations of the specification in a skill's name, given the name of its folder."""
    problems: list[str] = []
    if len(name) > 64:
        problems.append(f"name has {len(name):,} characters; 64 are allowed.")
    if name != name.lower() or not all(letter.isalnum() or letter == "-" for letter in name):
        problems.append(f"name: {to_line(name)[:80]!r} may have only lowercase letters, digits and hyphens.")
    if name.startswith("-") or name.endswith("-") or "--" in name:
        problems.append(f"name: {to_line(name)[:80]!r} begins or ends with a hyphen, or has two in a row.")
    if name != folder:
        problems.append(f"name: {to_line(name)[:80]!r} is not the name of its folder, {to_line(folder)[:80]!r}.")
    return problems
