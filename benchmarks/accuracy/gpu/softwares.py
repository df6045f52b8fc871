"""What belongs to the software that was measured, whatever the device: `softwares.json`, one entry each."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from autopar.cost.profile import LIKE, Curve, Host, OperatorCurve, Profile, Provenance
from autopar.profiler.published.attention import with_kernel
from autopar.profiler.text import profile_text

FLOAT32_BYTES = 4
EVERYTHING = 1 << 60  # more bytes than any rank has: all of them are one bucket
HOPPER = ("h100", "h200", "gh200")  # begins of the names of profiles
TABLE = Path(__file__).with_name("softwares.json")


@dataclass(frozen=True, eq=False)
class Software:
    """One entry.

    matches: a regular expression on a row's framework; the first entry that matches counts, the last one matches
    all. model: what its models are made of, beside sizes (fields of `decoder.Config`). late_sums: the kinds of ZeRO
    with which gradients are summed after the backward pass. keeps_sums: float32 sums of the gradients are in memory
    all the time. keeps_gradients: so are the gradients themselves, in 16 bits, until they are summed.
    sums_at_once: what is summed late is one buffer, which all ranks get whole although each needs its shard alone, and
    the parameters come back in one piece, too (`steps`). adds_in_products: the products that make gradients of weights
    add them to the float32 sums. queues_apart: as in `autopar.simulate.Overlap`. bucket_elements: of gradients that
    travel together, the most of a few ranks, and each rank's share of the most of many (`bucket_bytes`); zeros: as
    emitted programs pack them. pinned: of what collectives along tensor parallelism read and wrote
    (`memory.sent_ahead_bytes`), the part whose memory cannot be used again yet; pinned_spread: standard deviation of
    measured over predicted of that. cuts_activations: as in `autopar.simulate.Overlap`.
    attention: its kernel, where that is not the newest that the device's profile knows ("flash2"). context: how
    attention runs over sequences that are split, as `template_plan` calls it. regathers: the norms of a layer after
    which sequence parallelism gathers, and gathers again in the backward pass. wraps_layers: ZeRO gathers each
    layer's parameters together, one layer ahead, as FSDP does. cut: how layers are given to stages, "even" or
    "threshold" (`by_threshold`). slowdowns: by family of operators, how many times as long as the device's curve
    they take: that is of one kernel a call, where a software may need several; on_hopper: how many times that again
    on these devices, where its kernels are of Ampere's instructions. step_ns: what it does once a step while the
    device waits; step_passes: beside that, how often it goes over the rank's gradients in float32, which it clips,
    casts and copies one by one; copy_ns: a copy of what comes back of one parameter from one rank, where that is by
    itself. held_nodes, held_ns: one in so many nodes, where it is in a run, holds up each message that ranks wait for
    (`held_s`) by so much. host: what launching costs, as in `autopar.cost.profile.Host`.
    """

    name: str
    matches: str
    model: Mapping[str, Any]
    late_sums: tuple[int, ...]
    keeps_sums: bool
    keeps_gradients: bool
    sums_at_once: bool
    adds_in_products: bool
    queues_apart: bool
    bucket_elements: tuple[int, int]
    pinned: float
    pinned_spread: float
    cuts_activations: bool
    attention: str
    context: str
    regathers: tuple[str, ...]
    wraps_layers: bool
    cut: str
    slowdowns: Mapping[str, float]
    on_hopper: Mapping[str, float]
    step_ns: int
    step_passes: float
    copy_ns: int
    held_nodes: float
    held_ns: int
    host: Host | None
    provenance: Provenance

    @property
    def has_sums_of_its_own(self) -> bool:
        """Whether what it does once a step depends on its gradients."""
        return bool(self.step_passes) or self.sums_at_once

    def bucket_bytes(self, ranks: int, zero: int) -> int:
        """Of the buckets of float32 sums that so many ranks add up, 0 for those of emitted programs. zero: the kind."""
        if self.sums_at_once and zero in self.late_sums:
            return EVERYTHING
        least, each = self.bucket_elements
        return FLOAT32_BYTES * max(least, each * ranks)

    def held_s(self, nodes: int, waits: int) -> float:
        """What a step of so many waits for messages is expected to be held up on so many nodes: none on one."""
        if nodes < 2 or not self.held_nodes:
            return 0.0
        return -math.expm1(-nodes / self.held_nodes) * waits * self.held_ns / 1e9

    def on(self, profile: Profile) -> Profile:
        """The device's profile as this software uses it."""
        profile = with_kernel(profile, self.attention) if self.attention else profile
        times = self._slowdowns_on(profile)
        slower = {family: _slower(profile.curve(family), family, slowdown) for family, slowdown in times.items()}
        tables = {
            name: replace(table, unit_ns=table.unit_ns * times.get(table.family, 1.0))
            for name, table in profile.tables.items()
        }
        operators = {**profile.operators, **slower}
        return replace(profile, host=self.host, operators=operators, tables=tables, _shared={})

    def _slowdowns_on(self, profile: Profile) -> dict[str, float]:
        more = self.on_hopper if profile.name.startswith(HOPPER) else {}
        found = {family: slowdown * more.get(family, 1.0) for family, slowdown in self.slowdowns.items()}
        apart = (own for own in profile.operators if LIKE.get(own) in found)  # with curves of their own
        return {**{own: found[LIKE[own]] for own in apart}, **found}


