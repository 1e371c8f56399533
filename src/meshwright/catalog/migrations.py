"""Documents of an older schema become documents of the newest, one step at a time; newer ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.spec.errors import ConfigError, Problem

Step = Callable[[dict[str, Any]], dict[str, Any]]

NEWEST: Mapping[str, int] = {"JobSpec": 1, "ClusterSpec": 1, "ModelSpec": 1, "Plan": 1, "Design": 1, "Decision": 1}

STEPS: Mapping[tuple[str, int], Step] = {}
"""`(kind, schema)` to the function that makes a document of `schema + 1` of it. No schema has changed yet."""


def migrate(
    values: Mapping[str, Any],
    *,
    kind: str,
    newest: Mapping[str, int] = NEWEST,
    steps: Mapping[tuple[str, int], Step] = STEPS,
) -> dict[str, Any]:
    """`values` as a document of the newest schema of `kind`. Raises ConfigError when its schema is not readable."""
    result = dict(values)
    if kind not in newest:
        return result
    schema, last = result.get("schema", newest[kind]), newest[kind]
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise ConfigError(Problem(what=f"schema {schema!r} is not a whole number from 1", where="schema"))
    if schema > last:
        why = f"this meshwright reads schema {last} and older"
        raise ConfigError(Problem(what=f"schema {schema} is newer", where="schema", why=why, fix="update meshwright"))
    while schema < last:
        step = steps.get((kind, schema))
        if step is None:
            raise ConfigError(Problem(what=f"no way from schema {schema} of {kind} to {schema + 1}", where="schema"))
        result = step(result)
        schema += 1
        result["schema"] = schema
    return result
