"""Plans as text: one screen for `print(plan)`, and the difference of two plans. The reasons are in `explain`."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autopar.ir.algorithm import ADASUM, BACKUP, PIPEDREAM
from autopar.ir.exchange_table import ExchangeTable
from autopar.ir.labels import storage_text
from autopar.ir.mesh import LogicalMesh
from autopar.ir.naming import printable
from autopar.ir.offload import stored_on_host
from autopar.ir.placement import format_placement
from autopar.ir.plan import COMPILED, Breakdown, Fork, GraphPlan, Plan, Prediction, Stage, Storage, rule_counts
from autopar.ir.recompute import is_operator_call, modules_again, node_of_call
from autopar.ir.schedule import PLAIN
from autopar.ir.shares import alike_ranks, axis_text
from autopar.ir.slice_table import SliceTable
from autopar.ir.tried import Tried
from autopar.show.gradients import gradients_text
from autopar.show.hsdp import hsdp_text
from autopar.substitute import exchanges

MOST_STAGES, MOST_ROWS = 10, 22
"""Lines of stages, and of parameters, that a screen has room for beside the others."""


def plan_text(plan: Plan) -> str:
    """The plan on one screen: mesh, predictions, then placements by distinct module."""
    search = plan.search
    lines = [
        f"{plan.model} on {plan.mesh} as ({_axes(plan)}), {plan.mode}, microbatches {plan.microbatches}",
        prediction_text(plan.predicted, plan.memory_limit),
        f"  search      {search.method}, {search.stop_reason}: cost {time_text(search.cost_ns)}, "
        f"lower bound of that problem {time_text(search.lower_bound_ns)}, {search.seconds:.1f} s of work",
    ]
    evaluates = "the model is trained as after model.eval(): no dropout, batch norms by running statistics"
    replicated = [op for op, source in plan.coverage.items() if source.startswith("replicated")]
    covered = f"replicated: {_counted(replicated, 8)}" if replicated else "all with rules"
    rows = {
        "eval mode": evaluates if plan.mode == "train" and not plan.training else "",
        "runs": "its blocks compiled, as by rank.compile()" if plan.runs == COMPILED else "",
        "refined": refinement_text(plan),
        "instead": "; ".join(runners_up(plan)),
        "coverage": f"{len(plan.coverage)} operators, {covered}",
        "checked against eager:": str(plan.checked_against_eager),
        "costs": sources_text(plan.sources),
        "algorithm": "" if plan.algorithm is None else algorithm_text(plan),
        "allowed": ", ".join(plan.allow),
        "routing": "" if plan.routing is None else str(plan.routing),
        "rewritten": substitutions_text(plan) if plan.substitutions else "",
        "exchange": exchanges_text(plan),
        "recompute": recompute_text(plan) if plan.recompute else "",
        "in bits": in_bits_text(plan),
        "in 8 bits": in_eight_bits_text(plan),
        "inexact": "" if plan.gradient_error is None else f"{plan.gradient_error}",
        "copied out": copied_out_text(plan) if plan.copied_out else "",
        "offload": offload_text(plan),
        "hsdp": hsdp_text(plan),
        "gradients": gradients_text(plan),
    }
    lines += [f"  {name.ljust(11)} {text}" for name, text in rows.items() if text]
    lines += share_lines(plan)
    lines += _forks_lines(plan)
    stages = [_stage(plan, number) for number in range(len(plan.stages))] if len(plan.stages) > 1 else []
    if len(stages) > MOST_STAGES:
        stages[MOST_STAGES - 2 : -1] = [f"  and {len(stages) - MOST_STAGES + 1} stages more, then"]
    lines += stages
    placements = ["", *_inputs(plan), *_parameters(plan)] if any(stage.axes for stage in plan.stages) else []
    return printable("\n".join([*lines, *placements]))


def algorithm_text(plan: Plan) -> str:
    """How copies of the parameters meet, and that this is not what one device computes."""
    assert plan.algorithm is not None, "asked for of plans under an algorithm"
    algorithm = plan.algorithm
    if algorithm.name == PIPEDREAM:
        return (
            f"{algorithm}: each stage updates its weights after every microbatch, and keeps up to {len(plan.stages)} "
            "versions of them; not what one device computes"
        )
    size = next(axis.size for axis in plan.stages[0].axes if axis.name == algorithm.axis)
    if algorithm.is_compressed:
        how = "gradients are summed in fewer bits, and what these leave out comes with the next step"
    elif algorithm.name == ADASUM:
        how = "gradients of copies are combined by how far they agree"
    elif algorithm.name == BACKUP:
        taken = size - int(algorithm.amount)
        how = f"updates take the first {taken} gradients; predicted with all ranks alike, where that saves nothing"
    else:
        first = f"after {algorithm.after} updates of summed gradients, " if algorithm.after else ""
        how = f"{first}copies take their mean after every {algorithm.period} updates"
    return f"{algorithm}: {size} copies ({algorithm.axis}); {how}; not what one device computes"


def refinement_text(plan: Plan) -> str:
    """ "17.6 ms → 17.2 ms by 4 changes that MCMC kept of 1,000 proposals": what came of the refinement, if anything; or
    why there was none."""
    refined = plan.search.refinement
    if refined is not None and not refined.proposals:
        return f"not: {refined.stop_reason}"
    if refined is None or not refined.moves:
        return ""
    count = len(refined.moves)
    changes = f"{count} changes" if count > 1 else "a change"
    return (
        f"{time_text(refined.before_ns)} → {time_text(refined.after_ns)} by {changes} that MCMC kept of "
        f"{refined.proposals:,} proposals"
    )


def exchanges_text(plan: Plan) -> str:
    """How tokens travel to experts, and what to slices of them, by the rows of the busiest rank, or how many experts
    have replicas, in how many layers; nothing where it is fixed and none has."""
    tables = {exchanges.LOAD_RULE: ExchangeTable.parse, exchanges.SLICE_RULE: SliceTable.parse}
    found = [(tables[step.rule](step.binding.get("table")), step) for step in plan.substitutions if step.rule in tables]
    lines = [f"{table} ×{len(step.roots)}" for table, step in found]
    lines += [
        f"replicas of {step.binding.get('replicas')} experts, those with most rows ×{len(step.roots)}"
        for step in plan.substitutions
        if step.rule == exchanges.REPLICA_RULE
    ]
    return "; ".join(lines)


def substitutions_text(plan: Plan) -> str:
    """ "merge-linears ×64 (all proved), saving 3.1 ms on one device; without, a step takes 9.7 ms": rules, how often
    each was applied, and the plan of the model's own graph before it was refined, where that is known."""
    tested = {step.rule for step in plan.substitutions if step.status != "proved"}
    proved = "all proved" if not tested else f"{', '.join(sorted(tested))} tested only"
    gain_ns, searched = sum(step.gain_ns for step in plan.substitutions), plan.search.rewriting
    gain = f"saving {time_text(gain_ns)}" if gain_ns >= 0 else f"costing {time_text(-gain_ns)}"
    step_ns = searched.graphs[0].step_time_ns if searched and searched.graphs else None
    without = f"; without, a step takes {time_text(step_ns)}" if step_ns is not None else ""
    counts = rule_counts(plan.substitutions)
    rules = _counted([rules_text({rule: count}) for rule, count in counts.items()], 4)
    return f"{rules} ({proved}), {gain} on one device{without}"


