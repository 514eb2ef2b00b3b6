"""Permission rules: what the configuration allows, asks about and denies.

A rule is `TOOL` or `TOOL:PATTERN`. Both are shell patterns (`*`, `?`, `[…]`). The pattern is matched against the
subject of a tool call. This is the command of `terminal`, the URL of `fetch`, the URI of a resource, or the path of a
tool that reads, edits or searches files. For another tool, it is all arguments. Deny beats ask, and ask beats allow.

A wildcard of a rule that allows commands ends where the name of a program or a subcommand ends: `git diff*` allows
`git diff` with any operands, not `git difftool`. Options that the rule does not write out itself are allowed by
programs.toml.

The tools of an MCP server are called `SERVER_TOOL`, and reading its resources is `SERVER_mcp_resources`, so `SERVER_*`
covers all that a server can be asked.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal

from crow_system import IGNORES_CASE, WINDOWS

if TYPE_CHECKING:
    from crow_permissions.compositions import SimpleCommand
    from crow_permissions.programs import Usage

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
WILDCARD = re.compile(r"[*?\[]")
PIECE = re.compile(r"(\s+)|([*?])|(\[!?[^\]]+\])|([^*?\[\s]+|\[)")
"""A piece of a pattern: blanks, a wildcard, a set of characters, or text."""
END = r"(?:[ \t\n].*)?"
"""The end of a name, and whatever follows."""
NAME = re.compile(r"[\w.][\w.:@+-]*")
"""A word of a pattern that may name a subcommand, or what it runs."""


@dataclass(frozen=True)
class Rule:
    """One rule of the configuration."""

    tool: str
    pattern: str | None
    """None matches every call of the tool."""

    def covers(self, tool: str) -> bool:
        """True if it is about a tool."""
        return fnmatchcase(tool, self.tool)

    def matches(self, tool: str, subject: str) -> bool:
        return self.covers(tool) and (self.pattern is None or fnmatchcase(subject, self.pattern))

    def matches_any(self, tool: str, subjects: Sequence[str], *, ignores_case: bool = IGNORES_CASE) -> bool:
        """Test whether the rule, which denies or asks, matches a call whose subject can be written in these forms.

        A path matches whatever the case of its letters. On any system a folder may ignore case, such as a drive of
        Windows that Linux has mounted. A command does so where the system `ignores_case`.
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

    @property
    def is_open(self) -> bool:
        """True if the rule has a pattern for more than one text."""
        return self.pattern is not None and not set("*?[").isdisjoint(self.pattern)

    def allows_text(self, tool: str, subject: str) -> bool:
        """Test whether the rule, which allows, matches a call by its text."""
        if self.pattern is None or tool != COMMAND_TOOL or not self.covers(tool):
            return self.matches(tool, subject)
        return to_regex(self.pattern).fullmatch(subject) is not None

    def names(self, tool: str, command: "SimpleCommand") -> bool:
        """Test whether the allowing rule matches, by its text, a simple command with quotes or inside a longer command
        line.

        A rule that begins with a wildcard does not: it names no program.
        """
        if self.pattern is None or self.pattern[:1] in ("", *"*?["):
            return False
        return self.allows_text(tool, command.text) and self.allows_text(tool, command.masked_text)

    def read_usage(self, words: Sequence[str]) -> "Usage":
        """Read the arguments of a command that the rule matches by its text."""
        # Imported where commands are judged: it takes 5 % of the start-up time, which only parses rules.
        from crow_permissions.programs import Usage, read_usage

        return read_usage(words, count_literal_words(self.pattern)) if self.is_open and self.pattern else Usage()

    @property
    def names_a_path(self) -> bool:
        """True if its pattern has a relative path, so that it means another file in each folder."""
        first, *others = (self.pattern or "").split() or [""]
        return ("/" in first and first[0] != "/") or any(word[0] != "/" and {"/", "."} & {*word} for word in others)

    def __str__(self) -> str:
        return self.tool if self.pattern is None else f"{self.tool}:{self.pattern}"


