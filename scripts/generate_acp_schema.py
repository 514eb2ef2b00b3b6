"""Generate the ACP structs (crow_core/acp/schema.py and schema_v2.py) from the official JSON schemas.

    python scripts/generate_acp_schema.py                     from the vendored schemas
    python scripts/generate_acp_schema.py --vendor PATH       first vendor an official v1 schema.json, with the
                                                              definitions in UNSTABLE from the schema.unstable.json
                                                              beside it
    python scripts/generate_acp_schema.py --vendor-v2 PATH    first vendor an official v2 schema.json

The schema defines every field. The tables below add only what it cannot define: our names for the variants of tagged
unions, and the fields that a flattened union needs together.
"""

import argparse
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
VENDORED = ROOT / "crow-core/schema/schema.json"
VENDORED_V2 = ROOT / "crow-core/schema/schema_v2.json"
GENERATED = ROOT / "crow-core/src/crow_core/acp/schema.py"
GENERATED_V2 = ROOT / "crow-core/src/crow_core/acp/schema_v2.py"

Schema = dict[str, Any]

# Tagged unions: the pattern of the variants' names, exceptions by tag, and the class for unknown tags.
VARIANTS: dict[str, tuple[str, dict[str, str], str]] = {
    "ContentBlock": ("{}Block", {}, "UnknownContentBlock"),
    "SessionUpdate": ("{}", {"plan": "PlanUpdate", "notice": "NoticeUpdate"}, "UnknownSessionUpdate"),
    "ToolCallContent": ("{}Content", {"content": "BlockContent"}, "UnknownToolCallContent"),
    "RequestPermissionOutcome": ("{}Outcome", {}, "UnknownOutcome"),
    "SessionConfigOption": ("{}ConfigOption", {}, "UnknownConfigOption"),
    "ElicitationPropertySchema": ("{}PropertySchema", {"array": "MultiSelectPropertySchema"}, "UnknownPropertySchema"),
}

# Definitions with another name in Python. Two with the same name share a struct.
RENAMED = {
    "ToolCallUpdate": "ToolCallFields",
    "EmbeddedResourceResource": "ResourceContents",
    "SessionConfigSelectOptions": "SelectEntry",
    "SessionConfigSelectOption": "SelectEntry",
}

# Rules that JSON schema expresses with `anyOf` and the types of a flattened struct cannot express.
CHECKS = {
    "McpServer": """
        if self.type is UNSET:
            if self.command is UNSET:
                raise ValueError("an MCP server without `type` (stdio) needs `command`")
            # Required on the wire even when empty.
            self.args = [] if self.args is UNSET else self.args
            self.env = [] if self.env is UNSET else self.env
        else:
            if self.url is UNSET:
                raise ValueError(f"an MCP server of type `{self.type}` needs `url`")
            self.headers = [] if self.headers is UNSET else self.headers
        """,
    "ResourceContents": """
        if self.text is UNSET and self.blob is UNSET:
            raise ValueError("resource contents need `text` or `blob`")
        """,
    "SelectEntry": """
        if self.value is UNSET and self.group is UNSET:
            raise ValueError("a select entry needs `value`, or `group` with `options`")
        if self.group is not UNSET and self.options is UNSET:
            self.options = []  # required on the wire even when empty
        """,
    "SetSessionConfigOptionRequest": """
        if isinstance(self.value, bool) and self.type is UNSET:
            raise ValueError("a boolean `value` needs `type`: `boolean`")
        """,
    "CreateElicitationRequest": """
        if self.mode == "form" and self.requested_schema is UNSET:
            raise ValueError("an elicitation by form needs `requestedSchema`")
        if self.mode == "url" and (self.url is UNSET or self.elicitation_id is UNSET):
            raise ValueError("an elicitation by url needs `url` and `elicitationId`")
        if self.session_id is UNSET and self.request_id is UNSET:
            raise ValueError("an elicitation needs `sessionId` or `requestId`")
        """,
    "MultiSelectItems": """
        if self.any_of is UNSET and self.type is UNSET:
            raise ValueError("the items of a multiple choice need `anyOf`, or `type`: `string` with `enum`")
        if self.type == "string" and self.enum is UNSET and self.any_of is UNSET:
            raise ValueError("the items of a multiple choice of type `string` need `enum`")
        """,
}