def rules_text(counts: Mapping[str, int]) -> str:
    """ "merge-linears ×64, causal-mask", or "the graph as it is" for none."""
    texts = [f"{rule} ×{count}" if count > 1 else rule for rule, count in counts.items()]
    return ", ".join(texts) or "the graph as it is"


def graphs_text(plan: Plan) -> str:
    """ "the graph as it is: 9.73 ms, slower by 27.1%; merge-affines ×16: 7.65 ms, taken": each equal graph that was
    planned, by its fastest plan; "" where none was."""
    searched = plan.search.rewriting
    if searched is None or len(searched.graphs) < 2:
        return ""
    fastest: dict[str, GraphPlan] = {}
    for found in sorted(searched.graphs, key=lambda found: (found.outcome != "taken", found.step_time_ns or math.inf)):
        fastest.setdefault(rules_text(found.rules), found)
    return "; ".join(
        f"{_few_rules(found.rules)}: "
        + (f"{time_text(found.step_time_ns)}, " if found.step_time_ns is not None else "")
        + found.outcome
        for found in fastest.values()
    )


def _few_rules(counts: Mapping[str, int]) -> str:
    """As `rules_text`; of many the first, and how many more."""
    most = dict(sorted(counts.items(), key=lambda item: -item[1])[:_MOST_RULES])
    more = len(counts) - len(most)
    return rules_text(most if more else counts) + (f" and {more} rules more" if more > 1 else "")