def _slower(curve: OperatorCurve, family: str, times: float) -> OperatorCurve:
    sides = [
        Curve(tuple((work, share / times) for work, share in side.knots)) for side in (curve.forward, curve.backward)
    ]
    return replace(curve, family=family, forward=sides[0], backward=sides[1])


def by_threshold(costs: Sequence[float], stages: int) -> list[int]:
    """The stage of each block: one is the last of its stage where it takes the sum of all costs so far to the stage's
    share or beyond it, as nanotron cuts models.

    Its code asks for beyond; that shares of exactly 10 and 5 layers hold no layer more is what memory (0.41 GiB for
    each layer in flight) and times of 1B in 2 and 4 stages say, by 12% to 20% of a stage.
    """
    total, found, stage = sum(costs), list[int](), 0
    for sum_so_far in accumulate(costs):
        found.append(stage)
        stage += stage < stages - 1 and sum_so_far >= total * (stage + 1) / stages
    return found


# The file ----------------------------------------

_KINDS = ("late_sums", "regathers", "bucket_elements")


def read_softwares(path: Path = TABLE) -> tuple[Software, ...]:
    """In the order in which they are asked."""
    return tuple(_software(name, entry) for name, entry in json.loads(path.read_text(encoding="utf-8")).items())


def _software(name: str, entry: Mapping[str, Any]) -> Software:
    provenance = Provenance(**entry["provenance"])
    host = Host(**entry["host"], provenance=provenance) if entry["host"] else None
    kinds: dict[str, Any] = {kind: tuple(entry[kind]) for kind in _KINDS}
    return Software(name, **{**entry, **kinds, "host": host, "provenance": provenance})


def write_softwares(softwares: Sequence[Software], path: Path = TABLE) -> None:
    """The inverse of `read_softwares`."""
    found = {}
    for software in softwares:
        entry = {key: value for key, value in asdict(software).items() if key != "name"}
        entry |= {kind: list(entry[kind]) for kind in _KINDS}
        if entry["host"]:
            entry["host"] = {key: value for key, value in entry["host"].items() if key != "provenance"}
        found[software.name] = entry
    path.write_text(profile_text(found) + "\n", encoding="utf-8")


def software_of(framework: str, softwares: Sequence[Software]) -> Software:
    """The first whose expression is found in the framework's name."""
    return next(item for item in softwares if re.search(item.matches, framework, re.IGNORECASE))
