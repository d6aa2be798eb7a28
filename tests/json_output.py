"""The output of commands with ``--json``, checked by its schema."""

import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest

from runnerkit.commands.cli import main
from runnerkit.commands.schema import schema_of


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that allows no key that it does not describe."""
    schema = deepcopy(schema)
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict) and isinstance(node.get("properties"), dict):
            node["additionalProperties"] = False
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return schema


def output(capsys: Any, command: str, *arguments: object, code: int = 0) -> Any:
    """Run a command with --json; check the last line of its output by the schema, and return it."""
    capsys.readouterr()
    assert main([command, *map(str, arguments), "--json"]) == code
    line = capsys.readouterr().out.splitlines()[-1]
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    jsonschema.validate(value, strict(schema_of(command)), cls=jsonschema.Draft202012Validator)
    return value