_MOST_RULES = 2


def share_lines(plan: Plan) -> list[str]:
    """Which ranks get how much of the batch; nothing where all get as much."""
    axes = plan.stages[0].axes
    axis = next((axis for axis in axes if axis.shares), None)
    if axis is None:
        return []
    parts = []
    for ranks in alike_ranks(plan.mesh, axes):
        share, last = axis.shares[ranks.start // axis.stride % axis.size], ranks.stop - 1
        where = f"rank {last}" if len(ranks) == 1 else f"ranks {ranks.start} to {last}"
        parts.append(f"{share}/{axis.units} on {where} ({plan.mesh.group_of(ranks).profile})")
    each = "each microbatch" if plan.microbatches > 1 else "the batch"
    return [f"  shares      of {each} over {axis.name}: {', '.join(parts)}"]


def _forks_lines(plan: Plan, most: int = 4) -> list[str]:
    """A line for each fork, of the first few; those of equal blocks in one."""
    counts = Counter(re.sub(r"\.\d+(?=[. ])", ".*", fork_text(plan, f)) for s in plan.stages for f in s.forks)
    texts = [text + _times(count) for text, count in counts.items()]
    more = [f"and {len(texts) - most} forks more"] if len(texts) > most else []
    return [f"  branches    {text}" for text in (*texts[:most], *more)]


def fork_text(plan: Plan, fork: Fork) -> str:
    """ "beside each other on tp: 0: user (11 operators); 1: item (11)": what runs at which coordinate."""
    parts = []
    for branch in fork.branches:
        modules = [m for m in dict.fromkeys(_module(plan, name) for name in branch.nodes) if m]
        tops = [m for m in modules if not any(m.startswith(f"{other}.") for other in modules)]
        where = ", ".join(tops[:2]) + (" …" if len(tops) > 2 else "") or "(root)"
        parts.append(f"{branch.coordinate}: {where} ({len(branch.nodes)} operators)")
    return f"beside each other on {fork.axis}: {'; '.join(parts)}"


def runners_up(plan: Plan, most: int = 3) -> list[str]:
    """ "4 stages of 2x2, 1f1b, 8 microbatches: 9.1 ms": the next best settings that were simulated and fit."""
    found: dict[str, int] = {}
    for row in plan.search.tried:
        step = row.step_time_ns
        if step is not None and (row.peak_bytes or 0) <= plan.memory_limit and row.mesh is not None:
            name = _setting_text(row)
            found[name] = min(step, found.get(name, step))
    chosen = next((name for name, step in found.items() if step == plan.predicted.step_time_ns), None)
    rest = sorted((step, name) for name, step in found.items() if name != chosen)
    return [f"{name}: {time_text(step)}" for step, name in rest[:most]]


def _setting_text(row: Tried) -> str:
    stages, count, again = row.stages or 1, row.microbatches or 1, row.recompute or "none"
    parts = [f"{stages} stages of {row.mesh}, {row.schedule or PLAIN}" if stages > 1 else f"mesh {row.mesh}"]
    parts += [f"template {row.template}"] if row.template is not None else []
    parts += [f"{count} microbatches"] if count > 1 else []
    parts += [f"recompute {again}"] if isinstance(again, str) and again != "none" else []
    parts += [f"{again} modules recomputed"] if isinstance(again, int) else []
    return ", ".join(parts)


def offload_text(plan: Plan) -> str:
    """ "21 of 21 stored tensors with gradients and optimizer state, 1.17 MB on each host at most, over a simulated link
    of 1 GB/s down and 1 GB/s up": what is kept on the host, "" where nothing is."""
    names = {name for stage in plan.stages for name in stored_on_host(stage)}
    if not names:
        return ""
    size = f", {bytes_text(plan.predicted.host_bytes)} on each host at most" if plan.predicted.host_bytes else ""
    link = plan.host_link
    rates = [f"{rate / 1e9:.3g} GB/s" for rate in link[:2]] if link else []
    over = f", over a simulated link of {rates[0]} down and {rates[1]} up" if rates else ""
    return f"{len(names)} of {len(plan.parameters)} stored tensors with gradients and optimizer state{size}{over}"


def recompute_text(plan: Plan) -> str:
    """ "layers.*  ×2 of 4": what is computed again, of how many modules of a like name; "layers.* (gelu, layer_norm ×2)
    ×3 of 4": operators by themselves, of so many blocks; "none"."""
    alike = _alike(plan)
    texts = _counted_modules(modules_again(plan.recompute), alike)
    for (path, operators), count in _operators_again(plan).items():
        times = f"{count} of {alike[path]}" if count < alike[path] else str(count)
        texts.append(f"{path} ({operators})  ×{times}")
    return ", ".join(texts) or "none"


def _alike(plan: Plan) -> Counter[str]:
    """How many modules there are of each like name."""
    called = {tuple(_module(plan, name).split(".")) for name in plan.scopes}
    return Counter(map(_folded, {".".join(parts[:n]) for parts in called for n in range(1, len(parts) + 1)}))


def _counted_modules(paths: Iterable[str], alike: Mapping[str, int]) -> list[str]:
    found = Counter(map(_folded, paths))
    counts = {path: f"{count} of {alike[path]}" if count < alike[path] else str(count) for path, count in found.items()}
    return [f"{path}  ×{count}" for path, count in counts.items()]


def in_bits_text(plan: Plan) -> str:
    """ "max_pool2d ×5, relu ×5": operators that keep bits for their backward pass; "" where none do."""
    kept = (name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_bits)
    return _times_text(Counter(plan.scope(name)[1].split(".")[1] for name in kept))


def in_eight_bits_text(plan: Plan) -> str:
    """ "gelu ×5, linear ×5; …": operators that keep activations in 8 bits, and what that does to gradients; "" where
    none do."""
    kept = [name for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_eight_bits]
    names = _times_text(Counter(plan.scope(name)[1].split(".")[1] for name in kept))
    return f"{names}; not what one device computes" if kept else ""


def copied_out_text(plan: Plan) -> str:
    """ "layers.*  ×3 of 4, 12.3 MB on the host": modules of which what is saved waits there, and the most that a rank
    has there; "none"."""
    held = plan.predicted.host_bytes
    on_host = f", {bytes_text(held)} on the host" if held else ""
    return ", ".join(_counted_modules(plan.copied_out, _alike(plan))) + on_host if plan.copied_out else "none"


def _operators_again(plan: Plan) -> Counter[tuple[str, str]]:
    """In how many blocks of a like name which operators are computed again by themselves."""
    blocks = {path for paths in plan.blocks for path in paths}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name in filter(is_operator_call, plan.recompute):
        module, op, _ = plan.scope(node_of_call(name))
        parts = module.split(".")
        around = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        found[next((path for path in around if path in blocks), module)][op.split(".")[1]] += 1
    return Counter((_folded(path), _times_text(operators)) for path, operators in found.items())


def _times_text(counts: Counter[str]) -> str:
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in sorted(counts.items()))


