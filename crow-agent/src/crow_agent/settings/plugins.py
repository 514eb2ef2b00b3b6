"""Agent Plugins (agent-plugins.org, version 1.0.0): folders with a plugin.json that hold skills and MCP servers.

Import this module only where a folder of plugins exists.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
from crow_core.text import to_line
from crow_skills.skill_file import SkillFolder
from crow_system.files import UnusableFile, is_inside, open_file
from msgspec import Meta, Struct

from crow_agent.settings.home import PLUGIN_FOLDERS, Home
from crow_agent.settings.structs import PluginServer
from crow_agent.settings.trust import TrustedFolders

PLUGIN_SCHEMA = "https://agent-plugins.org/schemas/1.0.0/plugin.schema.json"
MCP_SCHEMA = "https://agent-plugins.org/schemas/1.0.0/mcp.schema.json"
MAX_PLUGINS = 200
"""Entries of one folder that are searched for plugins."""
MAX_BYTES = 1_000_000
"""Bytes of a plugin.json or mcp.json."""
LOCAL = re.compile(r"localhost|127(\.\d+){3}|::1")
PLACEHOLDER = re.compile(r"\$\{PLUGIN_(ROOT|DATA)\}")

T = TypeVar("T")
Name = Annotated[str, Meta(max_length=64, pattern=r"^(?!.*(?:--|\.\.))[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?$")]


class PluginAuthor(Struct, forbid_unknown_fields=True):
    """The author of a plugin."""

    name: str = ""
    email: str = ""
    url: str = ""


class PluginManifest(Struct, rename={"schema": "$schema"}):
    """A plugin.json. Unknown fields are reported and ignored."""

    schema: str
    name: Name
    version: str = ""
    description: str = ""
    author: PluginAuthor | None = None
    homepage: str = ""
    repository: str = ""
    license: str = ""
    keywords: list[str] = []
    extensions: Any = None


class ServerFile(Struct, rename={"schema": "$schema", "servers": "mcpServers"}, forbid_unknown_fields=True):
    """An mcp.json of a plugin."""

    schema: str
    servers: dict[str, Any]


class LocalEntry(Struct, tag_field="type", tag="stdio", forbid_unknown_fields=True):
    """A server that is a command."""

    command: str
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str = "./"


class RemoteEntry(Struct, tag_field="type", tag="streamable-http", forbid_unknown_fields=True):
    """A remote server."""

    url: str
    headers: dict[str, str] = {}


class OldRemoteEntry(RemoteEntry, tag_field="type", tag="sse", forbid_unknown_fields=True):
    """A remote server of the old transport."""


@dataclass
class Plugin:
    """A plugin, with what crow uses of it."""

    name: str
    root: Path
    """The folder that holds its plugin.json, links resolved."""
    is_project: bool
    """True if it is the project's, False if it is the user's."""
    servers: dict[str, PluginServer] = field(default_factory=dict[str, PluginServer])
    """The settings of its servers, by `PLUGIN.SERVER`."""

    @property
    def skills(self) -> Path:
        """The folder of its skills, which need not exist."""
        return self.root / "skills"

    @property
    def skill_folder(self) -> SkillFolder:
        """The folder of its skills, with the rules for its use."""
        return SkillFolder(self.skills, f"plugin {self.name}", self.root, is_strict=True)


@dataclass
class Plugins:
    """The plugins of a session, and sentences about what is not used."""

    plugins: list[Plugin] = field(default_factory=list[Plugin])
    faults: list[str] = field(default_factory=list[str])

    def find_servers(self, *, of_project: bool) -> dict[str, PluginServer]:
        """Return the settings of the servers of the project's plugins, or of the user's."""
        found = (plugin.servers for plugin in self.plugins if plugin.is_project == of_project)
        return {name: settings for servers in found for name, settings in servers.items()}


class UnusablePart(Exception):
    """Something in a plugin that is not used; the text is the end of a sentence that begins with the file."""


def find_plugins(home: Home, env: Mapping[str, str], project: Path, trust: TrustedFolders) -> Plugins:
    """Read the user's plugins, and those of a project if it is trusted. Of several with one name, use the first."""
    found, names, known = Plugins(), dict[str, Path](), set[Path]()
    places: list[tuple[Path, Path | None]] = [(folder, None) for folder in home.list_plugin_folders(env)]
    if trust.is_trusted(project):
        places += [(project / name, project) for name in PLUGIN_FOLDERS]
    for folder, limit in places:
        for root in list_roots(folder, limit):
            if (real := root.resolve()) in known:
                continue
            known.add(real)
            try:
                plugin = read_plugin(real, home, found.faults, is_project=limit is not None)
                if plugin.name in names:
                    raise UnusablePart(f"is left out: the plugin {plugin.name} is in {names[plugin.name]} already")
            except UnusablePart as fault:
                found.faults.append(f"{to_line(str(root / 'plugin.json'))} {fault}.")
            else:
                names[plugin.name] = root
                found.plugins.append(plugin)
    return found


