"""JSON schema of the messages of the WebSocket, made from their models."""

from __future__ import annotations

from typing import Any

from stream.client_messages import CLIENT
from stream.protocol import PROTOCOL
from stream.server_messages import SERVER


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of all messages: `client`, `server` and shared `$defs`."""
    client = CLIENT.json_schema(ref_template="#/$defs/{model}")
    server = SERVER.json_schema(ref_template="#/$defs/{model}")
    definitions = {**client.pop("$defs"), **server.pop("$defs")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": PROTOCOL,
        "client": client,
        "server": server,
        "$defs": dict(sorted(definitions.items())),
    }