def sources_text(sources: Mapping[str, str]) -> str:
    """ "facts datasheet; operators measured (matmul, softmax), assumed (gather); links fitted": kinds by block, and
    where the host was busy when it was measured, that."""
    found: dict[str, dict[str, list[str]]] = {}
    for block, source in sources.items():
        group, _, name = block.partition("/")
        found.setdefault(group, {}).setdefault(source.partition(":")[0], []).append(name)
    busy = ["measured on a busy host, `autopar profile` does it anew"] * any("busy host" in s for s in sources.values())
    return "; ".join([*(f"{group} {_kinds(kinds)}" for group, kinds in found.items()), *busy])


def _kinds(kinds: Mapping[str, list[str]]) -> str:
    """Names only where blocks of a group differ in kind."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} ({', '.join(names)})" for kind, names in kinds.items())


def _stage(plan: Plan, number: int) -> str:
    """ "stage 1     ranks 4 to 7: 6 blocks, layers.6 to layers.11", with its axes where stages differ in them."""
    stage = plan.stages[number]
    first, last = stage.ranks.start, stage.ranks.stop - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    alike = len({axes_text(other.axes) for other in plan.stages}) == 1
    placed = ranks if alike else f"{ranks} as ({axes_text(stage.axes)})"
    return f"  {f'stage {number}'.ljust(11)} {placed}: {stage_blocks(plan, stage)}"


def stage_blocks(plan: Plan, stage: Stage) -> str:
    """ "6 blocks, layers.6 to layers.11": the repeated blocks that a stage runs, or "none"."""
    modules = [f"{_module(plan, name)}." for name in stage.nodes]
    first = {
        path: _first(module.startswith(f"{path}.") for module in modules) for paths in plan.blocks for path in paths
    }
    blocks = sorted((path for path, number in first.items() if number is not None), key=lambda path: first[path] or 0)
    named = f"{len(blocks)} blocks, {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else "".join(blocks)
    return printable(named) or "none"


def _first(found: Iterable[bool]) -> int | None:
    return next((number for number, is_there in enumerate(found) if is_there), None)


def _module(plan: Plan, node: str) -> str:
    return plan.scope(node)[0]


def prediction_text(predicted: Prediction, memory_limit: int) -> str:
    """Step time with where it goes, memory at the peak by kind, what all of that takes of a device where that is known,
    and traffic by collective: a line each."""
    kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in predicted.memory.items() if size)
    sent = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in sorted(predicted.comm_bytes.items()) if size)
    memory = f"{bytes_text(predicted.peak_bytes)} of {bytes_text(memory_limit)} a device" + (
        f" ({kinds})" if kinds else ""
    )
    return "\n".join(
        [
            f"  step time   {time_text(predicted.step_time_ns)} predicted{interval_text(predicted)}"
            f"{p99_text(predicted)} ({_breakdown(predicted.breakdown)})",
            f"  memory      {memory}",
            *([f"  device      {taken}"] if (taken := device_text(predicted)) else []),
            f"  traffic     {sent or 'none'} a rank and step",
        ]
    )


def interval_text(predicted: Prediction) -> str:
    """ ", 24.1 to 27.8 ms in nine of ten runs", or nothing where the profile does not say."""
    if predicted.step_time_interval_ns is None:
        return ""
    low, high = map(time_text, predicted.step_time_interval_ns)
    return f", {low} to {high} in nine of ten runs"


def p99_text(predicted: Prediction) -> str:
    """ ", 25.3 ms at the 99th percentile of routings", or nothing where no experts are routed."""
    spent = predicted.step_time_p99_ns
    return "" if spent is None else f", {time_text(spent)} at the 99th percentile of routings"


def device_text(predicted: Prediction) -> str:
    """ "9.13 GB of 85.5 GB taken with segments, context and buffers, 11.4 GB at most in 98 of 100 runs; with
    99.9% below the 75.3 GB from which its allocator thrashes", and what that may take; nothing where the profile does
    not say."""
    if predicted.taken_bytes is None or predicted.fits_probability is None:
        return ""
    taken, capacity = bytes_text(predicted.taken_bytes), bytes_text(predicted.capacity_bytes or 0)
    most = f", {bytes_text(predicted.needed_bytes)} at most in 98 of 100 runs" if predicted.needed_bytes else ""
    odds, tight = f"{predicted.fits_probability:.1%}", predicted.tight_bytes
    below = f"with {odds} below the {bytes_text(tight)} from which its allocator thrashes" if tight else ""
    return (
        f"{taken} of {capacity} taken with segments, context and buffers{most}; {below or f'fits with {odds}'}"
        f"{refilling_text(predicted)}"
    )


def refilling_text(predicted: Prediction) -> str:
    """ "; so full that a step may take 9.76 s more", or nothing."""
    spent = predicted.refilling_ns
    return f"; so full that a step may take {time_text(spent)} more" if spent else ""


def _inputs(plan: Plan) -> list[str]:
    """The model's inputs; of several stages, as the first stage that reads it has it."""
    placed = {name: p for stage in reversed(plan.stages) for name, p in stage.inputs.items()}
    texts = [f"{name} [{format_placement(placed[name])}]" for name in plan.types if name in placed]
    return ["  input " + ", ".join(texts)]