def list_roots(folder: Path, limit: Path | None) -> Iterator[Path]:
    """Yield the folders of plugins in a folder. No link may lead out of `limit`."""
    try:
        roots = sorted(folder.iterdir())[:MAX_PLUGINS]
    except OSError:
        return
    for root in roots:
        if (limit is None or is_inside(root, limit)) and os.path.lexists(root / "plugin.json"):
            yield root


def read_plugin(root: Path, home: Home, faults: list[str], *, is_project: bool) -> Plugin:
    """Read a plugin; add sentences about its parts that are not used to `faults`. Raises UnusablePart."""
    data = read_json(root / "plugin.json", root)
    check_version(data, PLUGIN_SCHEMA)
    manifest = convert(data, PluginManifest)
    plugin = Plugin(manifest.name, root, is_project)
    known = {each.encode_name for each in msgspec.structs.fields(PluginManifest)}
    if unknown := [to_line(key)[:80] for key in data if key not in known]:
        faults.append(f"{root / 'plugin.json'}: unknown {', '.join(unknown)} ignored.")
    if manifest.extensions is not None and not isinstance(manifest.extensions, dict):
        faults.append(f"{root / 'plugin.json'}: extensions ignored, as it is not an object.")
    if plugin.skills.exists() and not (plugin.skills.is_dir() and is_inside(plugin.skills, root)):
        faults.append(f"{plugin.skills} is not used: it is no folder in the plugin {plugin.name}.")
    file = root / "mcp.json"
    if os.path.lexists(file):
        try:
            data = read_json(file, root)
            check_version(data, MCP_SCHEMA)
            servers = convert(data, ServerFile).servers
        except UnusablePart as fault:
            faults.append(f"{to_line(str(file))} {fault}.")
            return plugin
        for name, settings in servers.items():
            try:
                plugin.servers[f"{plugin.name}.{to_line(name)}"] = to_settings(settings, plugin, home)
            except UnusablePart as fault:
                faults.append(f"{to_line(str(file))}: the server {to_line(name)[:80]!r} is left out, as it {fault}.")
    return plugin


