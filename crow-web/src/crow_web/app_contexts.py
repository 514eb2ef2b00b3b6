"""The texts that apps of MCP servers tell crow (`ui/update-model-context`). They go along with the next prompt."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, unquote

from crow_core.acp.schema import ResourceBlock, ResourceContents

METHOD = "ui/update-model-context"
MAX_CONTEXT = 20_000
"""Characters that an app may tell."""
SCHEME = "ui://"


@dataclass
class AppContexts:
    """The last text of each app, by the ids of their tool calls."""

    servers: dict[str, str] = field(default_factory=dict[str, str])
    """The servers of the apps that are shown."""
    texts: dict[str, str] = field(default_factory=dict[str, str])

    def update(self, call: Any, params: Any) -> None:
        """Replace what an app has told. Raises ValueError if it is not shown, or if the parameters are wrong."""
        if call not in self.servers:
            raise ValueError("There is no such app.")
        text = read_context(params)
        self.texts.pop(call, None)
        if text:
            self.texts[call] = text

    def items(self) -> Iterator[tuple[str, str, str]]:
        """Yield the call, the server and the text of each app that has told something."""
        return ((call, self.servers[call], text) for call, text in self.texts.items())

    def take(self) -> list[ResourceBlock]:
        """Return what the apps have told since the last prompt, as the content of a prompt."""
        blocks = [make_block(server, text) for _, server, text in self.items()]
        self.texts.clear()
        return blocks


def make_block(server: str, text: str) -> ResourceBlock:
    said = text.replace("</resource", "<\\/resource")  # which would end the resource in what the model reads
    told = f"From the app of the MCP server {server}, not from the user:\n\n{said}"
    return ResourceBlock(resource=ResourceContents(uri=SCHEME + quote(server, safe=""), text=told))


def read_server(block: ResourceBlock) -> str:
    """Return the server whose app has told the text of a block; empty for a block of another origin."""
    uri = block.resource.uri
    return unquote(uri.removeprefix(SCHEME)) if uri.startswith(SCHEME) else ""


def read_context(params: Any) -> str:
    """Return what an app tells as a text; empty for nothing. Raises ValueError."""
    if not isinstance(params, dict):
        raise ValueError("Invalid content format")
    given = cast("Mapping[str, Any]", params)
    content: Any = given.get("content") or []
    structured = given.get("structuredContent")
    if not isinstance(content, list) or not isinstance(structured, dict | None):
        raise ValueError("Invalid content format")
    texts: list[str] = []
    for part in cast("list[Any]", content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError("Invalid content format: crow takes texts and structuredContent.")
    if structured:
        texts.append(json.dumps(structured, ensure_ascii=False))
    told = "\n\n".join(texts).strip()
    if len(told) > MAX_CONTEXT:
        raise ValueError(f"The context has more than {MAX_CONTEXT:,} characters.")
    return told