class ParameterRow(NamedTuple):
    """Parameters of numbered blocks that are stored and used alike: "layers.*.weight", how many, how."""

    name: str
    times: int
    storage: Storage
    used: tuple[str, ...]


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """Each distinct parameter, in the order of the stages that keep it."""
    rows: dict[tuple[str, Storage, tuple[str, ...]], dict[str, None]] = {}
    for stage in plan.stages:
        uses = used_placements(stage)
        for tensor, name in plan.parameters.items():
            if tensor in stage.storage:
                used = tuple(sorted(uses.get(tensor, {"unused"})))
                rows.setdefault((_folded(name), stage.storage[tensor], used), {})[name] = None
    return [
        ParameterRow(printable(name if len(names) > 1 else min(names)), len(names), storage, used)
        for (name, storage, used), names in rows.items()
    ]


def screen_rows(plan: Plan) -> list[ParameterRow]:
    """As `parameter_rows`, of which rows that say the same are one where a screen has no room for all.

    What is left over then is counted in the last.
    """
    counts = Counter[ParameterRow]()
    for row in parameter_rows(plan):
        counts[row._replace(times=0)] += row.times
    rows = [row._replace(times=times) for row, times in counts.items()]
    if len(rows) <= MOST_ROWS:
        return rows
    alike: dict[tuple[str, tuple[str, ...]], list[ParameterRow]] = {}
    for row in rows:
        alike.setdefault((storage_text(row.storage), row.used), []).append(row)
    folded = [
        same[0]._replace(name=_together([row.name for row in same]), times=sum(row.times for row in same))
        for same in alike.values()
    ]
    if len(folded) <= MOST_ROWS:
        return folded
    folded.sort(key=lambda row: -row.times)
    rest = folded[MOST_ROWS - 1 :]
    return [*folded[: MOST_ROWS - 1], rest[0]._replace(name="others, the first as", times=sum(r.times for r in rest))]


