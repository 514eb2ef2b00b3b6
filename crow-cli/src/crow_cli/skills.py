"""`crow skills`: which skills there are, whether they are right, and a new one."""

import os
import sys
from functools import partial
from pathlib import Path
from shlex import quote

import click
from crow_core.errors import ConfigError
from crow_core.settings.config import Home, load_config, parse_options
from crow_core.settings.trust import TrustedFolders

from crow_cli.ending import wrong
from crow_cli.history import AS_JSON, one_line, print_json, print_table, say, tail
from crow_cli.screen import spelled_out

NEW = """---
name: {name}
description: {description}
# metadata:
#   triggers: words that call for it, with commas between them
---

# {title}

What to do, step by step. What is long goes into files beside this one (references/, scripts/, assets/), which are read
only when this text names them.
"""
WHEN = "What it does. Use it when …"


@click.group()
def skills() -> None:
    """What the model reads when a task calls for it. A skill is a folder with a SKILL.md (agentskills.io)."""


@skills.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """The skills of this folder, and what is wrong with them. Those of MCP servers join them in a session."""
    from crow_skills.files import find_project_folders, get_user_folders
    from crow_skills.skill_file import SKILL_FOLDERS, SkillFolder, find_skill_files, find_skills
    from crow_skills.skills import list_skill_folders  # not above: for these commands alone
    from crow_skills.skills import skills as extension

    home, cwd = Home.find(os.environ), Path.cwd()
    trust, user = TrustedFolders(home.data), get_user_folders(home.config, Path.home(), "skills")
    try:
        unset = partial(extension, user=user, trusted=trust.is_trusted)
        table = load_config(home, os.environ).extensions.get("skills")
        told = table if isinstance(table, dict) else {}
        folders = parse_options(unset, told, ["extensions", "skills"], home).get("folders", ())
    except ConfigError as error:
        wrong(str(error))
    found = find_skills(list_skill_folders(cwd, folders, user, trust.is_trusted))
    untrusted = [
        folder
        for folder in find_project_folders(cwd)
        if not trust.is_trusted(folder)
        and any(find_skill_files(SkillFolder(folder / name, "").folder) for name in SKILL_FOLDERS)
    ]
    if as_json:
        keys = ("name", "description", "source", "origin", "triggers", "problems")
        print_json([{key: getattr(skill, key) for key in keys} for skill in found.skills.values()])
    elif found.skills:
        rows = [
            (skill.name, skill.origin, tail(skill.source, 50), skill.description) for skill in found.skills.values()
        ]
        print_table(("NAME", "FROM", "FILE", "DESCRIPTION"), rows)
    else:
        say("There are no skills. Make one: crow skills new NAME")
    for skill in found.skills.values():
        for problem in skill.problems:
            say(one_line(f"{skill.name}: {problem}"))
    for sentence in [*found.left_out, *found.hidden]:
        say(one_line(sentence))
    for folder in untrusted:
        say(one_line(f"Those of {folder} do not count until you trust it: crow trust {quote(str(folder))}"))


@skills.command()
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(exists=True, path_type=Path))
def validate(folders: tuple[Path, ...]) -> None:
    """Check skills by the specification. Exit code 1 if one is not as it should be."""
    from crow_skills.skill_file import validate_skill

    faults = {folder: validate_skill(folder if folder.is_dir() else folder.parent) for folder in folders}
    for folder, found in faults.items():
        click.echo(one_line(f"{folder}: {'not valid' if found else 'valid'}"))
        for fault in found:
            click.echo(f"  - {one_line(fault)}")
    sys.exit(any(faults.values()))


@skills.command()
@click.argument("name")
@click.option("--user", is_flag=True, help="For all projects, in crow's configuration; not in this one's .crow/skills.")
@click.option("--description", default=WHEN, help="What it does, and when to use it.")
def new(name: str, user: bool, description: str) -> None:
    """Make a skill, to be filled in: crow skills new release-notes"""
    from crow_skills.files import quote_yaml
    from crow_skills.skill_file import check_fields

    description = " ".join(description.split())
    if found := check_fields({"name": name, "description": description}, name):
        wrong(spelled_out(" ".join(found)))
    home = Home.find(os.environ)
    project = Path.cwd()
    file = (home.config / "skills" if user else project / ".crow" / "skills") / name / "SKILL.md"
    trusted = TrustedFolders(home.data).is_trusted(project)
    try:
        file.parent.mkdir(parents=True)
        title = name.replace("-", " ").capitalize()
        file.write_text(NEW.format(name=name, description=quote_yaml(description), title=title), "utf-8")
    except FileExistsError:
        wrong(spelled_out(f"{file.parent} is there already. Change it there, or take another name."))
    except OSError as error:
        wrong(spelled_out(f"{file} cannot be written ({error.strerror})."))
    click.echo(spelled_out(str(file)))
    if not user:
        again = " once more" if trusted else ""
        say(one_line(f"It counts when you trust the folder{again}: crow trust {quote(str(project))}"))
