"""Why a plan is as it is: for a module, each decision with the cheapest alternatives and what they would cost."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import accumulate

from autopar.errors import PlanError
from autopar.ir.branches import homes
from autopar.ir.labels import storage_text, strategy_text
from autopar.ir.naming import printable
from autopar.ir.placement import format_placement
from autopar.ir.plan import Alternative, Choice, Plan, Stage
from autopar.ir.recompute import modules_again, operators_again
from autopar.show.hsdp import sharding_groups
from autopar.show.text import bytes_text, fork_text, graphs_text, runners_up, share_lines, time_text, used_placements

SCREEN_LINES = 48
MAX_SHOWN = 4
_HEADER = """Each decision with the cheapest others, and what these add to a step. An operator and the parameters that
it is the first to read go together; every other decision stays as it is."""
PENALTY_NS = 10**11  # more than all but the longest steps: below the price of a constraint's preference


Decision = tuple[str, Choice | None]


def explain_text(plan: Plan, pattern: str) -> str:
    """Every matching parameter and operator: its placements, source line, alternatives, and redistributions.

    pattern: a module path, a parameter's or node's name, or an fnmatch pattern of these. As many alternatives are
    shown as fit on a screen, the cheapest first. "×4": the figures are of four equal blocks together.
    """
    stages = plan.stages
    found = [item for s in stages for item in (*_inputs(plan, s, pattern), *_parameters(plan, s, pattern))]
    found += [item for stage in stages for item in _operators(plan, stage, pattern)]
    conversions = [line for stage in stages for line in _redistributions(plan, stage, pattern)]
    modules = modules_again(plan.recompute)
    again = [path for path in modules if _matches(path, pattern) or f"{pattern}.".startswith(f"{path}.")]
    copied = [path for path in plan.copied_out if _matches(path, pattern) or f"{pattern}.".startswith(f"{path}.")]
    operators = [name for name in plan.scopes if name in operators_again(plan.recompute)]
    by_itself = [name for name in operators if _matches(name, pattern) or _matches(plan.scope(name)[0], pattern)]
    rewritten = list(_substitutions(plan, pattern))
    if not found and not conversions and not rewritten:
        return printable(_no_match(plan, pattern))
    found += [item for stage in stages for item in _forks(plan, stage, pattern)]
    told = [line.strip() for line in share_lines(plan)]
    shown = (
        SCREEN_LINES - 2 - bool(again) - bool(by_itself) - bool(copied) - len(told) - len(conversions) - len(rewritten)
    ) // max(1, len(found)) - 1
    others = runners_up(plan)
    lines = [f"Of whole plans, the next best were {'; '.join(others)}."] if others else []
    lines += [f"Of equal graphs, by a step: {graphs}."] if (graphs := graphs_text(plan)) else []
    lines += [_HEADER, *told]
    if again:
        lines.append(f"Computed again in the backward pass, but for what enters it: {_some(again)}")
    if by_itself:
        lines.append(f"Computed again in the backward pass, by themselves: {_some(by_itself, 'operators')}")
    if copied:
        lines.append(f"What is saved for the backward pass waits on the host: {_some(copied)}")
    lines += rewritten
    for line, choice in found:
        lines += _with_alternatives(plan, line, choice, min(shown, MAX_SHOWN))
    return printable("\n".join([*lines, *conversions]))


def choices_of(plan: Plan, stage: Stage) -> tuple[Choice, ...]:
    """The plan's for stages on the axes of the first, whose alternatives are kept; none for others."""
    return plan.choices if stage.axes == plan.stages[0].axes else ()


def _some(paths: list[str], what: str = "modules") -> str:
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]} … {paths[-1]} ({len(paths)} {what})"


def _with_alternatives(plan: Plan, line: str, choice: Choice | None, shown: int) -> Iterator[str]:
    """The decision and lines for its alternatives, or, where a screen has no room for them, the best one beside it."""
    if choice is None or not choice.alternatives:
        yield line
        return
    together = f"  ×{choice.count}" if choice.count > 1 else ""
    prices = [_price(plan, item) for item in choice.alternatives]
    if shown < 1:
        yield f"{line}{together} | {prices[0]}"
        return
    yield f"{line}{together}"
    yield from (f"    {price}" for price in prices[:shown])
    hidden = choice.num_options - 1 - min(shown, len(prices))
    if hidden:
        yield f"    and {hidden} more"


def is_against_constraint(plan: Plan, item: Alternative) -> bool:
    """Whether what it costs more is a constraint's preference; never said where a step may cost as much."""
    return item.extra_ns > PENALTY_NS > 10 * plan.predicted.step_time_ns


def _price(plan: Plan, item: Alternative) -> str:
    """ "+18.3 µs (compute −2.0 µs, redistribution +20.3 µs), −360 kB: [S(0)]": time a step and memory a device, of all
    the equal blocks together."""
    price = "against a constraint" if is_against_constraint(plan, item) else _time(item)
    memory = f", {_signed(item.extra_bytes, bytes_text(abs(item.extra_bytes)))}" if item.extra_bytes else ""
    return f"{price}{memory}: {item.option}"


def _time(item: Alternative) -> str:
    """What is longer, and in which part where both are."""
    whole = _signed_time(item.extra_ns)
    if item.compute_ns is None or not item.extra_ns:
        return whole
    moved = item.extra_ns - item.compute_ns
    if not (item.compute_ns and moved):
        return f"{whole} of {'compute' if item.compute_ns else 'redistribution'}"
    return f"{whole} (compute {_signed_time(item.compute_ns)}, redistribution {_signed_time(moved)})"


def _signed_time(duration_ns: int) -> str:
    return _signed(duration_ns, time_text(abs(duration_ns)))


