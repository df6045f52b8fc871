"""A traced program as ranks run it: every statement of the plan is seen, in each direction, under its own name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import autopar
from autopar.observed.kineto import RECOMPUTE, RankTrace, read_traces
from autopar.observed.simulated import simulated
from autopar.runtime.recording import record
from models import gpt
from tests.rank_pool import RankPool

VIEWS = ("reshape", "transpose")  # which autograd may fold into what reads them


def record_on(rank: int, world: int, folder: Path, into: Path) -> None:
    record(folder, into, 2)


def test_every_statement_of_a_plan_is_seen(tmp_path: Path, rank_pool: Callable[[int], RankPool]) -> None:
    """Tensor parallel and ZeRO, one block computed again, two microbatches; then two stages."""
    config = gpt.Config(num_layers=3, hidden_size=32, num_heads=4, seq_len=16, vocab_size=64)
    mesh, batch = autopar.Mesh("cpu", devices_per_node=2), gpt.example_inputs(config)
    for number, template in enumerate(
        ({"tp": 2, "microbatches": 2, "recompute": "full"}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 2})
    ):
        plan = autopar.template_plan(gpt.build(config), mesh, batch, check=False, **template)
        program = autopar.parallelize(gpt.build(config), mesh, batch, plan=plan, check=False)
        folder, into = program.save_traced(tmp_path / f"{number}"), tmp_path / f"traces_{number}"
        rank_pool(2).run(record_on, folder, into)
        found = program.plan.compare(into)
        assert [name for name in found.unseen if not is_free(name)] == []
        for trace in read_traces(into):
            check(trace, program.plan)


def is_free(name: str) -> bool:
    """Names of a value that several read, constants, and conversions that do nothing to memory, are no statements."""
    return "_shared" in name or name.startswith("arange")


def check(trace: RankTrace, plan: autopar.Plan) -> None:
    """Operators have been seen in the directions that they were simulated in, as often in every step."""
    lane = next(lane for lane in simulated(plan.timeline()) if trace.rank in lane.ranks)  # type: ignore[arg-type]
    operators = set(plan.scopes) - {name for name in plan.scopes if is_free(name)}
    wanted = {(name, direction) for (name, direction), spent in lane.work.items() if spent and name in operators}
    for step in trace.steps:
        seen = {(key.name, key.direction) for key in step.work}
        missing = {(name, direction) for name, direction in wanted - seen if not name.startswith(VIEWS)}
        assert missing == set()
        products = [key for key in step.work if key.direction != "backward" and key.name.startswith("linear")]
        assert {step.work[key].count for key in products if " " not in key.name} == {plan.microbatches}
    assert any(key.direction == RECOMPUTE for key in trace.steps[0].work) == bool(plan.recompute)
    places = {source for name, (_, source) in trace.where.items() if name.startswith("linear") and " " not in name}
    assert places and all(source.startswith("models/gpt.py:") for source in places)
