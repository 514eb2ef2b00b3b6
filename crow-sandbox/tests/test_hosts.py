"""Which hosts commands may reach: patterns, names and addresses in all spellings."""

from collections.abc import Callable

import pytest
from crow_sandbox.hosts import HostRules, parse_authority, parse_host
from crow_sandbox.policy import SandboxError

RULES = HostRules(
    [
        *(
            "pypi.org",
            "*.example.com",
            "git.example.net:22",
            "xn--bcher-kva.example",
            "käse.example",
            "Files.Example.ORG",
        ),
        *("10.1.2.3", "127.0.0.1:8080", "[fd00::1]:8443", "fd00::2"),
    ]
)


def parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 443),
        ("pypi.org", 80),
        ("PyPI.org", 443),
        ("a.example.com", 443),
        ("a.b.example.com", 443),
        ("git.example.net", 22),
        ("xn--bcher-kva.example", 443),
        ("xn--kse-qla.example", 443),
        ("files.example.org", 443),
        ("10.1.2.3", 80),
        ("127.0.0.1", 8080),
        ("fd00::1", 8443),
        ("FD00:0::0002", 443),
    ],
)
def test_listed_host_is_allowed(host: str, port: int):
    assert RULES.allow(parse_host(host), port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 22),
        ("pypi.org", 8443),
        ("evilpypi.org", 443),
        ("pypi.org.evil.net", 443),
        ("www.pypi.org", 443),
        ("example.com", 443),
        ("badexample.com", 443),
        ("git.example.net", 443),
        ("10.1.2.4", 80),
        ("127.0.0.1", 80),
        ("fd00::1", 443),
        ("::ffff:10.1.2.3", 80),
        ("::ffff:127.0.0.1", 8080),
        ("169.254.169.254", 80),
        ("0.0.0.0", 80),
        ("64:ff9b::7f00:1", 80),
        ("2002:7f00:1::", 80),
        ("localhost", 8080),
    ],
)
def test_other_host_or_port_is_not_allowed(host: str, port: int):
    assert not RULES.allow(parse_host(host), port)


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "pypi.org.", ".pypi.org", "pypi..org", "-a.example.com", "a-.example.com", "*.example.com"),
        *(
            "pypi.org\0",
            "pypi.org\0.example.com",
            "a.example.com\r\nHost: b",
            "a.example.com\n",
            " pypi.org",
            "pypi.org ",
        ),
        *("pypi.org#.example.com", "evil.net/.example.com", "user@pypi.org", "a%00.example.com", "a\\b.example.com"),
        *("pypi\u3002org", "pypi\uff0eorg", "pypi\uff61org", "b\xfccher.example", "\u24dfypi.org", "pypi.or\u0261"),
        "a\u200b.example.com",
        *("2130706433", "0x7f000001", "017700000001", "127.1", "127.0.1", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.01"),
        *("127.0.0.256", "1.2.3.4.5", "a.0x7f", "a.1", "10.1.2.3.", "0x", "256"),
        *("fe80::1%eth0", "fe80::1%25eth0", "[::1]", "::1]", ":::", "1:2", "::ffff:127.0.0.256", "1::2::3"),
        *("a" * 64 + ".example.com", ".".join(["a" * 60] * 5)),
    ],
)
def test_text_that_is_no_host_is_refused(text: str):
    assert not parses(parse_host, text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "pypi.org",
            "pypi.org:",
            "pypi.org:0",
            "pypi.org:65536",
            "pypi.org:443:443",
            "pypi.org:+443",
            "pypi.org:44 3",
        ),
        *(
            "pypi.org:٤٤٣",
            "pypi.org:-1",
            "user:password@pypi.org:443",
            "[::1]",
            "[::1]443",
            "[pypi.org]:443",
            "::1:443",
        ),
        *("[127.0.0.1]:80", "[fe80::1%lo]:80", ":443", "pypi.org:0443443", "https://pypi.org:443"),
    ],
)
def test_text_that_is_no_host_and_port_is_refused(text: str):
    assert not parses(parse_authority, text)


@pytest.mark.parametrize(
    "pattern", ["*", "", "*.", "a*.example.com", "*.*.example.com", "*.1.2.3", "pypi.org:0", "a b"]
)
def test_unusable_pattern_is_refused_with_a_sentence(pattern: str):
    with pytest.raises(SandboxError, match="is not a pattern of hosts"):
        HostRules([pattern])


def test_address_of_an_allowed_host_is_public_or_listed():
    assert RULES.allow_address("1.1.1.1", 443)
    assert RULES.allow_address("10.1.2.3", 443)
    assert not RULES.allow_address("10.1.2.3", 22)
    assert not RULES.allow_address("10.1.2.4", 443)
    assert not RULES.allow_address("fe80::1%eth0", 443)


def test_denied_host_is_reached_by_no_pattern_and_no_address():
    rules = HostRules(["*.example.com", "example.com:8443", "1.1.1.1"], ["bad.example.com", "*:8443", "1.1.1.*"])
    assert rules.allow("good.example.com", 443)
    assert not rules.allow("bad.example.com", 443)
    assert not rules.allow("example.com", 8443)
    assert not rules.allow("1.1.1.1", 443)
    assert not rules.allow_address("1.1.1.1", 443)
    assert rules.allow_address("1.0.0.1", 443)


def test_name_may_lead_to_an_address_that_is_not_reached_itself():
    rules = HostRules(["intranet.test"], ["10.0.0.2"], ["10.0.0.1", "10.0.0.2"])
    assert rules.allow_address("10.0.0.1", 443)
    assert not rules.allow("10.0.0.1", 443)
    assert not rules.allow_address("10.0.0.2", 443)
