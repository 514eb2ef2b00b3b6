"""Answers of the user that last: the rule that each stores, and their file in crow's data.

A rule never is a pattern. `list_covering_rules` in `lasting.py` lists all rules that cover a tool call, and an answer
counts if its rule is one of these.

The file is written only by crow's own commands and by a client's answer to a question, and is never inside a project. A
file that cannot be read, or that others may write, holds no answers: each question is asked again.
"""

import hashlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import crow_system as system
import msgspec
from crow_core.errors import ConfigError
from crow_core.text import to_line
from crow_system.files import make_private_folder
from crow_system.shortening import leave_out

Scope = Literal["session", "folder", "always"]

FILE = "answers.json"
TEXT_LIMIT = 200
"""Characters of a rule that are shown on a line."""


class AnswerRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule of an answer: all that the answer covers."""

    kind: Literal["command", "subcommand", "changes", "arguments", "host", "reach", "path", "edits", "tool"]
    """`command`: one command, as it is written; `changes`: its changes, after it has run in the sandbox. `subcommand`:
    a program with its subcommand, and any arguments; `arguments`: a call with exactly these arguments. `host`: a host
    of `fetch`; `reach`: hosts that commands in the sandbox reach. `path`: changes to one file; `edits`: changes to all
    files that are not protected; `tool`: all calls of a tool."""
    tool: str
    value: str
    """The command, the program and its subcommand, the arguments in JSON, or the host and port. For the other kinds:
    the hosts with a comma between them, the absolute path, or the kind of the calls of a tool."""
    digest: str = ""
    """A digest of the tool's definition and of the program or address of its server; "" for a tool of crow's own."""

    def __str__(self) -> str:
        """The rule in words, on one line, whole."""
        texts = {
            "command": self.value,
            "subcommand": f"{self.value} …",
            "changes": f"what {self.value} changes",
            "arguments": f"{self.tool} with {self.value}",
            "host": f"{self.tool} from {self.value}",
            "reach": f"commands reach {self.value}",
            "path": f"changes to {self.value}",
            "edits": "changes to files here",
            "tool": f"{self.tool} (definition {self.digest[:8]})" if self.digest else self.tool,
        }
        return to_line(texts[self.kind])

    def describe(self) -> str:
        """Describe the rule on a line of limited length."""
        return leave_out(str(self), TEXT_LIMIT, space=" ")


class KeptAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer that lasts."""

    allows: bool
    rule: AnswerRule
    scope: Scope = "session"
    folder: str = ""
    """For the scope `folder`: its path, with symbolic links resolved."""
    since: float = 0.0
    """The time of the answer, in seconds since 1970."""

    @property
    def id(self) -> str:
        """An id that follows from the rule and the folder."""
        return hashlib.sha256(msgspec.json.encode((self.rule, self.folder))).hexdigest()[:8]

    @property
    def place(self) -> str:
        """The scope in words."""
        return {"session": "for this session", "folder": f"in {to_line(self.folder)}", "always": "in all folders"}[
            self.scope
        ]

    def __str__(self) -> str:
        return f"{'allow' if self.allows else 'reject'} {self.place}: {self.rule.describe()}"


class AnswersFile(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file."""

    version: Literal[1] = 1
    answers: list[KeptAnswer] = []


def find_answer(answers: Sequence[KeptAnswer], rules: Sequence[AnswerRule], folder: str = "") -> KeptAnswer | None:
    """Find the answer that decides a call which these rules cover, in a folder. A rejection beats a permission."""
    fitting = [each for each in answers if each.rule in rules and each.folder in ("", folder)]
    return next((each for each in fitting if not each.allows), fitting[0] if fitting else None)


class KeptAnswers:
    """The answers that last longer than a session. Several processes may use the file at the same time."""

    def __init__(self, data: Path) -> None:
        self.file = data / FILE
        self.fault = ""
        """The reason why the file is not used, as a sentence; "" if it is, or if there is none."""
        self._answers: list[KeptAnswer] = []
        self._state: tuple[int, ...] | None = None
        """The state of the file when it was read; None if there was none."""

    def list_all(self) -> Sequence[KeptAnswer]:
        """List the answers; the file is read again after it has changed."""
        try:
            state = get_state(os.stat(self.file))
        except FileNotFoundError:
            self._answers, self._state, self.fault = [], None, ""
            return self._answers
        except OSError as error:
            self._answers, self._state, self.fault = [], None, self._to_fault(str(error.strerror))
            return self._answers
        if state != self._state:
            self._answers, self.fault = [], ""
            try:
                self._answers = self.read()
            except ConfigError as error:
                self.fault = str(error)
            self._state = state
        return self._answers

    def read(self) -> list[KeptAnswer]:
        """Read the file. Raises ConfigError if it cannot be used."""
        try:
            with open(self.file, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_uid not in (system.get_user(), 0) or system.get_mode(found) & 0o022:
                    raise ConfigError(self._to_fault("others may write it: chmod 600"))
                answers = msgspec.json.decode(file.read(), type=AnswersFile).answers
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(self._to_fault(str(error.strerror))) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(self._to_fault(to_line(str(error)))) from error
        for each in answers:
            if each.scope == "session" or (each.scope == "folder") != bool(each.folder):
                raise ConfigError(self._to_fault(f"the answer to {each.rule.describe()} has no folder that fits"))
        return answers

    def _to_fault(self, reason: str) -> str:
        return f"No kept answer is used, as {self.file} cannot be read ({reason}). Correct or remove it."

    def add(self, answer: KeptAnswer) -> None:
        """Keep an answer, in place of an earlier one to the same. Raises ConfigError, OSError."""
        self._change(lambda answers: [*(each for each in answers if each.id != answer.id), answer])

    def remove(self, ids: Sequence[str]) -> None:
        """Remove answers. Raises ConfigError, OSError."""
        self._change(lambda answers: [each for each in answers if each.id not in ids])

    def _change(self, change: Callable[[list[KeptAnswer]], list[KeptAnswer]]) -> None:
        """Write the file anew, alone among all processes; a file that cannot be used is left as it is."""
        make_private_folder(self.file.parent)
        with hold_lock(self.file.with_suffix(".lock")):
            content = AnswersFile(answers=change(self.read()))
            new = self.file.with_suffix(f".{os.getpid()}.tmp")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.NO_LINKS, 0o600)
            with open(descriptor, "wb") as file:
                system.set_mode(descriptor, 0o600)
                file.write(msgspec.json.format(msgspec.json.encode(content)))
                file.flush()
                os.fsync(descriptor)
            system.replace_file(new, self.file)


def get_state(found: os.stat_result) -> tuple[int, ...]:
    """Return what differs after a file has changed."""
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid


@contextmanager
def hold_lock(path: Path) -> Generator[None]:
    """Context manager: wait for a lock that one process at a time holds. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | system.NO_LINKS, 0o600)
    try:
        system.lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def now() -> float:
    """Return the time for `KeptAnswer.since`."""
    return float(int(time.time()))
