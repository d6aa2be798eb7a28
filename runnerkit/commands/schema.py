"""The JSON schema of what commands print with ``--json``, and of the status file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runnerkit.errors import UnknownKeyError

FILE = Path(__file__).with_name("output.schema.json")


def schema_of(name: str | None = None) -> dict[str, Any]:
    """Return the schema of one output, or the file of all, under its key "$defs".

    Args:
        name: of a command, or "status".
    Raises:
        KeyError: `name` is not an output.

    >>> schema_of("status")["$ref"]
    '#/$defs/status'
    """
    schema: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    if name is None:
        return schema
    if name not in schema["$defs"]:
        raise UnknownKeyError(f"there is no schema of {name!r}; choose from {', '.join(schema['$defs'])}")
    return {**schema, "$ref": f"#/$defs/{name}"}
