"""`crow skills`: list and validate skills, and make a new one."""

import os
import sys
from functools import partial
from pathlib import Path
from shlex import quote

import click
from crow_agent.settings.config import load_config, parse_options
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import list_settings
from crow_agent.settings.trust import TrustedFolders
from crow_core.errors import ConfigError
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, escape_line, print_json, print_note, print_table, shorten_path
from crow_cli.process import fail

SKILL_TEMPLATE = """---
name: {name}
description: {description}
# metadata:
#   triggers: words that call for it, with commas between them
---

# {title}

What to do, step by step. What is long goes into files beside this one (references/, scripts/, assets/), which are read
only when this text names them.
"""
DEFAULT_DESCRIPTION = "What it does. Use it when …"


@click.group()
def skills() -> None:
    """List, validate and make skills.

    A skill is a folder with a SKILL.md (agentskills.io): instructions that the model reads when a task needs them.
    """


@skills.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List the skills of this folder and their problems. Skills of MCP servers are added in a session."""
    from crow_skills.skill_file import SKILL_FOLDERS, find_skills
    from crow_skills.skills import list_skill_folders  # imported here because only these commands need it
    from crow_skills.skills import skills as extension
    from crow_skills.text_files import find_project_folders, get_user_folders

    home, cwd = Home.find(os.environ), Path.cwd()
    trust, user = TrustedFolders(home.data), get_user_folders(home.config, Path.home(), "skills")
    try:
        unset = partial(extension, user=user, trusted=trust.is_trusted)
        table = load_config(home, os.environ).extensions.get("skills")
        options = table if isinstance(table, dict) else {}
        folders = parse_options(unset, options, ["extensions", "skills"], home).get("folders", ())
    except ConfigError as error:
        fail(str(error))
    where = [*list_skill_folders(cwd, folders, user, trust.is_trusted)]
    if home.has_plugins(os.environ, cwd):
        from crow_agent.settings.plugins import find_plugins

        where += [plugin.skill_folder for plugin in find_plugins(home, os.environ, cwd, trust).plugins]
    found = find_skills(where)
    untrusted = [
        folder
        for folder in find_project_folders(cwd)
        if not trust.is_trusted(folder) and list_settings(folder, SKILL_FOLDERS)
    ]
    if as_json:
        keys = ("name", "description", "source", "origin", "triggers", "problems")
        print_json([{key: getattr(skill, key) for key in keys} for skill in found.skills.values()])
    elif found.skills:
        rows = [(skill.name, describe_folder(skill.source, cwd), skill.description) for skill in found.skills.values()]
        print_table(("NAME", "FOLDER", "DESCRIPTION"), rows)
    else:
        print_note("There are no skills. Make one: crow skills new NAME")
    for skill in found.skills.values():
        for problem in skill.problems:
            print_note(escape_line(f"{skill.name}: {problem}"))
    for sentence in [*found.left_out, *found.hidden]:
        print_note(escape_line(sentence))
    for folder in untrusted:
        print_note(
            escape_line(f"The skills of {folder} are ignored until you trust it: crow trust {quote(str(folder))}")
        )


def describe_folder(source: str, cwd: Path) -> str:
    """Return the folder that holds a skill's own folder, relative to the working folder if it is inside of that."""
    folder = Path(source).parents[1]
    return str(folder.relative_to(cwd)) if folder.is_relative_to(cwd) else shorten_path(str(folder), 30)


@skills.command()
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(exists=True, path_type=Path))
def validate(folders: tuple[Path, ...]) -> None:
    """Check skills against the specification. Exit codes: 0 all are valid, 1 one is not."""
    from crow_skills.skill_file import validate_skill

    faults = {folder: validate_skill(folder if folder.is_dir() else folder.parent) for folder in folders}
    for folder, found in faults.items():
        click.echo(escape_line(f"{folder}: {'not valid' if found else 'valid'}"))
        for fault in found:
            click.echo(f"  - {escape_line(fault)}")
    sys.exit(any(faults.values()))


@skills.command()
@click.argument("name")
@click.option("--user", is_flag=True, help="Make it in crow's configuration, for all projects, not in .crow/skills.")
@click.option("--description", default=DEFAULT_DESCRIPTION, help="The description: what it does, and when to use it.")
def new(name: str, user: bool, description: str) -> None:
    """Make a skill from a template.

    Example: crow skills new release-notes
    """
    from crow_skills.skill_file import check_fields
    from crow_skills.text_files import quote_yaml

    description = " ".join(description.split())
    if found := check_fields({"name": name, "description": description}, name):
        fail(escape_controls(" ".join(found)))
    home = Home.find(os.environ)
    project = Path.cwd()
    file = (home.config / "skills" if user else project / ".crow" / "skills") / name / "SKILL.md"
    trusted = TrustedFolders(home.data).is_trusted(project)
    try:
        file.parent.mkdir(parents=True)
        title = name.replace("-", " ").capitalize()
        file.write_text(SKILL_TEMPLATE.format(name=name, description=quote_yaml(description), title=title), "utf-8")
    except FileExistsError:
        fail(escape_controls(f"{file.parent} exists already. Change it there, or choose another name."))
    except OSError as error:
        fail(escape_controls(f"{file} cannot be written ({error.strerror})."))
    click.echo(escape_controls(str(file)))
    if not user:
        again = " again" if trusted else ""
        print_note(escape_line(f"It is used once you trust the folder{again}: crow trust {quote(str(project))}"))
