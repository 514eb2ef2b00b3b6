"""Text files that others wrote, read within bounds; and which folders belong to a project."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

FRONTMATTER = 20_000
"""Characters that it may have."""
FENCE = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
UNQUOTED = re.compile(r"^([\w-]+):[ \t]+(?![\"'|>\[{&*!#])(.*(?:: |:[ \t\r]*$| #).*)$", re.MULTILINE)
"""A value with a colon in it, which YAML wants quoted and people do not quote."""


class Unreadable(Exception):
    """Why a file cannot be used: the end of a sentence that begins with its name."""


def read(path: Path, limit: int, inside: Path | None = None) -> str:
    """At most `limit` characters of a text file, which says so when it has more. Nothing is followed out of `inside`.

    Raises Unreadable.
    """
    try:
        where = path.resolve(strict=True)
        if inside and not where.is_relative_to(inside.resolve()):
            raise Unreadable(f"leads out of {inside}")
        opened = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not keep us waiting
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise Unreadable("is not a file")
            data = file.read(4 * limit + 4)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise Unreadable(f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    text = data.decode("utf-8-sig", "replace")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n\n[the rest of {path} is left out here: it has more than {limit:,} characters]"


def parted(text: str, *, strict: bool = False) -> tuple[dict[str, Any], str]:
    """A file's YAML frontmatter, whose scalars are all strings, and what follows it; unless `strict`, a colon that
    should be quoted need not be. Raises Unreadable."""
    import yaml  # not at the top: 15 ms, and the first session needs it, not the start

    found = FENCE.match(text)
    if found is None:
        return {}, text
    if len(found[1]) > FRONTMATTER:
        raise Unreadable(f"has frontmatter of more than {FRONTMATTER:,} characters")
    fields: Any = None
    fault = ""
    mended = UNQUOTED.sub(lambda line: f"{line[1]}: {quoted(line[2].rstrip())}", found[1])
    for source in (found[1],) if strict else (found[1], mended):
        try:
            fields = yaml.load(source, yaml.BaseLoader)  # not LibYAML's, which dies of what is deep
            break
        except (yaml.YAMLError, RecursionError) as error:
            fault = " ".join(str(getattr(error, "problem", None) or error or "too deep").split())
            mark = getattr(error, "problem_mark", None)
            fault += f", line {mark.line + 2}" if mark else ""
    else:
        raise Unreadable(f"has frontmatter that is not YAML: {fault}")
    if not isinstance(fields, dict):
        raise Unreadable("has frontmatter that is no mapping of names to values")
    return {str(key): value for key, value in cast(dict[Any, Any], fields).items()}, text[found.end() :]


def quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def project(cwd: Path) -> list[Path]:
    """A project's folders, from its root down to `cwd`: the root holds `.git`, or is the outermost that nobody else
    can write to."""
    return list(upwards(cwd))[::-1]


def upwards(cwd: Path) -> Iterator[Path]:
    try:
        owners = {os.getuid(), cwd.stat().st_uid}
        for folder in (cwd, *cwd.parents):
            status = folder.stat()
            if folder != cwd and (status.st_uid not in owners or status.st_mode & stat.S_IWOTH):
                return
            yield folder
            if (folder / ".git").exists():
                return
    except OSError:
        return


def user_folders(config: Path, home: Path, what: str) -> list[Path]:
    """Where a user keeps `what`, for crow (its configuration's folder first) and for other agents."""
    return [config / what, *(home / folder / what for folder in (".crow", ".agents", ".claude"))]
