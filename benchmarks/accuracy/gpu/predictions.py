"""Predicted step times and memory of measured rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from autopar.cost import Profile
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.odds import operators_variance
from autopar.simulate import Overlap, Sums, Timeline, simulate
from autopar.simulate import predict as told_of
from benchmarks.accuracy.gpu.float8 import cast_before
from benchmarks.accuracy.gpu.memory import allocated_bytes, held
from benchmarks.accuracy.gpu.plans import alike, plan_of, profile_name, reason_against, resized, traced
from benchmarks.accuracy.gpu.rows import Row
from benchmarks.accuracy.gpu.softwares import Software, software_of
from benchmarks.accuracy.gpu.steps import once_a_step_s

EVEN = 0.5
TF32_TIMES = 2  # of bfloat16's, by the data sheets of A100 and H100
MATRIX_CORES = 2  # bfloat16 is faster than float32 by more where it has such cores
Result = TypeVar("Result")
FLOAT8, BFLOAT16, FLOAT16, FLOAT32 = "float8_e4m3fn", "bfloat16", "float16", "float32"  # in the names of tables


@dataclass(frozen=True)
class Planned:
    """A row with its plan and the graph that it is on; or why it has none."""

    row: Row
    graph: Graph | None = None
    plan: Plan | None = None
    reason: str = ""


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a row; or why nothing is. reserved_bytes: what the allocator holds at the peak;
    needed_bytes: what 98 of 100 such runs hold at most; is_tight: it is so much that the allocator would free and ask
    again, step after step; fits_probability: of the device that is most likely too small."""

    row: Row
    seconds: float = 0.0
    reserved_bytes: float = 0.0
    needed_bytes: float = 0.0
    fits: bool = True
    is_tight: bool = False
    reason: str = ""
    fits_probability: float = 1.0
    operators_variance: float = 0.0  # of the logarithm of the step time, that the profile's residuals explain
    held_s: float = 0.0  # what the step is expected to be held up by nodes, which is in none of the other figures


def planned(rows: Sequence[Row], softwares: tuple[Software, ...]) -> Iterator[Planned]:
    """Each row, in an order in which those of a model are together."""
    wanted = []
    for row in rows:
        found, failed = told(reason_against, row, softwares)
        if reason := failed or found:
            yield Planned(row, reason=reason)
        else:
            wanted.append(row)
    for members in alike(wanted, softwares):
        yield from _planned_alike(members, software_of(members[0].framework, softwares))


def _planned_alike(members: Sequence[Row], software: Software) -> Iterator[Planned]:
    """Rows of one model, which is traced once."""
    whole, why_not = told(traced, members, software)
    for _, same in groupby(members, lambda row: (row.seq, row.global_batch)):
        own = list(same)
        graph, reason = (None, why_not) if whole is None else told(resized, whole, members, own[0])
        for row in own:
            progress(f"{row.source}: {row.id}")
            found, reason_of_row = (None, reason) if graph is None else told(plan_of, graph, row, software)
            if found is None:
                yield Planned(row, reason=reason_of_row)
            else:
                yield Planned(row, found[0], replace(found[1], simulator=None))


def told(function: Callable[..., Result], *arguments: Any) -> tuple[Result | None, str]:
    """Its result; or why there is none: no row ends the others. What is not autopar's own word is a mistake of ours,
    and is said to be."""
    try:
        return function(*arguments), ""
    except AutoparError as error:
        return None, f"template_plan: {error}"
    except Exception as error:  # whatever it is, it is listed
        return None, f"a mistake of this benchmark: {type(error).__name__} in {function.__name__}: {error}"


def predicted(item: Planned, softwares: tuple[Software, ...], profiles: Mapping[str, Profile]) -> Predicted:
    """`predict`; where that fails, why."""
    found, reason = told(predict, item, softwares, profiles)
    return found or Predicted(item.row, reason=reason)


