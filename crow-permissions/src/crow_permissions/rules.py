"""Permission rules: what the configuration allows, asks about and denies.

A rule is `TOOL` or `TOOL:PATTERN`. Both are shell patterns (`*`, `?`, `[…]`). The pattern is matched against the
subject of a tool call: the command of `terminal`, the path of a tool that reads, edits or searches files, the URL of
`fetch`, the URI of a resource, or all arguments of another tool. Deny beats ask, and ask beats allow.

The tools of an MCP server are called `SERVER_TOOL`, and reading its resources is `SERVER_mcp_resources`, so `SERVER_*`
covers all that a server can be asked.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from crow_system import IGNORES_CASE, WINDOWS

from crow_permissions.compositions import Composition, SimpleCommand

Verdict = Literal["allow", "ask", "deny"]

TOOL_NAME = re.compile(r"[\w*?\[\]!-]+")
"""The name of a tool, or a pattern of names."""
COMMAND_TOOL = "terminal"
PATH_TOOLS = {"file_editor", "grep", "glob", "tree"}
"""Tools whose subject is a path."""
RELATIVE_START = re.compile(r"\.\.?/|~")
"""The beginning of a path as no subject is written."""
OPERATOR = re.compile(r"(^|\s)(&&|\|\|?|;|&|>>?|<)(\s|$)|\$\(|`|;\s|;$")
"""An operator of the shell in a pattern."""


@dataclass(frozen=True)
class Rule:
    """One rule of the configuration."""

    tool: str
    pattern: str | None
    """None matches every call of the tool."""

    def covers(self, tool: str) -> bool:
        """Whether it is about a tool."""
        return fnmatchcase(tool, self.tool)

    def matches(self, tool: str, subject: str) -> bool:
        return self.covers(tool) and (self.pattern is None or fnmatchcase(subject, self.pattern))

    def matches_any(self, tool: str, subjects: Sequence[str], *, ignores_case: bool = IGNORES_CASE) -> bool:
        """Test whether the rule, which denies or asks, matches a call whose subject can be written in these forms.

        A path matches whatever the case of its letters: on any system a folder may take two cases for one file, such
        as a drive of Windows that Linux has mounted. A command does so where the system `ignores_case`.
        """
        ignore_case = ignores_case or tool != COMMAND_TOOL
        if not self.covers(tool) or self.pattern is None:
            return self.covers(tool)
        patterns = (self.pattern, self.pattern.lower()) if ignore_case else (self.pattern,)
        return any(
            fnmatchcase(subject, pattern) or (ignore_case and fnmatchcase(subject.lower(), pattern))
            for subject in subjects
            for pattern in patterns
        )

    def allows(self, tool: str, command: SimpleCommand) -> bool:
        """Test whether it allows a simple command that is part of a longer command line, or that has quotes.

        A rule that begins with a wildcard does not: it names no program.
        """
        if self.pattern is None or self.pattern[:1] in ("", *"*?["):
            return False
        return self.matches(tool, command.text) and self.matches(tool, command.masked_text)

    @property
    def names_a_path(self) -> bool:
        """True if its pattern has a relative path, so that it means another file in each folder."""
        first, *others = (self.pattern or "").split() or [""]
        return ("/" in first and first[0] != "/") or any(word[0] != "/" and {"/", "."} & {*word} for word in others)

    def __str__(self) -> str:
        return self.tool if self.pattern is None else f"{self.tool}:{self.pattern}"


def parse_rule(text: str, *, allows: bool = False, windows: bool = WINDOWS) -> Rule:
    """Parse a rule, also one that `allows`.

    Raises ValueError for one that could never match, as it would only seem to forbid or to allow something.
    """
    tool, colon, pattern = (part.strip() for part in text.partition(":"))
    if not TOOL_NAME.fullmatch(tool):
        raise ValueError(f"{text!r} is no rule: write TOOL or TOOL:PATTERN, such as 'terminal:rm *'")
    if not colon:
        return Rule(tool, None)
    if not pattern:
        raise ValueError(f"{text!r} can never match: its pattern is empty. Write {tool!r} for all calls")
    if (tool in PATH_TOOLS or "*" in tool) and (start := RELATIVE_START.match(pattern)):
        how = "without './'" if start[0] == "./" else "from the root of the file system"
        raise ValueError(f"{text!r} can never match: write the path {how}")
    if windows and tool in PATH_TOOLS and "\\" in pattern:
        raise ValueError(f"{text!r} can never match: write the path with '/'")
    if allows and tool == COMMAND_TOOL and (operator := OPERATOR.search(pattern)):
        how = f"the commands around {operator[0].strip()!r} are compared one by one. Write a rule for each"
        raise ValueError(f"{text!r} can never match: {how}")
    return Rule(tool, pattern)


def parse_rules(texts: Sequence[str], *, allows: bool = False) -> list[Rule]:
    """Parse several rules. Raises ValueError."""
    return [parse_rule(text, allows=allows) for text in texts]


def suggest_tool(rule: Rule, tools: Collection[str]) -> str:
    """Find the tool that a rule probably means, if there is none of its name; "" if that is not known."""
    if rule.tool in tools or set(rule.tool) & set("*?["):
        return ""
    import difflib  # imported here: only a rule for a tool that is not known needs it

    return next(iter(difflib.get_close_matches(rule.tool, sorted(tools), 1, 0.8)), "")


@dataclass
class Rules:
    """The rules of one session."""

    allow: list[Rule] = field(default_factory=list[Rule])
    ask: list[Rule] = field(default_factory=list[Rule])
    deny: list[Rule] = field(default_factory=list[Rule])

    def find(self, tool: str, subject: str, spellings: Sequence[str], *, simple: bool) -> tuple[Verdict, Rule] | None:
        """Find the rule that decides a call, and its verdict; None if no rule matches.

        `spellings` are further forms of the subject; they are compared with deny and ask rules only. A call that is not
        `simple` is allowed only by a rule without a pattern.
        """
        forms = [subject, *spellings]
        for rule in self.deny:
            if rule.matches_any(tool, forms):
                return "deny", rule
        for rule in self.ask:
            if rule.matches_any(tool, forms):
                return "ask", rule
        for rule in self.allow:
            if rule.matches(tool, subject) and (simple or rule.pattern is None):
                return "allow", rule
        return None

    def find_for_composition(self, tool: str, composition: Composition, *, is_elsewhere: bool) -> list[Rule] | None:
        """Find the rules that together allow all commands of a command line; None if they do not.

        A rule that names a relative path holds in the working directory alone, not where the line runs `is_elsewhere`.
        """
        allowing = [rule for rule in self.allow if not (is_elsewhere and rule.names_a_path)]
        found: dict[Rule, None] = {}
        for command in composition.commands:
            rule = next((rule for rule in allowing if rule.allows(tool, command)), None)
            if rule is None:
                return None
            found[rule] = None
        return list(found)

    def find_for_file(self, tool: str, forms: Sequence[str], *, writes: bool) -> tuple[Verdict, Rule] | None:
        """Find the rule that denies or asks about a file that a command reads or writes, as a call of `tool` would."""
        strict: list[tuple[Verdict, Rule]] = [
            *(("deny", rule) for rule in self.deny),
            *(("ask", rule) for rule in self.ask),
        ]
        for verdict, rule in strict:
            if (rule.pattern is not None or writes) and rule.matches_any(tool, forms):
                return verdict, rule
        return None