@cache
def to_regex(pattern: str) -> re.Pattern[str]:
    """Convert the pattern of a rule that allows commands. A wildcard in a name matches no blank and no slash."""
    names = 0 if pattern.startswith("*") else count_names(pattern)
    regex, index = "", 0
    for piece in PIECE.finditer(pattern):
        blank, wildcard, brackets, text = piece.groups()
        if blank:
            index += 1
            regex += re.escape(blank)
        elif wildcard == "*":
            regex += ".*" if index >= names else END if ends_name(pattern, piece.start()) else "[^ \t\n/]*"
        elif wildcard:
            regex += "." if index >= names else "[^ \t\n/]"
        elif brackets:
            inside = re.escape(brackets[1:-1].removeprefix("!")).replace("\\-", "-")
            regex += f"[{'^' if brackets[1] == '!' else ''}{inside}]"
        else:
            regex += re.escape(text)
    return re.compile(regex, re.DOTALL)


def ends_name(pattern: str, at: int) -> bool:
    """Test whether a wildcard stands at the end of a word that is a whole name, such as `git diff*`."""
    return pattern[at - 1 : at].isalnum() and pattern[at + 1 : at + 2].strip() == ""


def count_names(pattern: str) -> int:
    """Count the words at the beginning of a pattern that name a program, its subcommand, or what it runs."""
    words = pattern.split()
    plain = [WILDCARD.split(word)[0] for word in words]
    count = 1
    while count < len(words) and takes_name(words[:count], plain[count]):
        if count > 1 and plain[count - 1] != words[count - 1]:
            break
        count += 1
    return count


def takes_name(words: Sequence[str], following: str) -> bool:
    """Test whether the word that follows these may name a subcommand, or what they run."""
    from crow_permissions.programs import find_name, has_subcommands, load_programs  # see above

    name = find_name(words)
    program = load_programs().get(name)
    if f"{name} {following}" in load_programs():
        return True
    if program is None or has_subcommands(name):
        return NAME.fullmatch(following) is not None
    if program.entry.runs:
        rest = words[len(name.split()) :]
        return takes_name(rest, following) if rest else NAME.fullmatch(following) is not None
    return program.entry.names and NAME.fullmatch(following) is not None


@cache
def count_literal_words(pattern: str) -> int:
    """Count the words at the beginning of a pattern without a wildcard, or with one after a whole name or after `=`."""
    words = pattern.split()
    count = next((index for index, word in enumerate(words) if WILDCARD.search(word)), len(words))
    if count == len(words):
        return count
    name, wildcard, rest = words[count].partition("*")
    is_whole = count < count_names(pattern) and bool(wildcard) and not rest and name[-1:].isalnum()
    is_option = name.startswith("-") and name.endswith("=") and not WILDCARD.search(name)
    return count + (is_whole or is_option)


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

    @property
    def has_strict(self) -> bool:
        """True if there are rules that deny or ask."""
        return bool(self.deny or self.ask)

    def find(self, tool: str, subject: str, spellings: Sequence[str], *, simple: bool) -> tuple[Verdict, Rule] | None:
        """Find the rule that decides a call, and its verdict; None if no rule matches.

        `spellings` are further forms of the subject; they are compared with deny and ask rules only. A call that is not
        `simple` is allowed only by a rule without a pattern. A rule with a wildcard allows no word of a command that is
        not listed in programs.toml.
        """
        forms = [subject, *spellings]
        for rule in self.deny:
            if rule.matches_any(tool, forms):
                return "deny", rule
        for rule in self.ask:
            if rule.matches_any(tool, forms):
                return "ask", rule
        for rule in self.allow:
            if (simple or rule.pattern is None) and rule.allows_text(tool, subject):
                if tool == COMMAND_TOOL and rule.read_usage(subject.split()).unlisted:
                    continue
                return "allow", rule
        return None

    def find_for_command(self, tool: str, command: "SimpleCommand", *, is_elsewhere: bool) -> Rule | None:
        """Find the rule that allows a simple command of a command line.

        A rule that names a relative path holds in the working directory alone, not where the line runs `is_elsewhere`.
        """
        here = (rule for rule in self.allow if not (is_elsewhere and rule.names_a_path))
        named = (rule for rule in here if rule.names(tool, command))
        return next((rule for rule in named if not rule.read_usage(command.words).unlisted), None)

    def find_unlisted(self, tool: str, command: "SimpleCommand") -> tuple[Rule, str] | None:
        """Find a rule that would allow a simple command but for a word that is not listed, and this word."""
        for rule in self.allow:
            if rule.names(tool, command) and (unlisted := rule.read_usage(command.words).unlisted):
                return rule, unlisted
        return None

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
