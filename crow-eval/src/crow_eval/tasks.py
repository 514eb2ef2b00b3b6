"""Tasks and datasets, as they are written in folders and files.

A dataset is a folder of task folders, one task folder, a file of JSON lines with one task each, or the name of a suite
of crow.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import msgspec
from crow_agent.settings.faults import Fault, find_fault, to_config_error, to_read_error
from crow_agent.settings.structs import ProgramLevel
from crow_core.errors import ConfigError
from crow_core.session.output import check_schema
from msgspec import Meta, Struct

T = TypeVar("T", bound=Struct)

SUITES = Path(__file__).parent / "suites"
"""The folder of the suites that are shipped, each a dataset: a folder of tasks, or a file of JSON lines."""

COMMAND_TIMEOUT = 120.0
"""Seconds that a command of a task or a function of a check may take, unless it says otherwise."""

PASS_RULE = re.compile(r"(yes|no)|(>=|<=|>|<|==)\s*(\d+(?:\.\d+)?)")
"""Matches when a judge's answer passes: `yes`, `no`, or a comparison with its score, such as `>= 7`."""


class CommandCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Run a command in the workspace; it passes if the exit code is as expected."""

    run: str | list[str]
    """A command line of the shell, or a program and its arguments."""
    exit: int = 0
    timeout: float = COMMAND_TIMEOUT
    """Seconds."""
    sandbox: ProgramLevel = "off"
    network: bool = False
    """True if the command has the network in its sandbox."""
    name: str = ""


class FileCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Look at a file of the workspace; exactly one of the other keys says how."""

    path: str
    exists: bool | None = None
    absent: bool | None = None
    equals: str | None = None
    contains: str | None = None
    matches: str | None = None
    """A regular expression that is found in the file."""
    name: str = ""


class AnswerCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Look at the agent's last message; exactly one of the other keys says how."""

    contains: str | None = None
    matches: str | None = None
    """A regular expression that is found in the answer."""
    name: str = ""


class PythonCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Call a Python function with the workspace's folder (a `pathlib.Path`) and the answer.

    It passes if the function returns None or True. False, a text, which is the reason, or an exception fails it.
    """

    function: str
    """`FILE:NAME`; the file is in the task's folder."""
    timeout: float = COMMAND_TIMEOUT
    """Seconds."""
    sandbox: ProgramLevel = "off"
    network: bool = False
    """True if the function has the network in its sandbox."""
    name: str = ""


class SchemaCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Ask for a typed result; it passes if the result fits the JSON schema."""

    schema: dict[str, Any] | str
    """The schema, or the name of a file in the task's folder that holds it."""
    name: str = ""


class JudgeCheck(Struct, forbid_unknown_fields=True, kw_only=True):
    """Ask a model about the answer and the files that the agent has changed."""

    question: str
    passes: str = msgspec.field(default="yes", name="pass")
    """`yes` or `no`, or a comparison with a score from 0 to 10, such as `>= 7`."""
    model: str = ""
    """The model that judges; by default the one that the evaluation names."""
    prompt: str = ""
    """A template in the task's folder in place of crow's own."""
    name: str = ""


Check: TypeAlias = CommandCheck | FileCheck | AnswerCheck | PythonCheck | SchemaCheck | JudgeCheck
KINDS: dict[str, type[Check]] = {
    "command": CommandCheck,
    "file": FileCheck,
    "answer": AnswerCheck,
    "python": PythonCheck,
    "schema": SchemaCheck,
    "judge": JudgeCheck,
}


class Limits(Struct, forbid_unknown_fields=True, kw_only=True):
    """The most that a run of a task may take; a run that reaches a limit has failed."""

    requests: Annotated[int, Meta(ge=0)] | None = None
    """Model calls."""
    tokens: Annotated[int, Meta(ge=0)] | None = None
    """Input and output together."""
    cost: Annotated[float, Meta(ge=0)] | None = None
    """In the currency of the model's prices, which it must have."""
    timeout: float | None = None
    """Seconds."""


class TaskFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys of `task.toml`, but for its checks."""

    prompt: str = ""
    description: str = ""
    """For people."""
    commit: str = ""
    """A git commit that the workspace starts from, in place of `files/`."""
    repository: str = ""
    """The folder, relative to the task's, or the address of the repository that has the commit."""
    setup: list[str] = msgspec.field(default_factory=list[str])
    """Commands of the shell that prepare the workspace."""
    limits: Limits = msgspec.field(default_factory=Limits)


