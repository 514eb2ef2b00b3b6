"""The hosts that commands may reach, as rules, and the hosts that they ask for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address

from crow_system.addresses import is_public

from crow_sandbox.policy import SandboxError

WEB_PORTS = (80, 443)
LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # as the last label: an IPv4 address in any spelling
MAX_NAME = 253


def parse_host(text: str) -> str:
    """Return a host name in lower case, or an IP address in its one spelling. Raises ValueError for any other text.

    Names are ASCII: a client that asks for another sends its IDNA form.
    """
    if ":" in text:
        if "%" in text:
            raise ValueError("an address with a zone")
        return str(IPv6Address(text))
    name = text.lower()
    if not text.isascii() or len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise ValueError("not a host name")
    if NUMBER.fullmatch(name.rpartition(".")[2]) and str(IPv4Address(name)) != name:
        raise ValueError("an unusual spelling of an address")
    return name


def parse_authority(text: str, port: int | None = None) -> tuple[str, int]:
    """Parse HOST:PORT, with an IPv6 address in brackets. Raises ValueError, also without a port if none is given."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@]+))(?::([0-9]{1,5}))?", text, re.ASCII)
    if not found:
        raise ValueError("not HOST:PORT")
    digits = found[3] or (str(port) if port else "")
    if not digits or not 0 < int(digits) < 65536:
        raise ValueError("no port")
    if found[1] and ":" not in found[1]:
        raise ValueError("not an IPv6 address")
    return parse_host(found[1] or found[2]), int(digits)


def format_authority(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class HostRule:
    """A host, or all hosts below a domain, with one port, or with those of the web."""

    host: str
    port: int | None = None
    below: bool = False
    """True if the rule is for the hosts below `host`, and not for itself."""

    def matches(self, host: str, port: int) -> bool:
        """True if the rule allows a host and port."""
        if port not in ((self.port,) if self.port else WEB_PORTS):
            return False
        return host.endswith(f".{self.host}") and not is_address(host) if self.below else host == self.host


def is_address(host: str) -> bool:
    """True if a host, as `parse_host` returns it, is an IP address."""
    return ":" in host or host.rpartition(".")[2].isdigit()


def parse_rule(pattern: str) -> HostRule:
    """Parse a pattern such as `pypi.org`, `*.example.com`, `example.com:8443`, `10.0.0.1`. Raises SandboxError."""
    text, below = pattern.strip().removeprefix("*."), pattern.strip().startswith("*.")
    try:
        if text.count(":") > 1 and not text.startswith("["):
            text = f"[{text}]"
        if not text.isascii():
            name, colon, port = text.partition(":")
            text = name.encode("idna").decode() + colon + port
        named = bool(re.search(r":[0-9]+$", text if not text.startswith("[") else text.partition("]")[2]))
        host, number = parse_authority(text, None if named else WEB_PORTS[0])
        if below and is_address(host):
            raise ValueError("a domain of numbers")
    except ValueError:
        raise SandboxError(
            f"{pattern!r} is not a pattern of hosts. Write a name (pypi.org), a domain (*.example.com) or an address "
            "(10.0.0.1), and behind a colon the port, if it is neither 80 nor 443."
        ) from None
    return HostRule(host, number if named else None, below)


def names_host(patterns: Iterable[str], host: str, port: int) -> bool:
    """True if one of these shell patterns names a host, or a host with its port."""
    names = host, format_authority(host, port)
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


class HostRules:
    """The hosts that a command may reach."""

    def __init__(self, patterns: Iterable[str] = (), denied: Sequence[str] = (), addresses: Iterable[str] = ()) -> None:
        """As `hosts`, `denied` and `addresses` of a policy. Raises SandboxError if a pattern is none."""
        self._rules = {pattern: parse_rule(pattern) for pattern in patterns}
        self._denied = denied
        self._addresses = [parse_rule(pattern) for pattern in addresses]

    def add(self, pattern: str) -> None:
        """Allow what a pattern names. Raises SandboxError if it is none."""
        self._rules[pattern] = parse_rule(pattern)

    def change(self, patterns: Iterable[str], denied: Sequence[str]) -> None:
        """Allow what these patterns name, and nothing else. Raises SandboxError if one is none."""
        self._rules, self._denied = {pattern: parse_rule(pattern) for pattern in patterns}, denied

    def allow(self, host: str, port: int) -> bool:
        """True if a host may be asked for."""
        found = any(rule.matches(host, port) for rule in self._rules.values())
        return found and not names_host(self._denied, host, port)

    def allow_address(self, address: str, port: int) -> bool:
        """True if an address of an allowed host may be connected to: it is public, or itself named by a rule."""
        return (is_public(address) and not names_host(self._denied, address, port)) or self.name_address(address, port)

    def name_address(self, address: str, port: int) -> bool:
        """True if a rule names this address itself, so that it need not be public."""
        named = [rule for rule in (*self._rules.values(), *self._addresses) if not rule.below]
        return any(rule.matches(address, port) for rule in named) and not names_host(self._denied, address, port)
