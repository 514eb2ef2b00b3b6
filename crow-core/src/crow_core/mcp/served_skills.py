"""Skills of MCP servers with the extension `io.modelcontextprotocol/skills` (SEP-2640): list them, check their files.

A server lists each file of a skill with its digest. From then on crow uses no file of that skill with other contents,
and none that is not listed. A digest shows that the list and the file belong together, and nothing about the server.
"""

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from msgspec import Struct, ValidationError

from crow_core.acp.decoding import convert_leniently
from crow_core.masking import mask
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import SKILLS_EXTENSION, describe_error
from crow_core.text import to_line

if TYPE_CHECKING:
    from crow_core.mcp.sdk import CheckedClient

SKILLS_TIMEOUT = 30.0
"""Seconds a server may take to list its skills, or one of them."""
PAGES_LIMIT = 20
"""Pages of a list of skills that are read."""
SKILLS_LIMIT = 500
"""Skills of one server that are used."""
FILES_LIMIT = 1_000
"""Files that one skill may have."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

logger = logging.getLogger("crow")


class SkillFile(Struct):
    """A file of a skill, with its digest."""

    uri: str
    digest: str


class SkillEntry(Struct):
    """An entry of `skills/list`, as the server sent it. Fields that crow does not know are ignored."""

    uri: str
    frontmatter: dict[str, Any]
    resources: list[SkillFile] | str = "dynamic"


@dataclass(frozen=True)
class ServedSkill:
    """A skill of a server: the URI of its SKILL.md, and its frontmatter."""

    uri: str
    frontmatter: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path of its folder on the server: its name, behind the folders that the server has put it in."""
        return unquote(self.uri.partition("://")[2].rpartition("/")[0])


def serves_skills(client: "CheckedClient") -> bool:
    """Return True if the server of a client has the extension."""
    extensions = client.server_capabilities and client.server_capabilities.extensions
    return SKILLS_EXTENSION in (extensions or {})


async def list_served_skills(server: Server) -> list[ServedSkill] | None:
    """Return the skills that a server lists, without invalid ones; None if it does not have the extension.

    The digests of their files are added to `server.skill_files`. A failure is in the log.
    """
    try:
        client = await server.client()
        if not serves_skills(client):
            return None
        async with asyncio.timeout(SKILLS_TIMEOUT):
            entries = await request_entries(client)
    except ConnectionError:
        return None  # the list of its tools reports this
    except Exception as error:  # a server may answer with anything, and the SDK may raise anything for it
        reason = mask(describe_error(error), server.secrets)
        logger.warning("MCP server %s did not list its skills: %s", to_line(server.name), reason)
        return []
    skills: list[ServedSkill] = []
    for entry in entries[:SKILLS_LIMIT]:
        try:
            skills.append(take_entry(server, entry))
        except ValueError as error:
            about = mask(to_line(str(error)), server.secrets)[:500]
            logger.warning("MCP server %s has a skill that was left out: %s", to_line(server.name), about)
    return skills


async def request_entries(client: "CheckedClient") -> list[Any]:
    """Request all pages of the list of skills, and return the entries as they were sent."""
    from crow_core.mcp.sdk import ListSkillsParams, ListSkillsRequest  # here because FastMCP takes most of a second

    entries: list[Any] = []
    cursor: str | None = None
    for _ in range(PAGES_LIMIT):
        request = ListSkillsRequest(params=ListSkillsParams(cursor=cursor))
        answer: dict[str, Any] = await client.session.send_request(request, make_adapter())
        entries += answer["skills"] if isinstance(answer.get("skills"), list) else []
        cursor = answer.get("nextCursor")
        if not isinstance(cursor, str):
            break
    return entries


