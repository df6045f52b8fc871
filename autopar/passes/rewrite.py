"""rewrite: the model's graph → graphs equal to it, planned near what was best for the model's own (TASO; Unger et al.,
Unity, 2022): what is fastest on one device need not be what is fastest sharded.

    setting = (logical mesh, submeshes, microbatches)
    the model's own graph       planned in all settings
    each equal graph            planned in the best setting of that plan
    the fastest of these        planned in the next best settings, too; in all where it is much faster than the own one

Settings near the best of one graph are good for an equal graph, of which most is the same. So planning several graphs
takes little more than planning one; but where much of a step is saved, another setting may be the best.
`SearchBudget.everywhere` plans each graph in all settings instead.

Which graphs there are is decided in `autopar.rewrites`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from autopar.clock import Clock
from autopar.driver import PLANNED, Candidate, Context, Front, simplest
from autopar.ir.outline import Outline, sizes_text
from autopar.ir.plan import GraphPlan, Rewriting, rule_counts
from autopar.rewrites import Rewrites, rewrites
from autopar.tunables import ANYWHERE_SHARE, MOST_SETTINGS, NEAR_SETTING, NEARBY_S


def rewrite(front: Front, context: Context) -> Iterator[Candidate]:
    """Opens equal graphs: at first all of them, then the best of those in more settings, as far as that may help."""
    budget, given = context.request.budget, front.best_of(front.given)
    if given is None or not budget.substitutions:
        return
    if front.round == 1:
        clock = Clock.of(NEARBY_S)
        found = front.kept["rewrite", front.given] = rewrites(front.given.graph, context.request), clock
        yield from _first(front, found[0], clock, budget.everywhere)
    elif not budget.everywhere:
        yield from _next(front, context)
    if ("rewrite", front.given) in front.kept:
        context.rewriting = partial(_reported, front, *front.kept["rewrite", front.given])


def _first(front: Front, found: Rewrites, clock: Clock, everywhere: bool) -> Iterator[Candidate]:
    """All graphs, each in the best setting of the model's own, or in all."""
    settings: list[Outline | None] = [None] if everywhere else [*settings_near(front)[:1]]
    for number, variant in enumerate(found.candidates if settings else ()):
        yield Candidate(variant, settings[0], clock if number and not everywhere else None)


def _next(front: Front, context: Context) -> Iterator[Candidate]:
    """The fastest of those that substitutions make in the other settings, unless it is far from the given one; then the
    fastest of all anywhere, where it is much faster."""
    settings, clock = settings_near(front), front.kept["rewrite", front.given][1]
    entries = planned_graphs(front)
    in_first = [entry for entry in entries[1:] if _asked(entry).outline == (settings[0] if settings else None)]
    best = min(in_first, key=_step_ns, default=None)
    others = settings[1:] if best is not None and best.step_ns <= NEAR_SETTING * entries[0].step_ns else []
    if front.round == 2 and best is not None and others:
        yield from (Candidate(best.variant, setting, clock) for setting in others)
    else:
        faster = much_faster(entries)
        if faster is not None and all(_asked(one).outline for one in entries if one.variant is faster.variant):
            yield Candidate(faster.variant, seconds=context.request.budget.seconds * ANYWHERE_SHARE)


def settings_near(front: Front) -> list[Outline]:
    """The setting of the best plan of the model's own graph, and the next best that fitted, the best first.

    Stages that differ are no setting: then the next best with equal ones comes first.
    """
    best = front.best_of(front.given)
    assert best is not None and best.outline is not None
    alike = [(one.step_ns, one.outline) for one in front.found if one.asked is front.given and one.rank == PLANNED]
    others = sorted(((ns, outline.setting) for ns, outline in alike if outline and outline.is_alike), key=_by_step)
    near = [setting for step_ns, setting in others if step_ns <= NEAR_SETTING * best.step_ns]
    if not best.outline.is_alike:
        return list(dict.fromkeys(near or [setting for _, setting in others[:1]]))[:MOST_SETTINGS]
    return list(dict.fromkeys((best.outline.setting, *near)))[:MOST_SETTINGS]


def _by_step(pair: tuple[float, Outline]) -> tuple[float, str, int, int]:
    step_ns, setting = pair
    return step_ns, sizes_text(setting.axes), setting.num_submeshes, setting.microbatches


# What came of it ----------------------------------------


def planned_graphs(front: Front) -> list[Candidate]:
    """The fastest plan of each graph that was looked at, the model's own first; the open graph, which takes endless,
    where nothing fitted."""
    return [front.best_of(asked) or asked for asked in front.begun]


def much_faster(entries: Sequence[Candidate]) -> Candidate | None:
    """The fastest plan where it is so much faster than that of the model's own graph, which comes first, that settings
    near its best say little."""
    given, best = entries[0], min(entries, key=_step_ns)
    return best if best.step_ns * NEAR_SETTING < given.step_ns else None


def _step_ns(entry: Candidate) -> float:
    return entry.step_ns


def _asked(entry: Candidate) -> Candidate:
    return entry.asked or entry


def _reported(front: Front, found: Rewrites, clock: Clock) -> Rewriting:
    """What was looked at, and why it lost."""
    entries = planned_graphs(front)
    taken = simplest([entry for entry in entries if entry.made is not None])
    rows = tuple(_row(entry, taken, found.before_ns) for entry in entries)
    return Rewriting(found.seen, found.stop, round(clock.passed_s, 3), rows)


def _row(entry: Candidate, taken: Candidate, given_ns: int) -> GraphPlan:
    variant, outline = entry.variant, _asked(entry).outline or entry.outline
    is_alike = outline is not None and outline.is_alike
    mesh = sizes_text(outline.axes) if outline and is_alike else ""
    counts = (outline.num_submeshes, outline.microbatches) if outline and is_alike else (0, 0)
    step_ns = None if entry.made is None else round(entry.step_ns)
    one_device_ns = variant.cost_ns if _asked(entry).variant.steps else given_ns
    return GraphPlan(rule_counts(variant.steps), one_device_ns, mesh, *counts, step_ns, _outcome(entry, taken))


def _outcome(entry: Candidate, taken: Candidate) -> str:
    if entry is taken:
        return "taken"
    if entry.made is None:
        return "nothing found that fits"
    if entry.step_ns > taken.step_ns:
        return f"slower by {entry.step_ns / taken.step_ns - 1:.1%}"
    return f"faster by {1 - entry.step_ns / taken.step_ns:.1%}, which a profile cannot tell apart"
