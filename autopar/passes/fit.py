"""fit: an open graph of which nothing fits → its plan of least memory, or the refusal that names what would do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopar.driver import Candidate, Context, Front, of_plan
from autopar.errors import InfeasibleError
from autopar.places import PlaceSearch
from autopar.planning import fit_or_refuse_over


def fit(front: Front, context: Context) -> Iterator[Candidate]:
    """The plan of least memory of a graph without another. Raises InfeasibleError naming the smallest limit that can be
    met, where that is above the one asked for."""
    for asked in front.open:
        if front.best_of(asked) is None and asked.outline is None:
            yield from _least(asked, front)


def _least(asked: Candidate, front: Front) -> Iterator[Candidate]:
    refusal: InfeasibleError | None = None
    places: PlaceSearch | None = front.kept.get(("place", asked))
    if places is not None:
        try:
            there, plan = fit_or_refuse_over(places.smallest())
            yield of_plan(asked, there.outline, plan, told=there.part.with_traffic)
            return
        except InfeasibleError as error:
            refusal = error
    finalists = front.kept.get(("stage", asked))
    if finalists is not None and asked not in front.refused:
        found, played = finalists.smallest(refusal)
        ways = partial(finalists.placed, found, played), partial(finalists.told, played)
        yield asked.planned(found.outline, played.step_time_ns, played.peak_bytes, *ways)
    elif refusal is not None:
        raise refusal
