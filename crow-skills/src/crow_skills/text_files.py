"""Read text files safely, split off their frontmatter, and find the folders of a project."""

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import crow_system as system
from crow_system.files import UnusableFile, open_file

MAX_FRONTMATTER = 20_000
"""Characters that the frontmatter of a file may have."""
FRONTMATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
UNQUOTED_VALUE = re.compile(r"^([\w-]+):[ \t]+(?![\"'|>\[{&*!#])(.*(?:: |:[ \t\r]*$| #).*)$", re.MULTILINE)
"""A field whose value has a colon or a hash sign in it, which YAML wants quoted and people often do not quote."""


def trust_nothing(folder: Path) -> bool:
    """Return False: trust no folder. This is the default of the extensions' `trusted` argument."""
    return False


def read_text(path: Path, limit: int, root: Path | None = None) -> str:
    """Return the text of a file; cut a longer one after `limit` characters and append a note that says so.

    Raises UnusableFile, also if links lead the path out of `root`.
    """
    try:
        with open_file(path, root) as file:
            data = file.read(4 * limit + 4)
    except OSError as error:
        raise UnusableFile(f"cannot be read ({error.strerror})") from error
    text = data.decode("utf-8-sig", "replace")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n\n[the rest of {path} is left out here: it has more than {limit:,} characters]"


def split_frontmatter(text: str, *, strict: bool = False) -> tuple[dict[str, Any], str]:
    """Return the fields of a file's YAML frontmatter, all scalars as strings, and the text after it.

    Without frontmatter, return no fields and the whole text. If YAML refuses the frontmatter, try once more with its
    unquoted values in quotes, unless `strict`. Raises UnusableFile.
    """
    import yaml  # here because it takes 15 ms, which the first session pays instead of the start-up

    match = FRONTMATTER.match(text)
    if match is None:
        return {}, text
    if len(match[1]) > MAX_FRONTMATTER:
        raise UnusableFile(f"has frontmatter of more than {MAX_FRONTMATTER:,} characters")
    fields: Any = None
    fault = ""
    repaired = UNQUOTED_VALUE.sub(lambda line: f"{line[1]}: {quote_yaml(line[2].rstrip())}", match[1])
    for source in (match[1],) if strict else (match[1], repaired):
        try:
            fields = yaml.load(source, yaml.BaseLoader)  # LibYAML's loader crashes the process on deep nesting
            break
        except (yaml.YAMLError, RecursionError) as error:
            fault = " ".join(str(getattr(error, "problem", None) or error or "too deep").split())
            mark = getattr(error, "problem_mark", None)
            fault += f", line {mark.line + 2}" if mark else ""
    else:
        raise UnusableFile(f"has frontmatter that is not YAML: {fault}")
    if not isinstance(fields, dict):
        raise UnusableFile("has frontmatter that is not a mapping of names to values")
    return {str(key): value for key, value in cast(dict[Any, Any], fields).items()}, text[match.end() :]


def quote_yaml(value: str) -> str:
    """Return a YAML string in single quotes."""
    return "'" + value.replace("'", "''") + "'"


def find_project_folders(cwd: Path) -> list[Path]:
    """Return the folders from a project's root down to `cwd`.

    The root is the folder that holds `.git`. Without one, it is the outermost folder above `cwd` that only this user
    or the owner of `cwd` can write to.
    """
    return list(walk_up(cwd))[::-1]


def walk_up(cwd: Path) -> Iterator[Path]:
    """Yield `cwd` and the folders above it, up to the project's root."""
    try:
        owners = {system.get_user(), cwd.stat().st_uid}
        for folder in (cwd, *cwd.parents):
            status = folder.stat()
            if folder != cwd and (status.st_uid not in owners or system.get_mode(status) & stat.S_IWOTH):
                return
            yield folder
            if (folder / ".git").exists():
                return
    except OSError:
        return


def get_user_folders(config: Path, home: Path, name: str) -> list[Path]:
    """Return the user's folders of that name: crow's configuration folder first, then those of other agents."""
    return [config / name, *(home / folder / name for folder in (".crow", ".agents", ".claude"))]