def read_json(file: Path, root: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a plugin. Raises UnusablePart."""
    try:
        with open_file(file, root) as opened:
            data = json.loads(opened.read(MAX_BYTES).decode("utf-8-sig"))
    except (UnusableFile, OSError) as error:
        raise UnusablePart(f"is not used: {to_line(str(error))}") from None
    except (ValueError, RecursionError) as error:
        raise UnusablePart(f"is not valid JSON: {to_line(str(error))[:200]}") from None
    if not isinstance(data, dict):
        raise UnusablePart("is not a JSON object")
    return cast("dict[str, Any]", data)


def check_version(data: Mapping[str, Any], schema: str) -> None:
    """Raise UnusablePart if a file names a version of the specification that crow does not know."""
    if (named := data.get("$schema")) != schema:
        raise UnusablePart(f"is not used: $schema is {to_line(json.dumps(named))[:100]}, and crow knows {schema} only")


def convert(data: Any, kind: type[T]) -> T:
    """Convert a value of JSON to a type. Raises UnusablePart."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise UnusablePart(f"does not keep to Agent Plugins 1.0.0: {to_line(str(error))[:200]}") from None


def to_settings(data: Any, plugin: Plugin, home: Home) -> PluginServer:
    """Convert the entry of a server to settings. Raises UnusablePart."""
    kinds: Any = LocalEntry | RemoteEntry | OldRemoteEntry
    entry: LocalEntry | RemoteEntry | OldRemoteEntry = convert(data, kinds)
    if not isinstance(entry, LocalEntry):
        check_remote(entry)
        kind = "sse" if isinstance(entry, OldRemoteEntry) else "http"
        return PluginServer(plugin=plugin.name, url=entry.url, headers=entry.headers, type=kind)
    root = str(plugin.root)
    instance = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    data_folder = str(home.data / "plugin-data" / f"{plugin.name}-{instance}")
    if reserved := [name for name in entry.env if name.upper() in ("PLUGIN_ROOT", "PLUGIN_DATA")]:
        raise UnusablePart(f"sets {reserved[0]}, which crow sets")

    def expand(text: str) -> str:
        return PLACEHOLDER.sub(lambda match: root if match[1] == "ROOT" else data_folder, text)

    env = {name: expand(value) for name, value in entry.env.items()}
    return PluginServer(
        plugin=plugin.name,
        data=data_folder,
        command=find_command(entry.command, plugin.root),
        args=[expand(each) for each in entry.args],
        env=env | {"PLUGIN_ROOT": root, "PLUGIN_DATA": data_folder},
        cwd=find_folder(entry.cwd, expand(entry.cwd), plugin.root, data_folder),
    )


def find_command(command: str, root: Path) -> str:
    """Return the command of a server: a bare name, or the path of a file in the plugin. Raises UnusablePart."""
    if command.startswith("./"):
        if not is_inside(path := root / command, root):
            raise UnusablePart(f"has the command {to_line(command)[:80]!r}, which is no file in the plugin")
        return str(path)
    if not command.strip() or re.search(r"[/\\]|^~", command):
        raise UnusablePart(f"has the command {to_line(command)[:80]!r}: it has to be a name, or begin with ./")
    return command


def find_folder(cwd: str, expanded: str, root: Path, data: str) -> str:
    """Return the working folder of a server, in the plugin or in its data. Raises UnusablePart."""
    if not re.match(r"\./|\$\{PLUGIN_(ROOT|DATA)\}(/|$)", cwd):
        raise UnusablePart(
            f"has the cwd {to_line(cwd)[:80]!r}: it has to begin with ./, ${{PLUGIN_ROOT}} or ${{PLUGIN_DATA}}"
        )
    base = os.path.realpath(data) if cwd.startswith("${PLUGIN_DATA}") else str(root)
    path = os.path.realpath(os.path.join(root, expanded))
    if os.path.commonpath([path, base]) != base:
        raise UnusablePart(f"has the cwd {to_line(cwd)[:80]!r}, which leads out of the plugin")
    return path


def check_remote(entry: RemoteEntry) -> None:
    """Raise UnusablePart if the address or the headers of a server cannot be used."""
    try:
        url = urlsplit(entry.url)
        usable = url.scheme == "https" or (url.scheme == "http" and bool(LOCAL.fullmatch(url.hostname or "")))
        usable = usable and bool(url.hostname) and not url.username and not url.password and not url.fragment
    except ValueError:
        usable = False
    if not usable:
        raise UnusablePart("has a url that is no https address, or has a user or a fragment")
    names = [name.lower() for name in entry.headers]
    valid = all(re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) for name in names)
    if not valid or len({*names}) < len(names) or any(re.search(r"[\r\n\0]", each) for each in entry.headers.values()):
        raise UnusablePart("has headers that are not valid, or are there twice")