def _together(names: list[str], most: int = 64) -> str:
    """ "layers.*.{up,down}.weight": names in one, by what they begin and end with; long ones by the first and last."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts)) - 1
    begin = next((n for n in range(shortest) if len({own[n] for own in parts}) > 1), shortest)
    end = next((n for n in range(shortest - begin) if len({own[-1 - n] for own in parts}) > 1), shortest - begin)
    middles = [".".join(own[begin : len(own) - end]) for own in parts]
    text = ".".join([*parts[0][:begin], f"{{{','.join(middles)}}}", *parts[0][len(parts[0]) - end :]])
    return text if len(text) <= most else f"{names[0]} … {names[-1]} ({len(names)} names)"


def _counted(texts: Sequence[str], most: int) -> str:
    """The first of a list, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _parameters(plan: Plan) -> list[str]:
    """One line for each distinct parameter: numbered blocks with equal storage are folded."""
    rows = screen_rows(plan)
    width = max([len(row.name) for row in rows] or [0]) + 1
    texts = [f"{storage_text(row.storage)} → {' | '.join(row.used)}{_times(row.times)}" for row in rows]
    header = f"  {'parameter'.ljust(width)} stored → used"
    return [header, *(f"  {row.name.ljust(width)} {text}" for row, text in zip(rows, texts, strict=True))]


def _times(count: int) -> str:
    return f"  ×{count}" if count > 1 else ""


def used_placements(stage: Stage) -> dict[str, set[str]]:
    """For each stored tensor, the placements in which operators read it."""
    found: dict[str, set[str]] = {}
    for redistribute in stage.redistributes:
        if redistribute.tensor in stage.storage:
            found.setdefault(redistribute.tensor, set()).add(f"[{format_placement(redistribute.target)}]")
    for tensor, storage in stage.storage.items():
        found.setdefault(tensor, {f"[{format_placement(storage.placement)}]"})
    return found


def diff_text(plan: Plan, other: Plan) -> str:
    """One line for each property that differs; numbered blocks are folded, operators counted by module."""
    lines = []
    told = ("model", "mesh", "microbatches", "mode", "optimizer", "precision", "runs", "memory_limit", "routing")
    for name in (*told, "algorithm"):
        if getattr(plan, name) != getattr(other, name):
            lines.append(f"{name}: {getattr(plan, name)} | {getattr(other, name)}")
    if _axes(plan) != _axes(other):
        lines.append(f"axes: {_axes(plan)} | {_axes(other)}")
    if offload_text(plan) != offload_text(other):
        lines.append(f"offload: {offload_text(plan) or 'none'} | {offload_text(other) or 'none'}")
    if plan.recompute != other.recompute:
        lines.append(f"recompute: {recompute_text(plan)} | {recompute_text(other)}")
    if in_bits_text(plan) != in_bits_text(other):
        lines.append(f"in bits: {in_bits_text(plan) or 'none'} | {in_bits_text(other) or 'none'}")
    if in_eight_bits_text(plan) != in_eight_bits_text(other):
        lines.append(f"in 8 bits: {in_eight_bits_text(plan) or 'none'} | {in_eight_bits_text(other) or 'none'}")
    if plan.copied_out != other.copied_out:
        lines.append(f"copied out: {copied_out_text(plan)} | {copied_out_text(other)}")
    if _fork_texts(plan) != _fork_texts(other):
        lines.append(f"branches: {_fork_texts(plan)} | {_fork_texts(other)}")
    for name, number in (("step_time_ns", time_text), ("peak_bytes", bytes_text)):
        values = [getattr(item.predicted, name) for item in (plan, other)]
        lines.append(f"{name.rpartition('_')[0].replace('_', ' ')}: {number(values[0])} | {number(values[1])}")
    lines += _storage_differences(plan, other)
    return printable("\n".join([*lines, *_operator_differences(plan, other)]))


