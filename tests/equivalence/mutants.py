"""Runs mutants that verify, many in one program where they do not meet, and names those that are wrong.

Mutations that change different tensors are local edits, so one program may hold many of them: it runs each edit's
own code, and an error of any shows in the loss or in a gradient. When such a program is wrong, crashes or
does not end, its mutants are run one by one, to name the culprit.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import runtime
from autopar.emit import emit
from autopar.errors import PlacementError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.program import load_source
from tests.equivalence.harness import Tensors, differences
from tests.equivalence.mutations import Mutation, Reach
from tests.rank_pool import RankPool

MAX_WRONG = 3  # then the rest is not run
Verify = Callable[[Graph, Plan], None]


@dataclass(frozen=True)
class Case:
    """What a mutant must still compute: the model's loss and gradients on this batch from this state."""

    graph: Graph
    plan: Plan
    state: Tensors
    batch: Tensors
    single: Any  # harness.run_single without optimizers


@dataclass
class Tally:
    """What became of the mutants of a plan."""

    refused: list[tuple[Mutation, PlanError | PlacementError]] = field(default_factory=list)
    equal: int = 0
    wrong: list[str] = field(default_factory=list)
    proved: set[str] = field(default_factory=set)  # the text of each program that ran and was right

    def __str__(self) -> str:
        total = len(self.refused) + self.equal + len(self.wrong)
        return (
            f"{total} mutants: {len(self.refused)} refused, {self.equal} ran and were equal "
            f"(in {len(self.proved)} programs), {len(self.wrong)} wrong"
        )


def together(mutations: Sequence[Mutation]) -> Mutation:
    """Mutations that do not meet, as one."""
    merged = Mutation(" + ".join(mutation.what for mutation in mutations))
    for name in ("conversions", "nodes", "storage", "inputs"):
        entries = {key: value for mutation in mutations for key, value in getattr(mutation, name).items()}
        merged = replace(merged, **{name: entries})
    return merged


def prove(case: Case, mutations: Iterable[Mutation], ranks: RankPool, verify: Verify) -> Tally:
    """Verifies each mutant and runs those that pass. Other exceptions of `verify` than refusals are raised."""
    tally, verified = Tally(), []
    for mutation in mutations:
        try:
            verify(case.graph, mutation.apply(case.plan))
            verified.append(mutation)
        except (PlanError, PlacementError) as error:
            tally.refused.append((mutation, error))
    for group in groups(case, verified):
        if len(tally.wrong) < MAX_WRONG:
            _prove_group(case, group, ranks, verify, tally)
    return tally


def groups(case: Case, mutations: Sequence[Mutation]) -> list[list[Mutation]]:
    """Each mutation in the first group that has none that it meets. Those that change most come first: fewer groups."""
    found: list[tuple[Reach, list[Mutation]]] = []
    reaches = [(mutation.reach(case.graph, case.plan), mutation) for mutation in mutations]
    for reach, mutation in sorted(reaches, key=lambda pair: len(pair[0].changed), reverse=True):
        index = next((i for i, (taken, _) in enumerate(found) if not reach.meets(taken)), len(found))
        taken, members = found.pop(index) if index < len(found) else (Reach(), [])
        found.insert(index, (reach.joined(taken), [*members, mutation]))
    return [members for _, members in found]


def _prove_group(case: Case, members: list[Mutation], ranks: RankPool, verify: Verify, tally: Tally) -> None:
    joined = together(members)
    try:
        verify(case.graph, joined.apply(case.plan))
        problem = run(case, joined, ranks, tally.proved)
    except (PlanError, PlacementError) as error:
        problem = f"refused together: {error}"
    if not problem:
        tally.equal += len(members)
    elif len(members) == 1:
        tally.wrong.append(f"{joined.what}\n{problem}")
    else:
        before = len(tally.wrong)
        middle = len(members) // 2
        for half in (members[:middle], members[middle:]):
            _prove_group(case, half, ranks, verify, tally)
        if len(tally.wrong) == before and not problem.startswith("refused"):
            tally.wrong.append(f"only together: {joined.what}\n{problem}")


def run(case: Case, mutation: Mutation, ranks: RankPool, proved: set[str]) -> str:
    """What is wrong with the mutant's program; empty when it computes what the model computes."""
    try:
        source = emit(case.graph, mutation.apply(case.plan))
        if source in proved:
            return ""
        warm_up(ranks)
        results = ranks.run(first_step, source, case.state, case.batch)
    except (PlanError, PlacementError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        ranks.stop()  # their collectives may be out of step
        return failed[0]
    found = differences(case.single, results[0])
    losses = {loss.item() for loss, *_ in results}
    if len(losses) > 1:
        found.append(f"ranks have different losses: {sorted(losses)}")
    if not found:
        proved.add(source)
    return "\n".join(found)


def warm_up(ranks: RankPool) -> None:
    """Starts the ranks where they do not run, with time of their own: starting is slow on a busy machine."""
    if not ranks.is_running:
        ranks.run(ready)


def ready(rank: int, world: int) -> None:
    """A job that does nothing."""


def first_step(rank: int, world: int, source: str, state: Tensors, batch: Tensors) -> Any:
    """On one rank: loss, gradients and clipped norm of one step, as `harness.differences` takes them; or the error.

    An error is likely to be the same on all ranks, which may then go on to the next program.
    """
    module = load_source(source)
    try:
        result = _first_step(module.Program, state, batch)
        return result if rank == 0 else (result[0], {}, result[2], {}, {})
    except Exception:
        return traceback.format_exc()
    finally:
        del sys.modules[module.__name__]
        shutil.rmtree(Path(str(module.__file__)).parent)


def _first_step(program: type[runtime.Program], state: Tensors, batch: Tensors) -> Any:
    built = runtime.build(program, _device_mesh(tuple(program.AXES.items())))
    built.init_from(state, broadcast=False)
    loss = built.train_step(**batch)
    gradients = built.full_gradients()
    return loss, gradients, built.clip_grad_norm_(0.5), {}, {}


@cache
def _device_mesh(axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """One for all programs: each would open sockets of its own."""
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