class TaskLine(TaskFile, forbid_unknown_fields=True, kw_only=True):
    """The keys of a task that is a JSON line, but for its checks."""

    id: str | int = ""
    """By default the number of the line."""
    files: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """The texts of the files that the workspace starts with, by their paths."""
    solution: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    answer: str = ""
    """The answer of the reference solution."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work for an agent, and how it is checked."""

    id: str
    source: str
    """The file that defines it, for messages."""
    prompt: str
    checks: Sequence[Check]
    settings: TaskFile
    folder: Path
    """The folder of the task, or of the file of JSON lines."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """The files that it starts with, in addition to those in the folder `files`."""
    solution: Mapping[str, str] = field(default_factory=dict[str, str])
    answer: str = ""
    """The answer of the reference solution."""
    has_folder: bool = True
    """True if it has a folder of its own, with `files` and `solution`."""
    digest: str = ""
    """A hash of all that defines it."""

    @property
    def has_solution(self) -> bool:
        """True if it has a reference solution."""
        return bool((self.has_folder and (self.folder / "solution").is_dir()) or self.solution or self.answer)

    @property
    def limits(self) -> Limits:
        """The most that a run may take."""
        return self.settings.limits

    def find_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the result; None if it is a text."""
        schema = next((check.schema for check in self.checks if isinstance(check, SchemaCheck)), None)
        return load_schema(self.folder / schema, self.source) if isinstance(schema, str) else schema


def describe_check(check: Check) -> str:
    """Make the name of a check: its own, or one of its kind and what it looks at."""
    if check.name:
        return check.name
    match check:
        case CommandCheck():
            return f"command: {check.run if isinstance(check.run, str) else ' '.join(check.run)}"
        case FileCheck():
            return f"file: {check.path} {' '.join(list_rules(check))}"
        case AnswerCheck():
            return f"answer {' '.join(list_rules(check))}"
        case PythonCheck():
            return f"python: {check.function}"
        case SchemaCheck():
            return "schema"
        case JudgeCheck():
            return f"judge: {check.question}"


def list_rules(check: FileCheck | AnswerCheck) -> list[str]:
    """List the keys that say how a check looks."""
    rules = ("exists", "absent", "equals", "contains", "matches")
    return [rule for rule in rules if getattr(check, rule, None) is not None]


def find_dataset(target: str) -> str:
    """Return what names a dataset from any folder: its absolute path, or the name of a suite."""
    path = Path(target).expanduser()
    return target if not path.exists() and target in list_suites() else str(path.absolute())


def list_suites() -> dict[str, Path]:
    """List the suites that are shipped: their folders and files, by their names."""
    return {path.stem: path for path in sorted(SUITES.glob("*")) if path.is_dir() or path.suffix == ".jsonl"}


def load_dataset(target: str) -> list[Task]:
    """Load the tasks of a dataset. Raises ConfigError, which names the file and the key of the first fault."""
    path = Path(find_dataset(target))
    path = path if path.is_absolute() else list_suites()[target]
    if path.is_file():
        tasks = [*load_lines(path)]
    elif (path / "task.toml").is_file():
        tasks = [load_folder(path)]
    elif path.is_dir():
        tasks = [load_folder(folder) for folder in sorted(path.iterdir()) if folder.is_dir() and is_task(folder)]
    else:
        shipped = ", ".join(list_suites()) or "none"
        raise ConfigError(f"There is no dataset {target}: no such file or folder. Shipped suites: {shipped}.")
    if not tasks:
        raise ConfigError(f"{path} has no tasks. A task is a folder with task.toml, or a line of a .jsonl file.")
    return tasks


def is_task(folder: Path) -> bool:
    """Tell whether a folder of a dataset is a task: names that begin with `.` or `_` are not. Raises ConfigError."""
    if folder.name[0] in "._":
        return False
    if not (folder / "task.toml").is_file():
        raise ConfigError(f"{folder} has no task.toml. Write one, or begin the folder's name with _ to leave it out.")
    return True


def load_folder(folder: Path) -> Task:
    """Load the task of a folder. Raises ConfigError."""
    file = folder / "task.toml"
    text = read_text(file)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error
    checks = parse_checks(data.pop("checks", []), str(file), folder)
    settings = convert(data, TaskFile, file, text)
    prompt_file, answer_file = folder / "prompt.md", folder / "solution" / "answer.txt"
    if settings.prompt and prompt_file.is_file():
        raise ConfigError(f"{file} prompt: {prompt_file} is there, too. Keep one of them.")
    prompt = settings.prompt or (read_text(prompt_file) if prompt_file.is_file() else "")
    return check_task(
        Task(
            id=folder.name,
            source=str(file),
            prompt=prompt,
            checks=checks,
            settings=settings,
            folder=folder,
            answer=read_text(answer_file) if answer_file.is_file() else "",
            digest=make_digest(folder),
        )
    )


def load_lines(path: Path) -> Iterator[Task]:
    """Load the tasks of a file of JSON lines. Raises ConfigError."""
    known: dict[str, int] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}.") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{where} is no JSON object.")
        given = cast("dict[str, Any]", data)
        checks = parse_checks(given.pop("checks", []), where, path.parent)
        if fault := find_fault(given, TaskLine):
            raise ConfigError(f"{where}, {'.'.join(fault.keys) or 'task'}: {fault.sentence}.")
        settings = msgspec.convert(given, TaskLine)
        id = str(settings.id if settings.id != "" else number)
        if (first := known.setdefault(id, number)) != number:
            raise ConfigError(f"{path}: lines {first} and {number} have the same id, {id}. Give each one of its own.")
        yield check_task(
            Task(
                id=id,
                source=where,
                prompt=settings.prompt,
                checks=checks,
                settings=settings,
                folder=path.parent,
                files=settings.files,
                solution=settings.solution,
                answer=settings.answer,
                has_folder=False,
                digest=sha256(line.encode()).hexdigest()[:16],
            )
        )