def _operator_differences(plan: Plan, other: Plan) -> list[str]:
    """ "layers.*.norm: 4 operators placed differently": where, and how many."""
    groups: dict[str, list[str]] = defaultdict(list)
    for module in _modules_placed_differently(plan, other):
        groups[_folded(module)].append(module)
    return [
        f"{(folded if len(set(modules)) > 1 else modules[0]) or '(root)'}: {len(modules)} "
        f"operator{'s' if len(modules) > 1 else ''} placed differently"
        for folded, modules in groups.items()
    ]


def _fork_texts(plan: Plan) -> str:
    return ", ".join(fork_text(plan, fork) for stage in plan.stages for fork in stage.forks) or "none"


def _storage_differences(plan: Plan, other: Plan) -> list[str]:
    """ "layers.*.weight: [I] | [S(0)]  ×4": what the plans store in unlike ways, or use so: "used [S(0)] | [R]"."""
    kept, others = _stored(plan), _stored(other)
    used, theirs = _uses(plan), _uses(other)
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for tensor, storage in kept.items():
        twin, uses = others.get(tensor), [" and ".join(sorted(found.get(tensor, ()))) for found in (used, theirs)]
        if twin == storage and uses[0] == uses[1]:
            continue
        text = f"{storage_text(storage)} | {storage_text(twin) if twin else 'absent'}"
        name = plan.parameters.get(tensor, tensor)
        rows[_folded(name), text if twin != storage else f"used {uses[0]} | {uses[1]}"].append(name)
    return [
        f"{name if len(names) > 1 else names[0]}: {text}{_times(len(names))}" for (name, text), names in rows.items()
    ]


def _uses(plan: Plan) -> dict[str, set[str]]:
    """In which placements operators of any stage read each stored tensor."""
    found: dict[str, set[str]] = defaultdict(set)
    for stage in plan.stages:
        for tensor, placements in used_placements(stage).items():
            found[tensor] |= placements
    return found


def _modules_placed_differently(plan: Plan, other: Plan) -> list[str]:
    nodes, others = ({name: node for stage in p.stages for name, node in stage.nodes.items()} for p in (plan, other))
    return [_module(plan, name) for name, node in nodes.items() if others.get(name) != node]


def _stored(plan: Plan) -> dict[str, Storage]:
    """Every stored tensor as the first stage that has it keeps it."""
    return {name: kept for stage in reversed(plan.stages) for name, kept in stage.storage.items()}


def _folded(name: str) -> str:
    """The name with * for the numbers of blocks."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _axes(plan: Plan) -> str:
    if len(plan.stages) == 1:
        return axes_text(plan.stage.axes)
    texts = {axes_text(stage.axes) for stage in plan.stages}
    return f"{len(plan.stages)} stages, {plan.schedule}" + (f", each {texts.pop()}" if len(texts) == 1 else "")


def axes_text(axes: LogicalMesh) -> str:
    """ "d0=16 × d1=8", or "one device"."""
    return " × ".join(map(axis_text, axes)) or "one device"


def _breakdown(parts: Breakdown) -> str:
    again = f"recomputation {time_text(parts.recompute_ns)}, " if parts.recompute_ns else ""
    bubble = f"bubble {time_text(parts.bubble_ns)}, " if parts.bubble_ns else ""
    return (
        f"compute {time_text(parts.compute_ns)}, {again}"
        f"exposed communication {time_text(parts.exposed_communication_ns)}, {bubble}"
        f"optimizer {time_text(parts.optimizer_ns)}"
    )


def time_text(nanoseconds: int) -> str:
    """Three digits with a unit: "1.23 ms"."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds} ns"


def bytes_text(count: int) -> str:
    """Three digits with a decimal unit: "1.23 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
