"""Runs toulbar2 on a cost-function network with linear rows; imports nothing of autopar.

Imported for small networks; run as a script, with a pickled request on stdin and a pickled result on
stdout, for large ones, so that the caller can end it whatever the native code is doing.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_EXACT = 2**52
"""toulbar2 takes costs as doubles; below this they stay exact."""


class Request(TypedDict):
    """A network to minimise: Σ unary + Σ pairs, with Σ usages ≤ slack for each row."""

    unary: list[Int64Array]
    pairs: list[tuple[int, int, Int64Array]]
    rows: list[tuple[int, dict[int, Int64Array]]]
    infinite: int
    """Entries from here on are forbidden."""
    upper_bound: int
    """Only choices that cost less are wanted."""
    time_limit_s: int
    """CPU seconds, whole; 0 means none (then set a backtrack limit)."""
    backtrack_limit: int
    seed: int


class Result(TypedDict):
    """What the search found."""

    choice: list[int] | None
    """The best choice found below the upper bound."""
    lower_bound: int
    """No choice costs less than this (the upper bound, when the search was complete without a choice)."""
    complete: bool
    """Whether the search ended by itself."""


def run(request: Request) -> Result:
    """Minimises; deterministic unless the time limit strikes."""
    from pytoulbar2 import CFN  # no stubs; lazy: only solvers pay for it

    top = min(request["upper_bound"], _most(request) + 1)
    scale = -(-top // _EXACT)
    # Costs are rounded down, so that what is scaled stays a lower bound.
    cfn = CFN(ubinit=-(-top // scale), seed=request["seed"], verbose=-1)
    _post(cfn, request, scale, -(-top // scale))
    cfn.Option.backtrackLimit = request["backtrack_limit"]
    cfn.Option.limited = False
    found = cfn.Solve(timeLimit=request["time_limit_s"])
    complete = not cfn.Option.limited
    choice = None if found is None else [int(value) for value in found[0]]
    bound = found[1] if found is not None else -(-top // scale)
    if not complete:
        bound = min(bound, cfn.GetDDualBound())
    lower_bound = max(0, int(bound) * scale)
    if choice is None and complete and top < request["upper_bound"]:
        lower_bound = request["upper_bound"]  # nothing is feasible at any cost
    return Result(choice=choice, lower_bound=lower_bound, complete=complete)


def _most(request: Request) -> int:
    """Bounds the cost of every choice that takes no forbidden entry."""
    tables = [*request["unary"], *(matrix for _, _, matrix in request["pairs"])]
    finite = (table[table < request["infinite"]] for table in tables)
    return sum(int(entries.max()) for entries in finite if entries.size)


def _post(cfn: Any, request: Request, scale: int, top: int) -> None:
    network = cfn.CFN.wcsp
    for variable, costs in enumerate(request["unary"]):
        network.makeEnumeratedVariable(f"x{variable}", 0, len(costs) - 1)
    for variable, costs in enumerate(request["unary"]):
        network.postUnaryConstraint(variable, np.minimum(costs // scale, top).tolist(), False)
    for i, j, matrix in request["pairs"]:
        network.postBinaryConstraint(i, j, np.minimum(matrix.ravel() // scale, top).tolist(), False)
    for slack, usages in request["rows"]:
        network.postKnapsackConstraint(list(usages), _knapsack(slack, usages), kp=True)


def _knapsack(slack: int, usages: dict[int, Int64Array]) -> str:
    """Writes Σ usage ≤ slack in toulbar2's form: −slack, then for each variable its (value, −usage) pairs."""
    words = [str(-slack)]
    for usage in usages.values():
        used = np.flatnonzero(usage)
        words.append(str(len(used)))
        words.extend(f"{value} {-int(usage[value])}" for value in used)
    return " ".join(words)


def main() -> None:
    """Serves one request; the library's own prints go to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    result = run(pickle.load(sys.stdin.buffer))
    pickle.dump(result, output)
    output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
