"""A ladder as text, for a screen: a row a rung, then knees, the front of time and money, and what to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir.naming import printable
from autopar.ir.outline import sizes_text
from autopar.ir.plan import Plan
from autopar.ir.recompute import again_text
from autopar.ladders.capacity import Capacity
from autopar.ladders.rungs import KNEE, Ladder, Rung
from autopar.show.text import bytes_text, time_text

HEAD = ("mesh", "batch", "step", "90% of steps", "samples/s", "tokens/s", "eff.", "bound", "memory", "fits", "money/h",
        "plan")  # fmt: skip


def ladder_text(ladder: Ladder) -> str:
    """All of it."""
    return printable("\n".join(_lines(ladder)))


def _lines(ladder: Ladder) -> Iterator[str]:
    yield f"{ladder.model}: {len(ladder.rungs)} rungs, {len(ladder.fitting)} with a plan, {ladder.processor_s:.1f} s"
    rows = [HEAD, *(rung_row(ladder, rung) for rung in ladder.rungs)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEAD))]
    for row in rows:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    for kind, batch in ladder.curves:
        if len(ladder.of(kind, batch)) > 1:
            knee = ladder.knee(kind, batch)
            yield f"  knee of {kind}, batch {batch}: {knee.devices} devices (each more brings less than {KNEE:.0%})"
    yield from overtaken_lines(ladder)
    for batch in sorted({rung.global_batch for rung in ladder.fitting}):
        front = ladder.front(batch)
        if front:
            said = ", ".join(f"{rung.mesh} ({_money(rung)} a million samples)" for rung in front)
            yield f"  front of time and money, batch {batch}: {said}"
    for batch in sorted({rung.global_batch for rung in ladder.fitting}):
        yield from transition_lines(ladder, batch)
    if ladder.capacity is not None:
        yield from capacity_lines(ladder.capacity)


def overtaken_lines(ladder: Ladder) -> Iterator[str]:
    """The rungs whose devices bring nothing, since fewer of them are at least as fast."""
    for rung in ladder.fitting:
        faster = ladder.overtaken_by(rung)
        if faster is not None:
            lost = rung.step_ns / faster.step_ns - 1
            how = f"{lost:.1%} slower than" if lost > 0 else "no faster than"
            yield f"  {rung.mesh}, batch {rung.global_batch}: {how} {faster.mesh}, which has fewer devices"


def transition_lines(ladder: Ladder, batch: int) -> Iterator[str]:
    """A matrix of what goes from each rung (rows) to each other (columns), where there are several."""
    known = ladder.neighbours(batch)
    if len(known) < 2:
        return
    yield f"  resharding, batch {batch}: bytes over the wire and seconds (*: some is lost, read from a checkpoint)"
    rows = [("from \\ to", *(str(rung.mesh) for rung in known))]
    rows += [(str(old.mesh), *("-" if new is old else _moved(ladder, old, new) for new in known)) for old in known]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "    " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _moved(ladder: Ladder, old: Rung, new: Rung) -> str:
    found = ladder.transition(old, new)
    if found.wire_s is None:
        return f"*{bytes_text(sum(found.moves.read_bytes))} {time_text(round(found.read_s * 1e9))}"
    return f"{bytes_text(found.moves.total_bytes)} {time_text(round(found.wire_s * 1e9))}"


def rung_row(ladder: Ladder, rung: Rung) -> Sequence[str]:
    """One row, as `HEAD` has its columns."""
    if rung.plan is None:
        return (str(rung.mesh), str(rung.global_batch), "-", *[""] * (len(HEAD) - 4), f"none: {rung.refusal}")
    told = rung.plan.predicted
    between = "" if told.step_time_interval_ns is None else " to ".join(map(time_text, told.step_time_interval_ns))
    return (
        str(rung.mesh), str(rung.global_batch), time_text(told.step_time_ns), between, f"{rung.samples_s:.4g}",
        "" if rung.tokens_s is None else f"{rung.tokens_s:.4g}", f"{ladder.efficiency(rung):.0%}",
        f"{rung.bound_ns / told.step_time_ns:.0%}", bytes_text(told.peak_bytes),
        "" if told.fits_probability is None else f"{told.fits_probability:.2f}",
        "" if rung.price is None else f"{rung.price:g}", f"{outline_text(rung.plan)}, {rung.how}",
    )  # fmt: skip


def outline_text(plan: Plan) -> str:
    """ "4 stages of 8x2, 1f1b, 16 microbatches, 160 operators again"."""
    shapes = " + ".join(dict.fromkeys(sizes_text(stage.axes) for stage in plan.stages))
    submeshes = len({stage.first_rank for stage in plan.stages})
    said = [f"{submeshes} stage{'s' * (submeshes > 1)} of {shapes}"]
    said += [plan.schedule] if submeshes > 1 else []
    said += [f"{len(plan.stages)} chunks"] if len(plan.stages) > submeshes else []
    said += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []
    return ", ".join([*said, *([f"{again_text(plan.recompute)} again"] if plan.recompute else [])])


def _money(rung: Rung) -> str:
    return f"{1e6 * (rung.money_per_sample or 0.0):.4g}"


def capacity_lines(found: Capacity) -> Iterator[str]:
    """What to take, and how it is known that nothing better is on the ladder."""
    needs = found.needs
    asked = [f"{needs.jobs} × {needs.tokens:.4g} tokens" if needs.jobs > 1 else f"{needs.tokens:.4g} tokens"]
    asked += [] if needs.deadline is None else [f"by {needs.deadline:g} h"]
    asked += [] if needs.budget is None else [f"for {needs.budget:g}"]
    yield f"  {', '.join(asked)}, least {found.objective}:"
    if found.lacks:
        yield f"    none: {found.lacks}"
        return
    for rung, meshes, jobs in found.taken:
        more = f"{meshes} × " if meshes > 1 else ""
        yield f"    {more}{rung.mesh}, batch {rung.global_batch}" + (f", {jobs} jobs" if jobs > 1 else "")
    money = "" if found.money is None else f", {found.money:.6g} in all"
    yield f"    {found.hours:.4g} h{money}; {found.proof}"