async def refresh_skill(server: Server, uri: str) -> None:
    """Request the entry of one skill again, whose files may have changed. Raises ConnectionError."""
    from crow_core.mcp.sdk import GetSkillParams, GetSkillRequest  # as above

    try:
        client = await server.client()
        async with asyncio.timeout(SKILLS_TIMEOUT):
            request = GetSkillRequest(params=GetSkillParams(uri=uri))
            answer: dict[str, Any] = await client.session.send_request(request, make_adapter())
        take_entry(server, answer.get("skill"), uri)
    except Exception as error:  # as above
        raise ConnectionError(mask(describe_error(error), server.secrets)) from error


def make_adapter() -> Any:
    """Make the type of an answer that crow reads by itself: the SDK would refuse a list for one unknown field."""
    from pydantic import TypeAdapter  # imported with FastMCP

    return TypeAdapter(dict[str, Any])


def take_entry(server: Server, value: Any, uri: str = "") -> ServedSkill:
    """Check an entry, note the digests of its files, and return the skill. Raises ValueError."""
    try:
        entry = convert_leniently(value, SkillEntry)
    except ValidationError as error:
        raise ValueError(f"{find_uri(value)}: {error}") from None
    files = None if isinstance(entry.resources, str) else {file.uri: file.digest for file in entry.resources}
    if fault := find_fault(entry, files, uri):
        raise ValueError(f"{entry.uri[:200]}: {fault}")
    root = entry.uri.removesuffix("SKILL.md")
    for known in [each for each in server.skill_files if each.startswith(root)]:
        del server.skill_files[known]
    server.skill_files |= files or {}
    return ServedSkill(entry.uri, entry.frontmatter)


def find_uri(value: Any) -> str:
    """Return the URI in an entry that cannot be read, or a question mark."""
    match value:
        case {"uri": str(uri)}:
            return uri[:200]
        case _:
            return "?"


def find_fault(entry: SkillEntry, files: Mapping[str, str] | None, uri: str) -> str:
    """Return what is wrong with an entry, as the end of a sentence; empty if nothing is."""
    root, name = entry.uri.removesuffix("SKILL.md"), entry.frontmatter.get("name")
    about = entry.frontmatter.get("description")
    if uri and entry.uri != uri:
        return f"the server answered with it for {uri[:200]}"
    if not entry.uri.endswith("/SKILL.md") or not entry.uri.isprintable():
        return "its URI does not end with /SKILL.md"
    if not isinstance(name, str) or unquote(root.rstrip("/")).rpartition("/")[2] != name:
        return "its folder does not have its name"
    if not isinstance(about, str) or not about.strip():
        return "it has no description"
    if files is None:
        return ""
    if len(files) > FILES_LIMIT or entry.uri not in files:
        return f"it lists more than {FILES_LIMIT:,} files" if entry.uri in files else "it does not list its SKILL.md"
    if strange := next((each for each in files if not each.startswith(root) or "/../" in unquote(each)), ""):
        return f"it lists a file outside of its folder ({strange[:200]})"
    if not all(map(DIGEST.fullmatch, files.values())):
        return "a digest is not sha256: and 64 hexadecimal digits"
    return ""


def find_skill(server: Server, uri: str) -> str:
    """Return the URI of the SKILL.md of the outermost skill with digests that a file belongs to, or an empty string."""
    skills = sorted((each for each in server.skill_files if each.endswith("/SKILL.md")), key=len)
    return next((each for each in skills if uri.startswith(each.removesuffix("SKILL.md"))), "")


def find_mismatch(server: Server, uri: str, contents: Sequence[Mapping[str, Any]]) -> str:
    """Return why the contents of a resource may not be used, as the end of a sentence; empty if they may."""
    if (digest := server.skill_files.get(uri)) is None:
        return "the skill does not list this file" if find_skill(server, uri) else ""
    match contents:
        case [{"blob": str(blob)}]:
            data = base64.b64decode(blob)
        case [{"text": str(text)}]:
            data = text.encode(errors="replace")
        case _:
            return "the server did not answer with one file"
    is_same = digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    return "" if is_same else "its digest is not the one that the server lists"
