"""Write the tables of docs/settings.md from the structs that read config.toml: their types, defaults and docstrings."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from crow_agent.settings.structs import Config, ModelSettings
from crow_core.models.quirks import Quirks
from msgspec import inspect as types
from msgspec.structs import FieldInfo

TARGET = Path(__file__).parent.parent / "docs/settings.md"
BEGIN = "<!-- The tables: generated from the settings' structs by scripts/generate_settings.py. -->\n"
END = "<!-- The end of the tables. -->"
TYPES: dict[type[types.Type], str] = {
    types.StrType: "text",
    types.IntType: "integer",
    types.FloatType: "number",
    types.BoolType: "true, false",
}
QUIRKS = ModelSettings, "quirks"
"""The one field whose keys another struct describes."""


def iterate_tables(struct: type[Any] = Config, *keys: str) -> Iterator[tuple[str, type[Any]]]:
    """Iterate over the tables of config.toml, outer ones first: the name ("" for the file itself) and the struct."""
    yield ".".join(keys), struct
    for field in msgspec.structs.fields(struct):
        for inner in list_alternatives(types.type_info(field.type)):
            names = [*keys, field.encode_name]
            match inner:
                case types.StructType(cls=cls):
                    yield from iterate_tables(cls, *names)
                case types.DictType(value_type=types.StructType(cls=cls)):
                    yield from iterate_tables(cls, *names, "NAME")
                case _ if (struct, field.name) == QUIRKS:
                    yield from iterate_tables(Quirks, *names)
                case _:
                    pass


def list_alternatives(kind: types.Type) -> list[types.Type]:
    """List the types that a value may have, without None, which TOML cannot hold."""
    found = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return [one for one in found if not isinstance(one, types.NoneType)]


def find_docstrings(struct: type[Any]) -> dict[str, str]:
    """Find the string under each field of a struct, on one line."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def describe_type(kind: types.Type) -> str:
    """Describe a type for a person who writes TOML."""
    match kind:
        case types.LiteralType(values=values):
            return ", ".join(f"`{json.dumps(value)}`" for value in values)
        case types.UnionType():
            return " or ".join(map(describe_type, list_alternatives(kind)))
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return f"list of {describe_type(item)}s"
        case types.DictType() | types.StructType():
            return "table"
        case _:
            return TYPES[type(kind)]


def describe_default(field: FieldInfo) -> str:
    """Describe the default of a field as TOML, "" if there is none."""
    if field.required:
        return "required"
    default = field.default_factory() if callable(field.default_factory) else field.default
    match default:
        case None | dict() | msgspec.Struct():
            return ""
        case _:
            return f"`{json.dumps(default)}`"


def render_table(name: str, struct: type[Any]) -> str:
    """Render a table of config.toml as a table of Markdown, without the keys that are tables of their own."""
    docstrings = find_docstrings(struct)
    rows = ["| key | type | default | meaning |\n", "|---|---|---|---|\n"]
    for field in msgspec.structs.fields(struct):
        kind = describe_type(types.type_info(field.type))
        cells = [f"`{field.encode_name}`", kind, describe_default(field), docstrings.get(field.name, "")]
        rows += [f"| {' | '.join(cells)} |\n".replace("  ", " ")] if docstrings.get(field.name) else []
    title = f"### `[{name}]`" if name else "### At the top of the file"
    return f"{title}\n\n{''.join(rows)}"


def render() -> str:
    """Render all tables that have keys."""
    pages = [render_table(name, struct) for name, struct in iterate_tables()]
    return "\n".join(page for page in pages if "| `" in page)


def insert(text: str, tables: str) -> str:
    """Put the tables between the two markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(insert(TARGET.read_text("utf-8"), render()), encoding="utf-8")
