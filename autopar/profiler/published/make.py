"""A profile from a folder of published tables: blocks of operators, and of collectives inside a node, anew.

What a folder says nothing of stays what it was, with its source. A profile's GPU is known by the words of its name
(`h100-80gb` is `H100-SXM5-80GB`); one that was measured by nobody is told like which it is (`like`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from autopar.cost.profile import Profile
from autopar.cost.provenance import Provenance
from autopar.cost.residuals import Residual
from autopar.errors import ProfileError
from autopar.profiler.library import load_profile, profile_names
from autopar.profiler.published.attention import attention_tables
from autopar.profiler.published.carrying import carried, facts_of
from autopar.profiler.published.checking import collective_calls, operator_calls, residuals_of
from autopar.profiler.published.collectives import gpus_of, with_collectives
from autopar.profiler.published.host import with_host_memory
from autopar.profiler.published.moving import CARRIED, carried_moving, with_moving
from autopar.profiler.published.moving import FILES as MOVING_FILES
from autopar.profiler.published.products import product_tables, single_tables
from autopar.profiler.published.rows import Shape, Taken, everything, four_fifths, gpus_in
from autopar.profiler.published.tiles import masked_alike, tiled_tables

MOVED = "moved"
"""Of `profile_from_folder`: only operators that move bytes, updates, and attention as PyTorch runs it."""


def profile_from_folder(folder: Path, base: Profile, date: str, like: str = "", only: str = "") -> Profile:
    """The profile `base` with what the folder's tables say of its GPU, or of the GPU `like` that it resembles, with the
    links and collectives of its own GPU, as far as tables have them, and with residuals of what was left out. only:
    `MOVED`, for a folder of fewer products than the profile was made of.

    Raises ProfileError where the folder knows no such GPU.
    """
    if only == MOVED:
        return _only_moved(folder, base, date)
    made = with_host_memory(folder, blocks_from_folder(folder, base, date, like), date)
    return replace(made, residuals=_residuals(folder, base, date, like), _shared={})


def _only_moved(folder: Path, base: Profile, date: str) -> Profile:
    """Residuals of the families that are made anew, of shapes left out; those of the others stay."""
    made, checked = (_moved(folder, base, date, taken) for taken in (everything, four_fifths))
    families = {name for name, curve in made.operators.items() if curve is not base.operators.get(name)}
    families |= {"attention"} if made.tables != base.tables else set()
    calls = operator_calls(checked, folder, partial(is_of, base), is_left_out)
    new = residuals_of(
        (call for call in calls if call[0] in families),
        Provenance("fitted", f"rows of {folder.name} of shapes left out", date),
    )
    kept = tuple(item for item in base.residuals if not new or item.family not in families)
    return replace(made, residuals=(*new, *kept), _shared={})


def _moved(folder: Path, base: Profile, date: str, taken: Taken) -> Profile:
    moving = _with_moving(folder, base, date, taken) if _may_move(folder, base) else base
    return with_own_attention(folder, moving, date, taken)


def _may_move(folder: Path, base: Profile) -> bool:
    """Whether the folder's rows are of the profile's GPU, or of the one from which it was carried over; points of its
    own are worth more than those of another."""
    if any(is_of(base, gpu) for gpu in gpus_in(folder, MOVING_FILES)):
        return True
    sources = {curve.provenance.source for curve in base.operators.values() if curve.bound == "memory"}
    shipped = [load_profile(name) for name in profile_names()]
    measured = [other.name for other in shipped if any(is_of(other, gpu) for gpu in gpus_in(folder, MOVING_FILES))]
    return all(source.startswith(tuple(CARRIED + name for name in measured)) for source in sources)


def with_own_attention(folder: Path, profile: Profile, date: str, taken: Taken = everything) -> Profile:
    """With tables of the attention that PyTorch runs, where the folder has rows of it on the profile's GPU or on one of
    the same peaks; else under a mask with those of attention without one, so many times."""
    known = list(gpus_in(folder, "attention_forward.csv*"))
    shipped = [load_profile(name) for name in profile_names()]
    alike = [other for other in shipped if other.facts.peak_flops == profile.facts.peak_flops]
    own = [gpu for gpu in known if is_of(profile, gpu)]
    near = own or [gpu for gpu in known if any(is_of(other, gpu) for other in alike)]
    tables = [table for gpu in near[:1] for table in tiled_tables(folder, gpu, date, taken)]
    if not own:
        tables = [
            replace(table, provenance=Provenance("assumed", f"of the same peaks: {table.provenance.source}", date))
            for table in tables
        ]
    tables = tables or [table for gpu in known[:1] for table in masked_alike(folder, gpu, profile, date)]
    return replace(profile, tables={**profile.tables, **{table.name: table for table in tables}}, _shared={})


def blocks_from_folder(folder: Path, base: Profile, date: str, like: str = "", taken: Taken = everything) -> Profile:
    """The profile without its residuals. taken: the shapes that are fitted to."""
    gpu = like or gpu_of(folder, base)
    own = facts_of(gpu) if like else base.facts
    products = product_tables(folder, gpu, own, date, taken)
    tables = [*products, *attention_tables(folder, gpu, date, taken)]
    if like:
        tables = carried(tables, gpu, own, base.facts)
    known = {table.family for table in tables}  # whose launch lies in their times
    measured = [name for name in gpus_in(folder, "gemm_*.csv", "gemm_*.csv.gz") if is_of(base, name)]
    tables += single_tables(folder, measured, base.facts, date, taken)
    operators = {
        name: replace(curve, call_ns=(0, 0)) if name in known else curve for name, curve in base.operators.items()
    }
    made = replace(base, operators=operators, tables={table.name: table for table in tables}, residuals=(), _shared={})
    made = with_own_attention(folder, _with_moving(folder, made, date, taken), date, taken)
    linked = [name for name in gpus_of(folder) if is_of(base, name)]
    return with_collectives(made, folder, linked[0]) if linked else made


def _with_moving(folder: Path, profile: Profile, date: str, taken: Taken) -> Profile:
    """With curves of memory-bound operators: its own, or those of the shipped device with the nearest bandwidth."""
    known = list(gpus_in(folder, MOVING_FILES))
    if any(is_of(profile, gpu) for gpu in known):
        return with_moving(profile, folder, [gpu for gpu in known if is_of(profile, gpu)], date, taken)
    shipped = [load_profile(name) for name in profile_names()]
    others = [other for other in shipped if any(is_of(other, gpu) for gpu in known)]
    if not others:
        return profile
    near = min(others, key=lambda other: abs(math.log(other.facts.memory_bandwidth / profile.facts.memory_bandwidth)))
    own = [gpu for gpu in known if is_of(near, gpu)]
    return carried_moving(profile, with_moving(near, folder, own, date, taken), date)


def _residuals(folder: Path, base: Profile, date: str, like: str) -> tuple[Residual, ...]:
    """Of operators and of collectives; of a device like another, also of families that only that was checked for."""
    checked = blocks_from_folder(folder, base, date, like, four_fifths)
    own = operator_calls(checked, folder, partial(is_of, base), is_left_out)
    found = residuals_of(own, Provenance("fitted", f"rows of {folder.name} of shapes left out", date))
    linked = [name for name in gpus_of(folder) if is_of(base, name)][:1]
    across = (call for name in linked for call in collective_calls(folder, name))
    found += residuals_of(across, Provenance("fitted", f"rows of {folder.name} of sizes left out", date))
    known = {(item.family, item.kind) for item in found}
    others = _carried_residuals(folder, base, date, like) if like else ()
    return found + tuple(item for item in others if (item.family, item.kind) not in known)


def _carried_residuals(folder: Path, base: Profile, date: str, like: str) -> tuple[Residual, ...]:
    """What carrying tables over errs by, in half precision: nothing between devices of the same peaks, whose own
    residuals count; else what the same GPU's tables err by when they are carried to each device that was measured."""
    measured = list(gpus_in(folder, "gemm_*.csv", "gemm_*.csv.gz"))
    shipped = [load_profile(name) for name in profile_names()]
    same = [other for other in shipped if is_of(other, like)]
    is_same = bool(same) and same[0].facts.peak_flops == base.facts.peak_flops
    others = [other for other in shipped if other not in same and any(is_of(other, gpu) for gpu in measured)]
    calls = (
        call
        for other in (same if is_same else others)
        for call in operator_calls(
            blocks_from_folder(folder, other, date, "" if is_same else like, four_fifths),
            folder, partial(is_of, other), is_left_out,
        )
        if call[1] == "bfloat16"
    )  # fmt: skip
    whose = like if is_same else f"{like}, carried to {', '.join(other.name for other in others)}"
    return residuals_of(calls, Provenance("assumed", f"as of {whose}; shapes left out", date))