# Version 2 shares with version 1 what is the same on the wire: definitions by their name, and variants by their tag.
SHARED = {
    "ContentBlock": "ContentBlock",
    "CompleteElicitationNotification": "CompleteElicitationNotification",
    "CreateElicitationRequest": "CreateElicitationRequest",
    "CreateElicitationResponse": "CreateElicitationResponse",
    "ElicitationCapabilities": "ElicitationCapabilities",
    "EnvVariable": "EnvVariable",
    "Error": "Error",
    "HttpHeader": "HttpHeader",
    "Implementation": "Implementation",
    "PermissionOption": "PermissionOption",
    "RequestPermissionResponse": "RequestPermissionResponse",
    "SessionInfo": "SessionInfo",
    "ToolCallLocation": "ToolCallLocation",
}
SHARED_VARIANTS = {
    "SessionUpdate": {
        "user_message_chunk": "UserMessageChunk",
        "agent_message_chunk": "AgentMessageChunk",
        "agent_thought_chunk": "AgentThoughtChunk",
        "session_info_update": "SessionInfoUpdate",
        "usage_update": "UsageUpdate",
        "notice": "NoticeUpdate",
        "compaction_update": "CompactionUpdate",
        "compaction_summary_chunk": "CompactionSummaryChunk",
    },
    "ToolCallContent": {"content": "BlockContent", "terminal": "TerminalContent"},
}
# Properties of crow's own variants of version 2's tagged unions, whose tags begin with an underscore.
OWN_PROPERTIES: dict[str, Schema] = {"ReplayFrom": {"messageId": {"type": "string"}}}
# Those of version 2's tagged unions that have a struct for each variant; the structs of others have all their fields.
VARIANTS_V2: dict[str, tuple[str, dict[str, str], str]] = {
    "SessionUpdate": ("{}", {}, "UnknownSessionUpdate"),
    "ToolCallContent": ("{}Content", {"diff": "PatchContent"}, "UnknownToolCallContent"),
    "RequestPermissionSubject": ("{}Subject", {}, "UnknownSubject"),
    "SessionConfigOption": ("{}ConfigOption", {}, "UnknownConfigOption"),
}
RENAMED_V2 = {
    "ToolCallUpdate": "ToolCallFields",
    "SessionConfigSelectOptions": "SelectEntry",
    "SessionConfigSelectOption": "SelectEntry",
}

# Definitions that are used before they are stable, and the properties that refer to them.
UNSTABLE = (
    *("SessionForkCapabilities", "ForkSessionRequest", "ForkSessionResponse"),
    *("SessionSystemPromptCapabilities", "SessionSystemPromptModeCapabilities"),
    *("SessionSystemPromptOverrideCapabilities", "SystemPrompt", "SystemPromptMode"),
    *("ProvidersCapabilities", "ListProvidersRequest", "ListProvidersResponse", "SetProviderRequest"),
    *("SetProviderResponse", "DisableProviderRequest", "DisableProviderResponse"),
    *("ProviderInfo", "ProviderId", "LlmProtocol", "ProviderCurrentConfig"),
    *("SessionArchiveCapabilities", "SessionArchiveFilter", "ArchiveSessionRequest", "ArchiveSessionResponse"),
    *("UnarchiveSessionRequest", "UnarchiveSessionResponse"),
    *("SessionTitleCapabilities", "SetSessionTitleRequest", "SetSessionTitleResponse"),
    *("SessionStatusCapabilities", "SessionStatusRequest", "SessionStatusResponse", "SessionStatus"),
    *("AuthStatusCapabilities", "AuthStatusRequest", "AuthStatusResponse", "AuthState", "AuthAccount"),
    "Usage",
)
UNSTABLE_PROPERTIES = {
    "SessionCapabilities": ("fork", "systemPrompt", "archive", "title", "status"),
    "AgentCapabilities": ("providers",),
    "AgentAuthCapabilities": ("status",),
    "ListSessionsRequest": ("archived",),
    "SessionInfo": ("archived",),
    "PromptResponse": ("usage",),
    **dict.fromkeys(("NewSessionRequest", "LoadSessionRequest", "ResumeSessionRequest"), ("systemPrompt",)),
}