def _inputs(plan: Plan, stage: Stage, pattern: str) -> Iterator[Decision]:
    choices = _choices(plan, stage, "input")
    for name, placement in stage.inputs.items():
        if _matches(name, pattern):
            yield f"input {name}: [{format_placement(placement)}]", choices.get(name)


def _parameters(plan: Plan, stage: Stage, pattern: str) -> Iterator[Decision]:
    uses, choices = used_placements(stage), _choices(plan, stage, "stored")
    tensors, groups = {name: tensor for tensor, name in plan.parameters.items()}, sharding_groups(stage)
    for tensor, name in plan.parameters.items():
        if tensor in stage.storage and _matches(name, pattern):
            stored, used = storage_text(stage.storage[tensor]), " | ".join(sorted(uses[tensor]))
            choice = choices.get(tensor) or choices.get(first_twin(plan, tensor, tensors))
            hsdp = f", hsdp: {groups[tensor]}" if tensor in groups else ""
            yield f"parameter {name}: stored {stored}, used {used}{hsdp}", choice


def _operators(plan: Plan, stage: Stage, pattern: str) -> Iterator[Decision]:
    choices, twins, branched = _choices(plan, stage, "node"), node_twins(plan), homes(stage)
    for name, node in stage.nodes.items():
        module, op, source = plan.scope(name)
        if _matches(module, pattern) or _matches(name, pattern):
            line, home = f"{module}: {op} {name}: {strategy_text(node)}  # {source}", branched.get(name)
            if home is not None:  # decided with its whole branch
                yield f"{line}, at {home.axis}={home.coordinate} alone", None
            else:
                yield line, choices.get(name) or choices.get(twins.get(name, name))


def _substitutions(plan: Plan, pattern: str) -> Iterator[str]:
    """Substitutions in modules, of parameters or of tensors that match: what was computed in another way, and why."""
    for step in plan.substitutions:
        names = [*step.modules, *step.roots, *(str(value) for key, value in step.binding.items() if key[0] != "?")]
        if any(_matches(name, pattern) or f"{pattern}.".startswith(f"{name}.") for name in names if name):
            bound = ", ".join(f"{key} = {value}" for key, value in step.binding.items())
            saved = _signed(-step.gain_ns, time_text(abs(step.gain_ns)))
            times = f" ×{len(step.modules)}" if len(step.modules) > 1 else ""
            yield f"substitution {step.rule} ({step.status}){times}: {', '.join(step.roots)}, {saved} on one device"
            yield f"    {step.statement}  with {bound}"


def _forks(plan: Plan, stage: Stage, pattern: str) -> Iterator[Decision]:
    """Branches of which something matches."""
    choices = _choices(plan, stage, "fork")
    for fork in stage.forks:
        names = [name for branch in fork.branches for name in branch.nodes]
        modules = [plan.scope(name)[0] for name in names]
        if any(_matches(name, pattern) for name in (*names, *modules)):
            yield fork_text(plan, fork), choices.get(names[0])


def _signed(value: int, text: str) -> str:
    return f"{'−' if value < 0 else '+'}{text}"


def _redistributions(plan: Plan, stage: Stage, pattern: str) -> Iterator[str]:
    """Equal ones in one line."""
    modules = {name: plan.scope(name)[0] for name in plan.scopes}
    found: dict[str, list[str]] = {}
    for item in stage.redistributes:
        names = (item.tensor, plan.parameters.get(item.tensor, item.tensor), modules.get(item.tensor, ""))
        if any(_matches(name, pattern) for name in names if name):
            steps = ", ".join(f"{stage.axes[s.axis].name}: {s.before} → {s.after}" for s in item.steps)
            found.setdefault(f"to [{format_placement(item.target)}] by {steps}", []).append(item.tensor)
    yield from (f"redistribute {', '.join(tensors)} {how}" for how, tensors in found.items())


def _choices(plan: Plan, stage: Stage, kind: str) -> dict[str, Choice]:
    return {choice.name: choice for choice in choices_of(plan, stage) if choice.kind == kind}


def node_twins(plan: Plan) -> dict[str, str]:
    """Node of an equal block -> the node in its place in the first one, where the choice is kept."""
    twins: dict[str, str] = {}
    inside: dict[str, list[str]] = {path: [] for paths in plan.blocks for path in paths}
    for name in plan.scopes:
        for path in accumulate(plan.scope(name)[0].split("."), "{}.{}".format):
            if path in inside:
                inside[path].append(name)
    for paths in plan.blocks:
        for path in paths[1:]:
            twins.update(zip(inside[path], inside[paths[0]], strict=False))
    return twins


def first_twin(plan: Plan, tensor: str, tensors: Mapping[str, str]) -> str:
    """The tensor in its place in the first of the equal blocks. tensors: by their names in the model."""
    name = plan.parameters[tensor]
    for paths in plan.blocks:
        for path in paths:
            if name.startswith(f"{path}."):
                return tensors.get(paths[0] + name.removeprefix(path), tensor)
    return tensor


def check_matches(plan: Plan, pattern: str) -> None:
    """Raises PlanError with near names where `explain_text` would have nothing to tell."""
    text = explain_text(plan, pattern)
    if text == printable(_no_match(plan, pattern)):
        raise PlanError(text)


def _no_match(plan: Plan, pattern: str) -> str:
    names = [*(plan.scope(name)[0] for name in plan.scopes), *plan.parameters.values(), *plan.scopes, *plan.types]
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(name for name in names if name)), n=3, cutoff=0.5)
    modules = [plan.scope(name)[0] for name in plan.scopes]
    told = (
        f"near names are {', '.join(near)}"
        if near
        else f"its modules are named as {max(modules, key=len, default='')!r} is"
    )
    return f"expected a module, parameter or operator of the plan, found none that matches {pattern!r}; {told}"


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)