def is_left_out(shape: Shape) -> bool:
    """Whether a shape is checked against what was made without it."""
    return not four_fifths(shape)


def gpu_of(folder: Path, profile: Profile) -> str:
    """The GPU of the folder's products whose name has all words of the profile's. Raises ProfileError."""
    counts = gpus_in(folder, "gemm_*.csv", "gemm_*.csv.gz")
    fitting = [gpu for gpu, _ in counts.most_common() if is_of(profile, gpu)]
    if fitting:
        return fitting[0]
    raise ProfileError(
        f"expected rows of a GPU like {profile.name!r} in {folder}, found {', '.join(sorted(counts)) or 'none'}; say "
        "with --like which of them it resembles"
    )


def is_of(profile: Profile, gpu: str) -> bool:
    """Whether a GPU of that name is the profile's: all words of one of its names are in it, and no shipped profile's
    name has more of them (the V100 is `V100-PCIe-32GB`; the A100 is not `A100-PCIe-40GB`)."""
    return 0 < _likeness(profile, gpu) >= max(_likeness(load_profile(name), gpu) for name in profile_names())


def _likeness(profile: Profile, gpu: str) -> int:
    names = map(_words, (profile.name, *profile.aliases))
    return max((len(words) for words in names if words <= _words(gpu)), default=0)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("_", "-").split("-"))