# Lists whose invalid items are dropped although the schema does not say so: the other MCP servers stay usable.
SKIP_INVALID_ITEMS = {"mcpServers"}

ERROR_CODES = {
    -32700: "PARSE_ERROR",
    -32600: "INVALID_REQUEST",
    -32601: "METHOD_NOT_FOUND",
    -32602: "INVALID_PARAMS",
    -32603: "INTERNAL_ERROR",
    -32800: "REQUEST_CANCELLED",
    -32000: "AUTH_REQUIRED",
    -32002: "NOT_FOUND",
}

HEADER = '''\
"""The messages of ACP version 1: a struct for every object that its methods send.

Generated by scripts/generate_acp_schema.py from crow-core/schema/schema.json (Apache-2.0), do not edit.
UNSET means an absent field, None means null. Decode and encode with `crow_core.acp.decoding`.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET as UNSET
from msgspec import Struct, field
from msgspec import UnsetType as UnsetType

PROTOCOL_VERSION = 1

{errors}

RequestId: TypeAlias = int | str | None


class Base(Struct, kw_only=True, omit_defaults=True, repr_omit_defaults=True, rename="camel"):
    """The base of all structs: names are camelCase in JSON, and fields with their default are left out."""


class Extensible(Base, kw_only=True):
    """An object with `_meta`, the only place for keys outside of the protocol."""

    meta: dict[str, Any] | UnsetType | None = field(default=UNSET, name="_meta")


class Unknown:
    """A variant that this version does not know: `raw` is the received value, which is encoded unchanged."""

    __slots__ = ("raw",)
    __match_args__ = ("raw",)

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.raw == self.raw

    def __repr__(self) -> str:
        return f"{{type(self).__name__}}({{self.raw!r}})"


def required_list() -> list[Any]:
    """Return an empty list as a default that `omit_defaults` does not leave out."""
    return []


'''

HEADER_V2 = '''\
"""The messages of ACP version 2, a draft: a struct for every object of its methods, unless version 1 has the same.

Generated by scripts/generate_acp_schema.py from crow-core/schema/schema_v2.json (Apache-2.0), do not edit.
Imported only by connections that speak version 2.
"""
# ruff: noqa: RUF012 - msgspec copies the defaults of structs

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import UNSET, Struct, UnsetType, field

from crow_core.acp.schema import (
{shared})

PROTOCOL_VERSION = 2

UNSUPPORTED_VERSION = -32022


'''

FOOTER = '''
class Method(NamedTuple):
    """The types of a method's params and result."""

    params: type[Any]
    result: type[Struct] | None
    """None for a notification."""


'''


@dataclass
class Field:
    """A field of a struct."""

    name: str
    annotation: str
    default: str
    marks: set[str]


@dataclass
class Shape:
    """An object schema, merged with the schemas that it is composed of."""

    properties: dict[str, list[Schema]] = field(default_factory=dict[str, list[Schema]])
    """The schemas of each property; several if variants differ."""
    required: set[str] = field(default_factory=set[str])
    """The properties that every variant requires."""
    wanted: set[str] = field(default_factory=set[str])
    """The properties that at least one variant requires."""

    def add(self, other: "Shape") -> None:
        for name, schemas in other.properties.items():
            known = self.properties.setdefault(name, [])
            known.extend(schema for schema in schemas if schema not in known)
        self.wanted |= other.wanted | other.required


