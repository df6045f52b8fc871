"""What refinement changed, said of each decision beside its alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.intraop import kept_in
from autopar.ir.plan import Alternative, Choice, Move, Plan
from autopar.planning import Place
from autopar.soap import INPUT, STORAGE


def explained(place: Place, plan: Plan, moves: Sequence[Move]) -> tuple[Choice, ...]:
    """Each decision against its alternatives with everything else as it is now; what refinement chose against what was
    there before, with the difference that the simulator finds. Of decisions that are none of the intra-op problem's,
    what the plan had."""
    graph = place.part.graph
    placements = place.placements_with({item.tensor: kept_in(graph, plan, item.tensor) for item in graph.stored})
    choice = placements.choice_of(plan)
    told = plan.choices if choice is None else placements.explained(choice)
    by_name = {(item.name, item.kind): item for item in told}
    for move in moves:
        kind = {STORAGE: "stored", INPUT: "input"}.get(move.kind, "node")
        known = by_name.get((move.name, kind))
        rest = [item for item in known.alternatives if item.option != move.before] if known else []
        cost_ns, num_options = (known.cost_ns, known.num_options) if known else (0, 2)
        simulated = Alternative(f"{move.before} (simulated)", move.gain_ns, 0)
        by_name[move.name, kind] = Choice(
            move.name, kind, move.count, move.after, cost_ns, num_options, (simulated, *rest)
        )
    return tuple(by_name.values())
