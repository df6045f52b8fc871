"""Plans as text: one screen for `print(plan)`, the reasons for one pattern, and the difference of two plans."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase

from autopar.ir.placement import format_placement
from autopar.ir.plan import Plan, Storage


def plan_text(plan: Plan) -> str:
    """The plan on one screen: mesh, predictions, then placements by distinct module."""
    axes = " × ".join(f"{axis.name}={axis.size}" for axis in plan.axes) or "one device"
    predicted, search = plan.predicted, plan.search
    lines = [
        f"{plan.model} on {plan.mesh} as ({axes}), {plan.mode}, microbatches {plan.microbatches}",
        f"  step time   {_time(predicted.step_time_ns)} predicted ({_breakdown(plan)})",
        f"  memory      {_bytes(predicted.peak_bytes)} of {_bytes(plan.memory_limit)} a device"
        + (
            f" ({', '.join(f'{kind} {_bytes(size)}' for kind, size in predicted.memory.items() if size)})"
            if predicted.memory
            else ""
        ),
        "  traffic     "
        + (", ".join(f"{kind} {_bytes(size)}" for kind, size in sorted(predicted.comm_bytes.items()) if size) or "none")
        + " a rank and step",
        f"  search      {search.method}, {search.stop_reason}: cost {_time(search.cost_ns)}, "
        f"lower bound {_time(search.lower_bound_ns)}, {search.seconds:.1f} s",
    ]
    replicated = [op for op, source in plan.coverage.items() if source.startswith("replicated")]
    lines.append(
        f"  coverage    {len(plan.coverage)} operators"
        + (f", replicated: {', '.join(replicated)}" if replicated else ", all with rules")
    )
    lines.append("")
    return "\n".join([*lines, *_inputs(plan), *_parameters(plan)])


def _inputs(plan: Plan) -> list[str]:
    return ["  input " + ", ".join(f"{name} [{format_placement(p)}]" for name, p in plan.inputs.items())]


def _parameters(plan: Plan) -> list[str]:
    """One line for each distinct parameter: numbered blocks with equal storage are folded."""
    uses = _uses(plan)
    rows: dict[tuple[str, str], list[str]] = {}
    for tensor, name in plan.parameters.items():
        text = f"{storage_text(plan.storage[tensor])} → {' | '.join(sorted(uses.get(tensor, {'unused'})))}"
        rows.setdefault((re.sub(r"\.\d+\.", ".*.", name), text), []).append(name)
    width = max([len(name) for name, _ in rows] or [0]) + 1
    header = f"  {'parameter'.ljust(width)} stored → used"
    body = [
        f"  {name.ljust(width)} {text}" + (f"  ×{len(names)}" if len(names) > 1 else "")
        for (name, text), names in rows.items()
    ]
    return [header, *body]


def _uses(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for redistribute in plan.redistributes:
        if redistribute.tensor in plan.parameters:
            found.setdefault(redistribute.tensor, set()).add(f"[{format_placement(redistribute.target)}]")
    for tensor, storage in plan.storage.items():
        found.setdefault(tensor, {f"[{format_placement(storage.placement)}]"})
    return found


def storage_text(storage: Storage) -> str:
    """A storage placement with its ZeRO behaviour: "[S(0) I] gathered per use"."""
    mark = " gathered per use" if storage.regather else ""
    return f"[{format_placement(storage.placement)}]{mark}"


def explain_text(plan: Plan, pattern: str) -> str:
    """Every matching operator and parameter with its placements, source line and redistributions."""
    uses = _uses(plan)
    lines = [
        f"parameter {name}: stored {storage_text(plan.storage[tensor])}, used {' | '.join(sorted(uses[tensor]))}"
        for tensor, name in plan.parameters.items()
        if _matches(name, pattern)
    ]
    for name, node in plan.nodes.items():
        module, op, source = plan.scopes.get(name, "||").split("|")
        if _matches(module, pattern) or _matches(name, pattern):
            operands = ", ".join(f"[{format_placement(p)}]" for p in node.operands)
            results = ", ".join(f"[{format_placement(p)}]" for p in node.results)
            lines.append(f"{module}: {op} {name}: {operands} -> {results}  # {source}")
    for redistribute in plan.redistributes:
        if _matches(redistribute.tensor, pattern):
            steps = ", ".join(f"{plan.axes[s.axis].name}: {s.before} -> {s.after}" for s in redistribute.steps)
            lines.append(f"redistribute {redistribute.tensor} to [{format_placement(redistribute.target)}] by {steps}")
    return "\n".join(lines) or f"nothing in the plan matches {pattern!r}"


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def diff_text(plan: Plan, other: Plan) -> str:
    """One line for each property that differs; operators are counted by module."""
    lines = []
    for name in ("model", "mesh", "axes", "microbatches", "mode", "optimizer", "precision"):
        if getattr(plan, name) != getattr(other, name):
            lines.append(f"{name}: {getattr(plan, name)} | {getattr(other, name)}")
    lines += [f"step time: {_time(plan.predicted.step_time_ns)} | {_time(other.predicted.step_time_ns)}"]
    for tensor, storage in plan.storage.items():
        twin = other.storage.get(tensor)
        if twin != storage:
            now = storage_text(twin) if twin else "absent"
            lines.append(f"{plan.parameters.get(tensor, tensor)}: {storage_text(storage)} | {now}")
    modules = Counter(
        plan.scopes.get(name, "").split("|")[0] for name, node in plan.nodes.items() if other.nodes.get(name) != node
    )
    lines += [
        f"{module or '(root)'}: {count} operators placed differently" for module, count in sorted(modules.items())
    ]
    return "\n".join(lines)


def _breakdown(plan: Plan) -> str:
    parts = plan.predicted.breakdown
    return (
        f"compute {_time(parts.compute_ns)}, exposed communication {_time(parts.exposed_communication_ns)}, "
        f"optimizer {_time(parts.optimizer_ns)}"
    )


def _time(nanoseconds: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


__all__ = ["diff_text", "explain_text", "plan_text", "storage_text"]
