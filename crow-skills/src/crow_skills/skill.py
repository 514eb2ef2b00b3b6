"""Agent Skills (agentskills.io): folders with a SKILL.md, checked as the specification says."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from crow_core.mcp.server import Server
from crow_core.text import to_line

from crow_skills.files import Unreadable, parted, read

FOLDERS = (".crow/skills", ".agents/skills", ".claude/skills")
"""Where a project, or a home, keeps them; the first goes before the others."""
FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
MOST = 500
"""Skills that are looked at in one folder."""
BODY = 100_000
"""Characters of a SKILL.md that are read."""


@dataclass(frozen=True)
class Skill:
    """One skill."""

    name: str
    description: str
    body: str
    source: str
    """The path of its SKILL.md, or its URI."""
    origin: str = "given"
    """"project", "user", or the name of an MCP server."""
    triggers: tuple[str, ...] = ()
    """Words that call for it, beside its name."""
    problems: tuple[str, ...] = ()
    """What the specification has against it; it is used all the same."""
    server: Server | None = None
    """What gives the body of one that is a resource."""

    @property
    def folder(self) -> str:
        return self.source.rpartition("/")[0]


@dataclass(frozen=True)
class Place:
    """A folder of skills."""

    folder: Path
    origin: str
    inside: Path | None = None
    """Where no link may lead out of."""


@dataclass
class Found:
    """What there is."""

    skills: dict[str, Skill] = field(default_factory=dict[str, Skill])
    """By name."""
    left_out: list[str] = field(default_factory=list[str])
    """Sentences about those that cannot be used."""
    hidden: list[str] = field(default_factory=list[str])
    """The same about those that another of the same name hides."""


def find(places: Iterable[Place]) -> Found:
    """The skills in these folders; of two with one name the first counts."""
    found = Found()
    for place in places:
        for file in files_in(place.folder):
            try:
                skill = parse(read(file, BODY, place.inside), str(file), place.origin)
            except Unreadable as why:
                found.left_out.append(f"{to_line(str(file))} {why}.")
                continue
            if (first := found.skills.setdefault(skill.name, skill)) is not skill:
                found.hidden.append(f"{to_line(str(file))} is hidden by {to_line(first.source)}, which has its name.")
    return found


def files_in(folder: Path) -> list[Path]:
    """Every SKILL.md one level below a folder."""
    try:
        folders = sorted(folder.iterdir())[:MOST]
    except (OSError, ValueError):
        return []
    return [file for below in folders if (file := file_of(below))]


def file_of(folder: Path) -> Path | None:
    """A skill's file, None where the folder has none."""
    try:
        return next((file for name in ("SKILL.md", "skill.md") if (file := folder / name).is_file()), None)
    except (OSError, ValueError):
        return None


def parse(text: str, source: str, origin: str) -> Skill:
    """A skill from the text of its SKILL.md: what can be made use of is. Raises Unreadable."""
    fields, body = parted(text)
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(description, str) or not description.strip():
        raise Unreadable("has no description in its frontmatter, so nobody could know when to use it")
    folder = source.split("/")[-2] if "/" in source else ""
    name = unicodedata.normalize("NFKC", name.strip()) if isinstance(name, str) else ""
    return Skill(
        name=to_line(name or folder)[:64].strip() or "skill",
        description=description.strip()[:1024],
        body=body.strip(),
        source=source,
        origin=origin,
        triggers=triggers_in(fields),
        problems=tuple(faults(fields, folder)),
    )


def triggers_in(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """`triggers` or `keywords`, in the metadata or beside it: a list, or words with commas between them."""
    metadata = fields.get("metadata")
    places = [cast(dict[str, Any], metadata), fields] if isinstance(metadata, dict) else [fields]
    values = [place.get(key) for place in places for key in ("triggers", "keywords")]
    words: list[Any] = []
    for value in values:
        words += value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(dict.fromkeys(word.strip() for word in words if isinstance(word, str) and word.strip()))


def validate(folder: Path) -> list[str]:
    """What the specification has against a skill's folder, each as a sentence; nothing when it is right."""
    file = file_of(folder)
    if file is None:
        return [f"There is no SKILL.md in {folder}."]
    try:
        text = read(file, BODY)
        if not text.startswith("---"):
            return ["SKILL.md does not begin with frontmatter: a line ---, the fields, a line ---."]
        fields, _ = parted(text, strict=True)
        if not fields:
            return ["The frontmatter of SKILL.md is not closed by a line ---."]
    except Unreadable as why:
        return [f"SKILL.md {why}."]
    return faults(fields, folder.absolute().name)


def faults(fields: Mapping[str, Any], folder: str) -> list[str]:
    """What the specification has against frontmatter in a folder of that name."""
    found: list[str] = []
    if unknown := [key for key in fields if key not in FIELDS]:
        found.append(f"There is no field {', '.join(map(to_line, unknown))}. Put what is your own under metadata.")
    name = fields.get("name")
    if not isinstance(name, str) or not name.strip():
        found.append("name is missing, or is no text.")
    else:
        found += faults_of_name(unicodedata.normalize("NFKC", name.strip()), unicodedata.normalize("NFKC", folder))
    description = fields.get("description")
    if not isinstance(description, str) or not description.strip():
        found.append("description is missing, or is no text.")
    elif len(description) > 1024:
        found.append(f"description has {len(description):,} characters; 1,024 are allowed.")
    for key, limit in (("compatibility", 500), ("license", 0), ("allowed-tools", 0)):
        if key not in fields:
            continue
        value = fields[key]
        if not isinstance(value, str):
            found.append(f"{key} is no text.")
        elif limit and not 0 < len(value) <= limit:
            found.append(f"{key} has {len(value):,} characters; 1 to {limit} are allowed.")
    metadata = fields.get("metadata", {})
    plain = isinstance(metadata, dict) and all(isinstance(v, str) for v in cast(dict[str, Any], metadata).values())
    if not plain:
        found.append("metadata is no mapping of names to texts.")
    return found


def faults_of_name(name: str, folder: str) -> list[str]:
    found: list[str] = []
    if len(name) > 64:
        found.append(f"name has {len(name):,} characters; 64 are allowed.")
    if name != name.lower() or not all(letter.isalnum() or letter == "-" for letter in name):
        found.append(f"name: {to_line(name)[:80]!r} has more than small letters, digits and hyphens in it.")
    if name.startswith("-") or name.endswith("-") or "--" in name:
        found.append(f"name: {to_line(name)[:80]!r} begins or ends with a hyphen, or has two in a row.")
    if name != folder:
        found.append(f"name: {to_line(name)[:80]!r} is not the name of its folder, {to_line(folder)[:80]!r}.")
    return found
