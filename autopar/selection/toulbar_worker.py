"""Runs toulbar2 on a cost-function network with linear rows; imports nothing of autopar.

Imported for small networks. Run as a script, with a pickled request on stdin and a pickled result on
stdout, for large ones: SIGVTALRM then ends the search with what it has, and the process can be killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_EXACT = 2**52
"""toulbar2 takes costs as doubles; below this they stay exact."""
_MOST_PASSES = 100
"""Of messages over all tables. Left alone, a thousand may be sent on a large network for the last tenth of a percent of
its bound, which takes ten times as long as the search."""
_A_LONG_TIME_S = 10**6
"""Any time limit makes toulbar2 listen to SIGVTALRM."""
NO_BACKTRACK_LIMIT = 2**62


class NetworkRequest(TypedDict):
    """A network to minimise: Σ unary + Σ pairs, with Σ usages ≤ slack for each row."""

    unary: list[Int64Array]
    pairs: list[tuple[int, int, Int64Array]]
    rows: list[tuple[int, dict[int, Int64Array]]]
    infinite: int
    """Entries from here on are forbidden."""
    upper_bound: int
    """Only choices that cost less are wanted."""
    backtrack_limit: int
    interruptible: bool
    """Whether SIGVTALRM may end the search; takes the signal's handler."""
    message_passing: bool
    """Starts with TRW-S message passing: far better bounds and choices where the search cannot finish."""
    seed: int


class Result(TypedDict):
    """What the search found."""

    choice: list[int] | None
    """The best choice found below the upper bound."""
    lower_bound: int
    """No choice costs less than this, or than the upper bound."""
    complete: bool
    """Whether the search ended by itself."""
    nodes: int
    """Of the search tree: what the search took."""


def run(request: NetworkRequest) -> Result:
    """Minimises; deterministic unless a signal strikes."""
    top = min(request["upper_bound"], _most(request) + 1)
    # Costs are rounded down where they must be, so that a bound stays a bound.
    scale = max(1, -(-top // _EXACT))
    scaled_top = -(-top // scale)
    cfn = _new(scaled_top, request)
    _post(cfn, request, scale, scaled_top)
    found = cfn.Solve(timeLimit=_A_LONG_TIME_S if request["interruptible"] else 0)
    complete, nodes = not cfn.Option.limited, int(cfn.GetNbNodes())
    if found is None:
        # Nothing costs less than `top`; when that is more than any choice can cost, nothing is feasible.
        bound = request["upper_bound"] if complete else _whole(cfn.GetDDualBound()) * scale
        return Result(choice=None, lower_bound=bound, complete=complete, nodes=nodes)
    bound = _whole(found[1]) if complete else min(_whole(found[1]), _whole(cfn.GetDDualBound()))
    choice = [int(value) for value in found[0]]
    return Result(choice=choice, lower_bound=bound * scale, complete=complete, nodes=nodes)


def _whole(bound: float) -> int:
    return max(0, int(bound))


def _new(top: int, request: NetworkRequest) -> Any:
    from pytoulbar2 import CFN, tb2  # no stubs; lazy: only solvers pay for it

    # Options, and more that no option shows, are globals of the library that outlive a network: a search that met its
    # limit leaves best-first search off, and one without a choice leaves weaker propagation.
    tb2.init()
    cfn = CFN(ubinit=top, seed=request["seed"], verbose=-1)
    cfn.Option.trwsAccuracy = 0.001 if request["message_passing"] else -1.0
    cfn.Option.trwsNIter = _MOST_PASSES
    cfn.Option.backtrackLimit = request["backtrack_limit"]
    cfn.Option.limited = False
    return cfn


def _most(request: NetworkRequest) -> int:
    """Bounds the cost of every choice that takes no forbidden entry."""
    tables = [*request["unary"], *(matrix for _, _, matrix in request["pairs"])]
    finite = (table[table < request["infinite"]] for table in tables)
    return sum(int(entries.max()) for entries in finite if entries.size)


def _post(cfn: Any, request: NetworkRequest, scale: int, top: int) -> None:
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the searching process decides when this one ends
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    result = run(pickle.load(sys.stdin.buffer))
    pickle.dump(result, output)
    output.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