def check_task(task: Task) -> Task:
    """Return the task. Raises ConfigError if it cannot be run."""
    if not task.prompt.strip():
        raise ConfigError(f"{task.source} prompt: it is missing or empty. Give one, or a file prompt.md beside it.")
    if not task.checks:
        raise ConfigError(f"{task.source} checks: there are none. Add a table [[checks]].")
    if task.settings.commit and task.has_folder and (task.folder / "files").is_dir():
        raise ConfigError(f"{task.source} commit: the folder files is there, too. Keep one of them.")
    if task.settings.repository and not task.settings.commit:
        raise ConfigError(f"{task.source} repository: the key commit is missing.")
    for path in (*task.files, *task.solution):
        if not is_inside(path):
            raise ConfigError(f"{task.source} files: {path!r} leads out of the workspace.")
    if len([check for check in task.checks if isinstance(check, SchemaCheck)]) > 1:
        raise ConfigError(f"{task.source} checks: a task has one check of the kind schema at most.")
    return task


def parse_checks(given: Any, source: str, folder: Path) -> list[Check]:
    """Convert the checks of a task. Raises ConfigError, which names the key of a fault."""
    if not isinstance(given, list):
        raise ConfigError(f"{source} checks: write each as a table [[checks]].")
    checks: list[Check] = []
    for number, data in enumerate(cast("list[Any]", given), 1):
        where = f"{source} checks[{number}]"
        fields = {**cast("dict[str, Any]", data)} if isinstance(data, dict) else {}
        kind = fields.pop("kind", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ConfigError(f"{where}.kind: {kind!r} is none. Give one of: {', '.join(KINDS)}.")
        if fault := find_fault(fields, KINDS[kind]):
            raise ConfigError(f"{'.'.join([where, *fault.keys])}: {fault.sentence}.")
        check = msgspec.convert(fields, KINDS[kind])
        if sentence := find_check_fault(check, folder):
            raise ConfigError(f"{where}.{sentence}")
        checks.append(check)
    return checks


def find_check_fault(check: Check, folder: Path) -> str:
    """Return the key of a check that cannot be used, and why not; "" if it can be used."""
    for rule in ("matches",):
        try:
            re.compile(getattr(check, rule, None) or "")
        except re.error as error:
            return f"{rule}: it is no regular expression: {error}."
    match check:
        case FileCheck():
            if not is_inside(check.path):
                return f"path: {check.path!r} leads out of the workspace."
            if False in (check.exists, check.absent):
                return "exists: write exists = true or absent = true."
            if len(list_rules(check)) != 1:
                return "path: give one of exists, absent, equals, contains, matches with it."
        case AnswerCheck() if len(list_rules(check)) != 1:
            return "kind: give one of contains, matches with it."
        case PythonCheck():
            file, mark, name = check.function.rpartition(":")
            if not mark or not name.isidentifier() or not is_inside(file):
                return f"function: {check.function!r} is not FILE:NAME, such as checks.py:check."
            if not (folder / file).is_file():
                return f"function: there is no file {folder / file}."
            if not re.search(rf"(?m)^(async +)?def +{name}\b|^{name}\b *=", read_text(folder / file)):
                return f"function: {folder / file} defines no {name}."
        case SchemaCheck():
            try:
                schema = check.schema
                check_schema(load_schema(folder / schema, "") if isinstance(schema, str) else {**schema})
            except (ValueError, ConfigError) as error:
                return f"schema: {str(error).strip().rstrip('.')}."
        case JudgeCheck():
            if not PASS_RULE.fullmatch(check.passes):
                return f"pass: {check.passes!r} is no rule. Give yes, no, or a comparison such as >= 7."
            if check.prompt and not (folder / check.prompt).is_file():
                return f"prompt: there is no file {folder / check.prompt}."
        case _:
            pass
    return ""


def load_schema(file: Path, source: str) -> dict[str, Any]:
    """Load a JSON schema from a file. Raises ConfigError."""
    try:
        schema = json.loads(read_text(file))
    except ValueError as error:
        raise ConfigError(f"{source} {file} is not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{source} {file} is no JSON schema, which is an object.")
    return cast("dict[str, Any]", schema)


def convert(data: Any, kind: type[T], path: Path, text: str) -> T:
    """Convert parsed TOML. Raises ConfigError, which names the file, the line and the key."""
    if fault := find_fault(data, kind):
        raise to_config_error(path, text, Fault(fault.keys, fault.sentence))
    return msgspec.convert(data, kind)


def read_text(path: Path) -> str:
    """Read a text of a task. Raises ConfigError."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise to_read_error(path, error) from error


def is_inside(path: str) -> bool:
    """Tell whether a path of a task stays in its folder."""
    return bool(path) and not Path(path).is_absolute() and ".." not in Path(path).parts


def make_digest(folder: Path) -> str:
    """Make a hash of all files of a task's folder."""
    digest = sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            for part in (str(path.relative_to(folder)).encode("utf-8", "surrogateescape"), path.read_bytes()):
                digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]