def to_snake_case(wire: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", wire).lower()


def to_camel_case(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def to_pascal_case(tag: str) -> str:
    return "".join(part.capitalize() for part in tag.split("_"))


def quote(value: str) -> str:
    return json.dumps(value)


def variants_of(schema: Schema) -> list[Schema]:
    return schema.get("anyOf") or schema.get("oneOf") or []


@dataclass(frozen=True)
class Version:
    """What the schema of a version cannot define."""

    variants: dict[str, tuple[str, dict[str, str], str]]
    renamed: dict[str, str]
    checks: dict[str, str] = field(default_factory=dict[str, str])
    shared: dict[str, str] = field(default_factory=dict[str, str])
    shared_variants: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    own: dict[str, Schema] = field(default_factory=dict[str, Schema])


V1 = Version(VARIANTS, RENAMED, CHECKS)
V2 = Version(VARIANTS_V2, RENAMED_V2, {}, SHARED, SHARED_VARIANTS, OWN_PROPERTIES)


class Generator:
    """Writes the definitions that the schema's methods need, each after those that it refers to."""

    def __init__(self, schema: Schema, version: Version = V1) -> None:
        self.defs: dict[str, Schema] = schema["$defs"]
        self.version = version
        self.imported: set[str] = set()
        self.literals: dict[str, str] = {}
        self.written: dict[str, str] = {}
        self.writing: set[str] = set()
        self.properties: dict[str, set[str]] = {}
        self.marks: dict[str, dict[str, list[str]]] = {}
        self.unknown: dict[str, str] = {}

    def methods(self) -> dict[str, dict[str, dict[str, str]]]:
        """Return the names of the definitions, by side, method, and "params" or "result"."""
        sides: dict[str, dict[str, dict[str, str]]] = {"agent": {}, "client": {}, "protocol": {}}
        for name, schema in self.defs.items():
            if "x-method" in schema:
                kind = "result" if name.endswith("Response") else "params"
                sides[schema["x-side"]].setdefault(schema["x-method"], {})[kind] = name
        return sides

    def source(self) -> str:
        sides = self.methods()
        docs: dict[str, str] = {}
        for methods in sides.values():
            for wire, method in methods.items():
                for kind, name in method.items():
                    docs[name] = f"The {kind} of `{wire}`."
        docs["Error"] = "The error that a failed request is answered with instead of a result."
        for name, doc in docs.items():
            self.reference(name, doc)
        if self.version.shared:
            del sides["protocol"]
            names = sorted(self.imported | {"Extensible", "Method", "Unknown"})
            header, footer = HEADER_V2.format(shared="".join(f"    {name},\n" for name in names)), ""
        else:
            header, footer = HEADER.format(errors=self.error_codes()), FOOTER
        return "".join(
            [
                header,
                *(f"{name}: TypeAlias = {value}\n" for name, value in self.literals.items()),
                "\n\n",
                *self.written.values(),
                footer,
                *(
                    format_table(f"{side.upper()}_METHODS", "dict[str, Method]", format_methods(methods))
                    for side, methods in sides.items()
                ),
                *(self.lenience(mark) for mark in sorted(self.marks)),
                format_table(
                    "UNKNOWN_VARIANTS",
                    "dict[type[Struct], type[Unknown]]",
                    (f"{name}: {unknown}" for name, unknown in self.unknown.items()),
                    "The class for a variant with an unknown tag, by a class of the same tagged union.",
                ),
            ]
        )

    def error_codes(self) -> str:
        known = {schema["const"] for schema in variants_of(self.defs["ErrorCode"]) if "const" in schema}
        if known != set(ERROR_CODES):
            raise SystemExit(f"ERROR_CODES in {__file__} does not match the schema: {sorted(known ^ set(ERROR_CODES))}")
        return "\n".join(f"{name} = {code}" for code, name in ERROR_CODES.items())

    def lenience(self, mark: str) -> str:
        sentences = {
            "DEFAULT_ON_ERROR": "Fields that get their default if they are malformed, in addition to `meta`.",
            "SKIP_INVALID_ITEMS": "Lists whose invalid items are dropped.",
            "DEFAULT_ON_NULL": "Fields for which null means the default.",
        }
        entries = (f"{name}: {tuple(fields)!r}" for name, fields in sorted(self.marks[mark].items()))
        return format_table(mark, "dict[type[Struct], tuple[str, ...]]", entries, sentences[mark])

    def reference(self, name: str, doc: str | None = None) -> list[str]:
        """Return the members of a definition's type; write its struct if it has one."""
        schema = self.defs[name]
        if name == "RequestId":
            return [self.share(name)]
        if shared := self.version.shared.get(name):
            return [self.share(shared)]
        if name in self.version.variants:
            return [self.union(name, schema)]
        options = variants_of(schema)
        if options and all(isinstance(option.get("const"), str) for option in options):
            return self.enum(name, options)
        if options and all(option.get("type") == "array" for option in options):
            return [f"list[{self.flat_items(name, options)}]"]
        if schema.get("type") == "object" or self.is_object_union(options):
            shape = self.shape(schema)
            shape.add(self.shape({"properties": self.version.own.get(name, {})}))
            return [self.struct(self.version.renamed.get(name, name), shape, doc)]
        return self.members(schema)

    def share(self, name: str) -> str:
        """Import a name from the structs of version 1, if these are those of version 2."""
        if self.version.shared:
            self.imported.add(name)
        return name

    def is_object_union(self, options: list[Schema]) -> bool:
        return bool(options) and all(self.shape(option).properties for option in options)

    def enum(self, name: str, options: list[Schema]) -> list[str]:
        values = [quote(option["const"]) for option in options]
        if len(values) == 1:
            return values
        self.literals[name] = f"Literal[{', '.join(values)}]"
        return [name]

    def union(self, name: str, schema: Schema) -> str:
        if name in self.written:
            return name
        pattern, exceptions, unknown = self.version.variants[name]
        tag_field = "sessionUpdate" if name == "SessionUpdate" else "outcome" if "Outcome" in name else "type"
        common = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
        structs: list[str] = []
        for variant in variants_of(schema):
            tag = variant["properties"][tag_field].get("const")
            if tag is None:
                continue  # the schema's definition of an unknown variant
            if shared := self.version.shared_variants.get(name, {}).get(tag):
                structs.append(self.share(shared))
                continue
            struct = exceptions.get(tag) or pattern.format(to_pascal_case(tag))
            shape = self.shape(common)
            own = self.shape(variant)
            shape.add(own)
            shape.required |= own.required
            structs.append(self.struct(struct, shape))
            self.unknown[struct] = unknown
        members = " | ".join(structs)
        why = "msgspec cannot decode a variant without a tag; the lenient pass does"
        self.written[name] = (
            f"class {unknown}(Unknown):\n    __slots__ = ()\n\n\n"
            f"if TYPE_CHECKING:\n    {name}: TypeAlias = {members} | {unknown}\n"
            f"else:  # {why}\n    {name} = {members}\n\n\n"
        )
        return name

    def flat_items(self, name: str, options: list[Schema]) -> str:
        return self.struct(self.version.renamed[name], self.shape({"anyOf": [option["items"] for option in options]}))

    def shape(self, schema: Schema) -> Shape:
        if "$ref" in schema:
            return self.shape(self.defs[schema["$ref"].removeprefix("#/$defs/")])
        shape = Shape(required=set(schema.get("required", ())))
        for name, value in schema.get("properties", {}).items():
            shape.properties[name] = [value]
        for part in schema.get("allOf", ()):
            inner = self.shape(part)
            shape.add(inner)
            shape.required |= inner.required
        options = [self.shape(option) for option in variants_of(schema)]
        for option in options:
            shape.add(option)
        if options:
            shape.required |= set[str].intersection(*(option.required for option in options))
        return shape

    def struct(self, name: str, shape: Shape, doc: str | None = None) -> str:
        if not shape.properties.keys() <= self.properties.setdefault(name, set(shape.properties)):
            raise SystemExit(f"two different objects would be called {name}: give one another name")
        if name in self.writing or name in self.written:
            return name
        self.writing.add(name)
        fields, tag = self.fields(name, shape)
        self.writing.remove(name)
        base = "Extensible" if "_meta" in shape.properties else "Base"
        body = f'    """{doc}"""\n\n' if doc else ""
        body += "".join(f"    {field.name}: {field.annotation}{field.default}\n" for field in fields)
        if name in self.version.checks:
            check = textwrap.indent(textwrap.dedent(self.version.checks[name]).strip(), " " * 8)
            body += f"\n    def __post_init__(self) -> None:\n{check}\n"
        for field_ in fields:
            for mark in field_.marks:
                self.marks.setdefault(mark, {}).setdefault(name, []).append(field_.name)
        self.written[name] = f"class {name}({base}, kw_only=True{tag}):\n{body or '    pass'}\n\n\n"
        return name

    def fields(self, struct: str, shape: Shape) -> tuple[list[Field], str]:
        fields: list[Field] = []
        tag = ""
        for wire, schemas in shape.properties.items():
            if wire == "_meta":
                continue
            members = merge_members([member for schema in schemas for member in self.members(schema)])
            required = wire in shape.required
            marks = {
                key.removeprefix("x-deserialize-").replace("-", "_").upper()
                for schema in schemas
                for key in schema
                if key.startswith("x-deserialize-")
            }
            consts = [member for member in members if member.startswith('"')]
            if consts and (required or "default" in schemas[0]):
                if len(members) > 1:
                    raise SystemExit(f"{struct}.{wire}: several constants where one was expected: {members}")
                tag = f", tag_field={quote(wire)}, tag={consts[0]}"
                continue
            if consts:  # the tag of a flattened union: any other value is the variant without a tag
                members = [f"Literal[{', '.join(consts)}]"]
                marks.add("DEFAULT_ON_ERROR")
            if required and "DEFAULT_ON_ERROR" in marks and not members[0].startswith("list["):
                raise SystemExit(f"{struct}.{wire}: what does a required field fall back to when it is no list?")
            if wire in SKIP_INVALID_ITEMS:
                marks.add("SKIP_INVALID_ITEMS")
            fields.append(self.field(wire, members, shape, marks))
        return fields, tag

    def field(self, wire: str, members: list[str], shape: Shape, marks: set[str]) -> Field:
        name = to_snake_case(wire)
        if to_camel_case(name) != wire:
            raise SystemExit(f"{wire} is not the camelCase of {name}: give the field its wire name")
        schema = shape.properties[wire][0]
        default = None
        if wire in shape.required:
            default = "field(default_factory=required_list)" if "DEFAULT_ON_NULL" in marks else None
        elif members == ["Any"]:
            default = "UNSET"
        elif "default" in schema:
            struct = members[0] in self.written
            default = f"field(default_factory={members[0]})" if struct else repr(schema["default"])
        elif "DEFAULT_ON_NULL" in marks and wire not in shape.wanted:
            default = "[]" if schema["type"] == "array" else "{}"
        else:
            members = merge_members([*members, "UnsetType"])
            default = "UNSET"
        annotation = " | ".join(members)
        if any(re.search(rf"\b{name}\b", annotation) for name in self.writing):
            annotation = quote(annotation)
        return Field(name, annotation, f" = {default}" if default else "", marks)

    def members(self, schema: Schema) -> list[str]:
        """Return the members of a property's type; a constant is its JSON text with quotes."""
        if "$ref" in schema:
            return self.reference(schema["$ref"].removeprefix("#/$defs/"))
        if isinstance(schema.get("const"), str):
            return [quote(schema["const"])]
        parts = schema.get("allOf") or variants_of(schema)
        if parts:
            return merge_members([member for part in parts for member in self.members(part)])
        kinds = schema.get("type", "any")
        return [self.plain(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]

    def plain(self, kind: str, schema: Schema) -> str:
        if kind == "array":
            return f"list[{' | '.join(self.members(schema['items']))}]"
        if kind == "object":
            values = schema.get("additionalProperties", True)
            return f"dict[str, {'Any' if values is True else ' | '.join(self.members(values))}]"
        names = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "any": "Any"}
        return names[kind]


def merge_members(members: list[str]) -> list[str]:
    """Return the members without duplicates, with None last, and without constants if str is a member."""
    unique = [member for member in dict.fromkeys(members) if not ("str" in members and member.startswith('"'))]
    return [member for member in unique if member != "None"] + (["None"] if "None" in unique else [])


def format_methods(methods: dict[str, dict[str, str]]) -> list[str]:
    return [f"{quote(wire)}: Method({method['params']}, {method.get('result')})" for wire, method in methods.items()]


def format_table(name: str, annotation: str, entries: Iterable[str], doc: str | None = None) -> str:
    text = "".join(f"    {entry},\n" for entry in entries)
    return f"{name}: {annotation} = {{\n{text}}}\n" + (f'"""{doc}"""\n' if doc else "") + "\n"


def generate(schema: Schema, version: Version = V1) -> str:
    """Return the formatted text of schema.py, or schema_v2.py."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(GENERATED), "-"]
    source = Generator(schema, version).source()
    return subprocess.run(command, input=source, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def drop_prose(schema: Any, names: bool = False) -> Any:
    """Return a schema without its prose; `names` means that the keys are names of properties or definitions."""
    if isinstance(schema, list):
        return [drop_prose(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    return {
        key: drop_prose(value, names=not names and key in ("properties", "$defs"))
        for key, value in cast("Schema", schema).items()
        if names or key not in ("description", "title", "$schema")
    }


def add_unstable(stable: Schema, unstable: Schema) -> Schema:
    """Return the stable schema with the definitions in UNSTABLE, without properties that refer to unknown ones."""
    definitions: dict[str, Schema] = {**stable["$defs"], **{name: unstable["$defs"][name] for name in UNSTABLE}}
    for name, properties in UNSTABLE_PROPERTIES.items():
        mentioned = {key: unstable["$defs"][name]["properties"][key] for key in properties}
        own = definitions[name]["properties"]
        definitions[name] = {**definitions[name], "properties": {**own, **mentioned}}
    for name in UNSTABLE:
        known = {
            key: value
            for key, value in definitions[name].get("properties", {}).items()
            if set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(value))) <= definitions.keys()
        }
        if known:
            definitions[name] = {**definitions[name], "properties": known}
    return {**stable, "$defs": definitions}


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate crow_core/acp/schema.py.")
    parser.add_argument("--vendor", type=Path, metavar="PATH", help="an official v1 schema.json to vendor first")
    parser.add_argument("--vendor-v2", type=Path, metavar="PATH", help="an official v2 schema.json to vendor first")
    arguments = parser.parse_args()
    if official := arguments.vendor:
        unstable = official.with_name("schema.unstable.json")
        schema = add_unstable(json.loads(official.read_text("utf-8")), json.loads(unstable.read_text("utf-8")))
        VENDORED.write_text(json.dumps(drop_prose(schema), indent=1) + "\n", "utf-8")
    if official := arguments.vendor_v2:
        schema = drop_prose(json.loads(official.read_text("utf-8")))
        VENDORED_V2.write_text(json.dumps(schema, indent=1) + "\n", "utf-8")
    GENERATED.write_text(generate(json.loads(VENDORED.read_text("utf-8"))), "utf-8")
    GENERATED_V2.write_text(generate(json.loads(VENDORED_V2.read_text("utf-8")), V2), "utf-8")


if __name__ == "__main__":
    main()
