"""Values against an OpenAPI schema of Kubernetes' kind, in which a field that it does not know is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KINDS = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """What is wrong with `value`, with where it is."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is no quantity"
        elif not re.fullmatch(schema["pattern"], str(value)):
            yield f"{path}: {value!r} is not written as a quantity"
        return
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, bool)):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{path}: {value!r} is less than {schema['minimum']}"
    if kind == "array":
        for index, entry in enumerate(value):
            yield from problems(entry, schema["items"], f"{path}[{index}]")
    if kind == "object":
        yield from (f"{path}.{name} is needed" for name in schema.get("required", ()) if name not in value)
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, entry in value.items():
            if name in known or others:
                yield from problems(entry, known.get(name, others), f"{path}.{name}")
            else:
                yield f"{path}.{name} is not known"
