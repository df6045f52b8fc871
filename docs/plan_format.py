"""docs/plan_format.md: the fields of a plan's file, from its schema, and one small plan as it is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import autopar
from autopar.ir.serialization import schema
from docs.markdown import code, page, table
from models import mlp

INTRODUCTION = """
A plan is a JSON file: data alone, of which nothing is executed. `plan.save` and `autopar plan -o` write it,
`autopar.Plan.load` and every command read it. Reading checks it against this schema
([plan.schema.json](../autopar/ir/plan.schema.json)), field by field; `autopar.verify`, and everything that emits or
simulates, then type-checks it against the model, so that a plan that was changed by hand is as safe as one that was
found. Fields that are not listed are refused, and so are fields that do not go with each other, 2.0 for an integer,
NaN, and names of axes that are no identifiers; the error has the place as a JSON pointer ([5,000 changed
files](../benchmarks/sent_files)). Times are integer nanoseconds, sizes bytes.

This is version 3: every plan has `stages`, one or several, and placements are of one microbatch; what an operator does
over microbatches follows from the model. Files of versions 1 and 2 are read, and written again as version 3. These had
an axis of microbatches: where a file says something else of it than follows from the model, it is refused when it is
held against the model.

Names of operators and tensors are those of the traced graph; `parameters` has the model's names of what is stored, and
`scopes` says for each operator what it is and where it comes from. What placements mean is in the
[README](../README.md#how-to-read-a-plan).
"""

EXAMPLE = """
A perceptron with two layers, data parallel on two devices with ZeRO-3 storage:

    autopar.template_plan(model, autopar.Mesh("h100", devices_per_node=2), batch, dp=2, zero=3)

Its nodes say on which placements each operator runs: `linear` on `S(0) R R` takes samples in slices and whole
parameters. Its redistributes gather the parameters for that. `choices`, `coverage`, `sources` and `search` are left
out here, and times and sizes are of this release.
"""


def plan_format() -> str:
    known = schema()
    fields = known["properties"]
    return page(
        "The format of plan files",
        INTRODUCTION,
        "## Fields",
        _fields(known),
        *(part for name in ("stages", "predicted", "search", "substitutions") for part in _nested(fields, name)),
        "### `search.rewriting`",
        _fields(known["$defs"]["rewriting"]),
        "### `search.rewriting.graphs`",
        _fields(known["$defs"]["rewriting"]["properties"]["graphs"]["items"]),
        "### `search.refinement`",
        _fields(known["$defs"]["refinement"]),
        "### `search.refinement.moves`",
        _fields(known["$defs"]["refinement"]["properties"]["moves"]["items"]),
        "## Parts that several fields share",
        table(("part", "type", "meaning"), _shared(known["$defs"])),
        "## A small plan",
        EXAMPLE,
        code(_example(), "json"),
    )


def _fields(schema: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`" + ("" if name in schema["required"] else " (optional)"), _type(field), field["description"])
        for name, field in schema["properties"].items()
    ]
    return table(("field", "type", "meaning"), rows)


def _nested(fields: Mapping[str, Any], name: str) -> Iterator[str]:
    """The fields of an object, or of the objects in a list, and those of the objects in it."""
    part = fields[name].get("items", fields[name])
    yield f"### `{name}`"
    yield _fields(part)
    for inner, field in part["properties"].items():
        if "properties" in field:
            yield f"### `{name}.{inner}`"
            yield _fields(field)


def _shared(definitions: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, part in definitions.items():
        if "description" in part:
            yield f"`{name}`", _type(part), part["description"]


def _type(schema: Mapping[str, Any]) -> str:
    """A type in a few words: "list of text", "text: axes", "one of gpipe, 1f1b"."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "const" in schema:
        return f"{schema['const']}"
    if "enum" in schema:
        return f"one of {', '.join('null' if value is None else str(value) for value in schema['enum'])}"
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    words = {"string": "text", "null": "null", "integer": "integer", "number": "number", "boolean": "true or false"}
    return " or ".join(_container(schema) if kind in ("array", "object") else words[kind] for kind in kinds)


def _container(schema: Mapping[str, Any]) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    values = schema.get("additionalProperties")
    return f"object: {_type(values)} by name" if isinstance(values, dict) else "object"


def _example() -> str:
    config = mlp.Config(widths=(8, 16, 4))
    with torch.device("meta"):
        model = mlp.build(config)
    mesh = autopar.Mesh("h100", devices_per_node=2)
    plan = autopar.template_plan(model, mesh, mlp.example_inputs(config), dp=2, zero=3)
    data = json.loads(plan.to_json())
    for name in ("choices", "coverage", "sources", "search"):
        del data[name]
    return _lines(data)


def _lines(data: Mapping[str, Any]) -> str:
    """A line for each field, and for each entry of the longer ones."""
    rows = []
    for name, value in data.items():
        text = json.dumps(value)
        if len(text) > 80 and isinstance(value, dict):
            inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
            text = "{\n" + inner + "\n  }"
        elif len(text) > 80 and isinstance(value, list):
            text = "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
        rows.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n}"


__all__ = ["plan_format"]