def predict(item: Planned, softwares: tuple[Software, ...], profiles: Mapping[str, Profile]) -> Predicted:
    """The simulator's word on a planned row. profiles: of the devices, by name."""
    row = item.row
    if item.graph is None or item.plan is None:
        return Predicted(row, reason=item.reason)
    software = software_of(row.framework, softwares)
    profile = used_profile(profiles[profile_name(row.gpu)], software, row.precision, row.network)
    timeline = simulate(item.graph, item.plan, profile, overlap_of(row, software))
    seconds = timeline.step_time_ns / 1e9 + once_a_step_s(row, item.graph, item.plan, software, profile)
    variance = operators_variance(replace(item.plan, predicted=told_of(timeline)), item.graph, profile)
    held_s = software.held_s(-(-row.gpus // row.per_node), row.waits)
    found = memory_of(item, software, timeline, profile)
    return replace(found, seconds=seconds, operators_variance=variance, held_s=held_s)


def memory_of(item: Planned, software: Software, timeline: Timeline, profile: Profile) -> Predicted:
    """What the one device takes that a row's table speaks of, and how likely all have enough."""
    assert item.graph is not None and item.plan is not None
    row, memory, capacity = item.row, profile.memory, profile.facts.capacity_bytes
    if memory is None:
        most = max(allocated_bytes(item.graph, item.plan, software, timeline))
        return Predicted(row, reserved_bytes=most, needed_bytes=most, fits=most <= capacity)
    lanes = held(item.graph, item.plan, software, timeline, memory)
    told = lanes[0] if row.tells_first else max(lanes)
    outside = memory.outside_bytes(sum(count > 1 for count in (row.dp, row.tp, row.pp)))
    odds = min(memory.fits_probability(lane.reserved_bytes + outside, capacity, lane.spread) for lane in lanes)
    share = (max(lanes).reserved_bytes + outside) / capacity
    return Predicted(
        row, reserved_bytes=told.reserved_bytes, needed_bytes=memory.needed_bytes(told.reserved_bytes, told.spread),
        fits=odds > EVEN, is_tight=share > memory.tight_share, fits_probability=odds,
    )  # fmt: skip


def overlap_of(row: Row, software: Software) -> Overlap:
    """What a row's software sends beside computation. Casts are in its constants: of its step, or its optimizer."""
    early = Sums.BUFFERED if software.keeps_sums else Sums.EARLY
    sums = Sums.LATE if row.zero in software.late_sums else early
    return Overlap(
        sums, software.cuts_activations, casts=False, adds=not software.adds_in_products,
        balances=software.context != "ring", queues_apart=software.queues_apart,
        bucket_bytes=software.bucket_bytes(row.dp * row.cp, row.zero),
    )  # fmt: skip


_profiles: dict[tuple[int, int, str, str], tuple[Profile, Software, Profile]] = {}


def used_profile(profile: Profile, software: Software, precision: str, network: str) -> Profile:
    """The same one for the same four, since costs are remembered by profile."""
    key = id(profile), id(software), precision, network
    if key not in _profiles:
        used = software.on(profile.on(network) or profile)
        _profiles[key] = profile, software, IN_PRECISION.get(precision, _as_it_is)(used)
    return _profiles[key][2]


def with_float8(profile: Profile) -> Profile:
    """Products of bfloat16 take as long as those of float8 do: plans have no such precision, and softwares that train
    in it keep everything but products in bfloat16. Those of float16 (`plans.with_half_head`) take as long as before.
    Gradients of weights are of operands that are cast already (`float8`)."""
    products = {name: table for name, table in profile.tables.items() if table.family == "matmul"}
    half = {name.replace(BFLOAT16, FLOAT16): table for name, table in products.items() if BFLOAT16 in name}
    peak = profile.peak_flops(FLOAT8)
    eighth = {
        name.replace(FLOAT8, BFLOAT16): cast_before(table, peak) if name.startswith("TN") else table
        for name, table in products.items() if FLOAT8 in name
    }  # fmt: skip
    renamed = {name: replace(table, name=name) for name, table in (half | eighth).items()}
    return replace(profile, tables={**profile.tables, **renamed}, _shared={})


def with_float16(profile: Profile) -> Profile:
    """What is of bfloat16 takes as long as in float16: plans have no such precision, and differ in nothing else."""
    rates = {**profile.facts.peak_flops, BFLOAT16: profile.peak_flops(FLOAT16)}
    half = {
        name.replace(FLOAT16, BFLOAT16): table for name, table in profile.tables.items() if name.endswith(f" {FLOAT16}")
    }
    renamed = {name: replace(table, name=name) for name, table in half.items() if name not in profile.tables}
    facts = replace(profile.facts, peak_flops=rates)
    return replace(profile, facts=facts, tables={**profile.tables, **renamed}, _shared={})


def with_tf32(profile: Profile) -> Profile:
    """Products of float32 take twice as long as those of bfloat16: their cores do half as much of it (A100, H100), and
    it has twice the bytes. As they are where a device has no such cores."""
    if profile.peak_flops(BFLOAT16) <= MATRIX_CORES * profile.peak_flops(FLOAT32):
        return profile
    tables = {
        name.replace(BFLOAT16, FLOAT32): replace(
            table, name=name.replace(BFLOAT16, FLOAT32), unit_ns=table.unit_ns * TF32_TIMES
        )
        for name, table in profile.tables.items() if table.family == "matmul" and BFLOAT16 in name
    }  # fmt: skip
    rates = {**profile.facts.peak_flops, FLOAT32: profile.peak_flops(BFLOAT16) / TF32_TIMES}
    return replace(
        profile, facts=replace(profile.facts, peak_flops=rates), tables={**profile.tables, **tables}, _shared={}
    )


def _as_it_is(profile: Profile) -> Profile:
    return profile


#: the profile as a row's precision uses it
IN_PRECISION: Mapping[str, Callable[[Profile], Profile]] = {"fp8": with_float8, "fp16": with_float16, "tf32": with_tf32}


def progress(text: str) -> None:
    """On a terminal, in place."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
