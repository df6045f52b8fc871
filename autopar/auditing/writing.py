"""Writes another job into a file of a framework: the values that differ, in their places; everything else, comments
too, stays as it is. What was written is read back, and refused unless it says the job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autopar.auditing.frameworks import Framework
from autopar.auditing.job import JobFile, TrainingJob
from autopar.auditing.megatron import arguments_of
from autopar.auditing.shell import ScriptCommand, read_script
from autopar.auditing.values import FileValue, json_values, scalar_text, toml_values, yaml_values
from autopar.errors import PlanError

Edits = list[tuple[int, int, str]]


def changed_text(file: JobFile, old: TrainingJob, new: TrainingJob, framework: Framework) -> str:
    """The file's text with the new job in it. Raises PlanError where the file's form cannot say it."""
    wanted = framework.changes(old, new, file)
    if framework.form == "shell":
        return _in_shell(file, wanted)
    values = {"toml": toml_values, "json": json_values, "yaml": yaml_values}[framework.form](file.text, file.name)
    if framework.form == "yaml" and framework.read.__name__ == "read_yaml":
        plain = {key.rpartition(".")[2].strip("_").replace("_", "-"): key for key in values}
        wanted = {plain.get(key, key.replace("-", "_")): value for key, value in wanted.items()}
    insert = {"toml": _into_toml, "json": _into_json, "yaml": _into_yaml}[framework.form]
    text = file.text
    for key, value in wanted.items():
        item = values.get(key)
        is_absent = item is None and value in (None, _default(key))
        if is_absent or (item is not None and _equal(item.value, value)):
            continue
        values = {"toml": toml_values, "json": json_values, "yaml": yaml_values}[framework.form](text, file.name)
        item = values.get(key)
        if item is None:
            text = insert(text, values, key, value)
        elif item.span is None:
            raise PlanError(f"expected {key} as one value on line {item.line} of {file.name}; write {value!r} there")
        else:
            text = text[: item.span[0]] + scalar_text(value, framework.form) + text[item.span[1] :]
    return text


def _default(key: str) -> Any:
    """What a framework takes where such a key is not there."""
    last = key.rpartition(".")[2]
    if last.endswith(("degree", "_size")) and "batch" not in last:
        return 1
    return {"fsdp_activation_checkpointing": False, "fsdp_reshard_after_forward": "always"}.get(last)


def _equal(found: Any, wanted: Any) -> bool:
    return str(found) == str(wanted)


# TOML, JSON, YAML ----------------------------------------


def _into_toml(text: str, values: Mapping[str, FileValue], key: str, value: Any) -> str:
    table, _, name = key.rpartition(".")
    line = f"{name} = {scalar_text(value, 'toml')}\n"
    header = re.search(rf"^\s*\[\s*{re.escape(table)}\s*\][^\n]*\n?", text, re.MULTILINE)
    if header is None:
        return f"{text.rstrip()}\n\n[{table}]\n{line}"
    before = text[: header.end()]
    return before + ("" if before.endswith("\n") else "\n") + line + text[header.end() :]


def _into_json(text: str, values: Mapping[str, FileValue], key: str, value: Any) -> str:
    table, _, name = key.rpartition(".")
    siblings = [item for item in values.values() if item.key.rpartition(".")[0] == table and item.span]
    if siblings and siblings[-1].span:
        start = siblings[-1].span[0]
        begin = text.rfind("\n", 0, start) + 1
        indent = re.match(r"[ \t]*", text[begin:])
        blank = f"\n{indent[0]}" if indent and begin else " "
        end = siblings[-1].span[1]
        return f"{text[:end]},{blank}{scalar_text(name, 'json')}: {scalar_text(value, 'json')}{text[end:]}"
    if any(item.key.startswith(f"{table}.") for item in values.values()):
        raise PlanError(f"expected values in {table} of the file, found objects alone; add {name}: {value} there")
    own = f"{scalar_text(name, 'json')}: {scalar_text(value, 'json')}"
    own = f"{scalar_text(table, 'json')}: {{{own}}}" if table else own
    at = text.index("{") + 1
    return f"{text[:at]}\n  {own}{',' if values else ''}{text[at:]}"


def _into_yaml(text: str, values: Mapping[str, FileValue], key: str, value: Any) -> str:
    table, _, name = key.rpartition(".")
    own = f"{name}: {scalar_text(value, 'yaml')}\n"
    siblings = [item for item in values.values() if item.key.rpartition(".")[0] == table and item.span and item.line]
    if siblings:
        lines = text.splitlines(keepends=True)
        first = lines[siblings[0].line - 1]
        indent = first[: len(first) - len(first.lstrip())]
        lines.insert(siblings[0].line - 1, indent + own)
        return "".join(lines)
    if table and any(item.key == table for item in values.values()):
        raise PlanError(f"expected keys below {table} in the file, found none; add {name}: {value}")
    start = f"{text.rstrip()}\n"
    return start + (f"{table}:\n  {own}" if table else own)


# Shell ----------------------------------------


def _in_shell(file: JobFile, wanted: Mapping[str, Any]) -> str:
    """Values in their places, also where a variable brings them; what is new, or stands nowhere, at the command's end:
    there it counts, the last one of a name does."""
    script = read_script(file.text)
    command = max(script.commands, key=lambda one: len(arguments_of(one, file.text)))
    values = arguments_of(command, file.text)
    shared = Counter(item.span for item in values.values() if item.span)
    edits, added = Edits(), list[str]()
    for name, value in wanted.items():
        item = values.get(name)
        if value is None:
            edits += _without(command, name, file.text) if item else []
        elif item is None:
            is_default = value == 1 and name.endswith("parallel-size")
            added += [] if is_default else [f"--{name}" if value is True else f"--{name} {value}"]
        elif value is True or str(item.value) == str(value):
            continue
        elif item.span and shared[item.span] == 1:
            edits.append((*item.span, str(value)))
        else:
            added.append(f"--{name} {value}")
    if added:
        edits.append((command.end, command.end, " \\\n    " + " ".join(added)))
    text = file.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _without(command: ScriptCommand, name: str, text: str) -> Edits:
    """Takes out an argument and its values; those of a line of their own with the line."""
    found, words = Edits(), command.words
    for at, word in enumerate(words):
        if word.text.partition("=")[0].lstrip("-").replace("_", "-") != name or not word.text.startswith("-"):
            continue
        own = [word]
        for one in words[at + 1 :]:
            if re.match(r"--?[A-Za-z_]|.*\.py$", one.text):
                break
            own.append(one)
        if any(one.span is None for one in own):
            raise PlanError(f"expected --{name} as text of the script, found it computed; take it out by hand")
        for one in own:
            assert one.span is not None
            found.append((one.span[0], one.span[1], ""))
    return found


# Read back ----------------------------------------

SAYS = ("data", "zero", "sharding_ranks", "tp", "sequence_parallel", "pp", "schedule", "chunks", "layers_of_stages",
        "cp", "ep", "micro_batch", "microbatches", "global_batch", "recompute", "recompute_layers",
        "recompute_every")  # fmt: skip
"""What of a job the writing may change."""


def differences(found: TrainingJob, wanted: TrainingJob) -> list[str]:
    """What a file that was written says otherwise than it should."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in SAYS]
    return [f"{name} {is_!r} instead of {should!r}" for name, is_, should in pairs if is_ != should]
