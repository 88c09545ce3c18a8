"""TypeScript types of the protocol, made from its models: `web_client/protocol.d.ts`.

Owns the translation of the JSON schemas that pydantic makes. Run as a module to write the file; a
test compares it with the models.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from stream import http_bodies as bodies
from stream import protocol
from stream.schema import json_schema

PATH = Path(__file__).resolve().parent.parent / "web_client" / "protocol.d.ts"
_HTTP = (
    bodies.CreateSession,
    bodies.SessionCreated,
    bodies.SessionStatus,
    bodies.ServiceInfo,
    bodies.ErrorBody,
)
_SIMPLE = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}


def typescript() -> str:
    """Return the declarations."""
    definitions: dict[str, Any] = {}
    for model in _HTTP:
        schema = TypeAdapter(model).json_schema(mode="serialization")
        definitions |= schema.pop("$defs", {})
        definitions[model.__name__] = schema
    messages = json_schema()
    definitions |= messages["$defs"]
    sent_by_client = {_name(each) for each in messages["client"]["oneOf"]}
    sent_by_client |= {"Caps", "CreateSession"}
    lines = [
        f"// Made by stream/typescript.py from the messages of stream/ ({protocol.PROTOCOL}).",
        "",
    ]
    for name, schema in sorted(definitions.items()):
        lines += _declaration(name, schema, is_sent=name in sent_by_client)
    for name, side in (("ClientMessage", "client"), ("ServerMessage", "server")):
        members = " | ".join(_name(each) for each in messages[side]["oneOf"])
        lines.append(f"export type {name} = {members};")
    return "\n".join(lines) + "\n"


def _declaration(name: str, schema: dict[str, Any], *, is_sent: bool) -> list[str]:
    comment = schema.get("description", "").split("\n")[0]
    lines = [f"/** {comment} */"] if comment else []
    if "properties" not in schema:
        return [*lines, f"export type {name} = {_type(schema)};", ""]
    required = schema.get("required", [])
    lines.append(f"export interface {name} {{")
    for key, value in schema["properties"].items():
        # The server leaves out what is None and sends defaults; the client may leave both out.
        is_optional = key not in required if is_sent else _allows_null(value)
        mark = "?" if is_optional and key != "t" else ""
        lines.append(f"  {key}{mark}: {_type(value)};")
    return [*lines, "}", ""]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _name(schema)
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_type(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_type(each) for each in schema['prefixItems'])}]"
        item = _type(schema["items"])
        return f"({item})[]" if "|" in item else f"{item}[]"
    return _SIMPLE[schema["type"]]


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]


def _allows_null(schema: dict[str, Any]) -> bool:
    return any(each.get("type") == "null" for each in schema.get("anyOf", ()))


def main() -> None:
    """Write the file."""
    PATH.write_text(typescript(), encoding="utf-8")
    print(PATH, file=sys.stderr)


if __name__ == "__main__":
    main()
