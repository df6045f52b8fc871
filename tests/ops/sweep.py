"""The property over all that torch has samples of: `python -m tests.ops.sweep` writes autopar/ops/proofs.json.

For every overload that the table's pointwise tag or DTensor's registry has rules for, each sample call is sharded,
run and joined with each rule on one axis and with pairs of rules on two. Calls are also run on integers, where a
sum has one value and nothing may differ. The file says which overloads held, with how many calls and layouts, and
of those that did not, the first case that failed. `autopar.ops` trusts what held, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from autopar.ir.placement import Placement, lengths_along
from autopar.ops import axis_rules, overload, proofs
from autopar.ops.lookup import has_rules
from autopar.ops.notation import AxisRule
from autopar.ops.table import LOWERED, RULES
from tests.ops.interpreter import Case, Layout, check, make_case
from tests.ops.long_tail_samples import long_tail
from tests.ops.samples import Sample, registry_samples, table_samples
from tests.ops.test_rules import admitted, text
from tests.ops.torch_samples import torch_samples

SIZES, PAIR_SIZES = ((2,), (3,), (4,)), ((2, 2), (2, 3))
MAX_PAIRS, MAX_LOWERED_PAIRS, MAX_NEGATED = 12, 4, 4


class _Everything:
    def __contains__(self, op: object) -> bool:
        return True


@contextmanager
def everything_trusted() -> Iterator[None]:
    """What no sample has proved has its rules too, so that they can be tried."""
    with mock.patch.multiple(proofs, PROVED=_Everything(), FAILED={}, NEED_ELEMENTS=()):
        yield


@dataclass
class Proof:
    """What the sweep found of one overload."""

    calls: int = 0  # that some rule could shard
    rules: int = 0  # on one axis
    layouts: int = 0  # one and two axes, even and uneven
    exact: int = 0  # of the layouts, those on integers: two that differ do so by 1
    failure: str = ""
    needs_elements: bool = False  # the only failures are those of ranks without elements

    @property
    def holds(self) -> bool:
        return self.calls > 0 and not self.failure


def is_candidate(op: str) -> bool:
    """Whether a rule for the overload could be asked for: it may stand in a functional graph, and has a source."""
    found = overload(op)
    if (
        found._schema.is_mutable
        or "empty" in op
        or torch.Tag.nondeterministic_seeded in found.tags
        or not found._schema.returns
    ):
        return False
    return has_rules(found)


class Calls(NamedTuple):
    """The samples of one overload: torch's, and those written by hand."""

    torch: list[Sample]
    own: list[Sample]


def collect() -> dict[str, Calls]:
    """The samples of every candidate."""
    with everything_trusted():
        found = {op: Calls([*calls, *negated(calls)], []) for op, calls in torch_samples(cache(is_candidate)).items()}
        for sample in (*registry_samples(), *table_samples(), *long_tail()):
            if is_candidate(sample.op):
                found.setdefault(sample.op, Calls([], [])).own.append(sample)
    return dict(sorted(found.items()))


def negated(samples: list[Sample]) -> list[Sample]:
    """Some of the calls again with their dims counted from the end, which torch has few samples of."""
    changed = []
    for sample in samples[:: max(1, len(samples) // MAX_NEGATED)]:
        rank = next(leaf.dim() for leaf in tree_flatten((sample.args, sample.kwargs))[0] if isinstance(leaf, Tensor))
        names = [argument.name for argument in overload(sample.op)._schema.arguments]
        args = tuple(_negated(n, value, rank) for n, value in zip(names, sample.args, strict=False))
        kwargs = {name: _negated(name, value, rank) for name, value in sample.kwargs.items()}
        if f"{sample}" != f"{sample._replace(args=args, kwargs=kwargs)}":
            changed.append(sample._replace(args=args, kwargs=kwargs))
    return changed


def _negated(name: str, value: Any, rank: int) -> Any:
    if isinstance(value, (list, tuple)) and name.startswith("dim"):
        return type(value)(_negated(name, item, rank) for item in value)
    counts = type(value) is int and name.startswith("dim") and 0 <= value < rank
    return value - rank if counts else value


def prove(calls: Calls, max_pairs: int = MAX_PAIRS, max_own_pairs: int | None = None) -> Proof:
    """Tries every rule on every sample of one overload, up to the first failure; all pairs of rules on own samples."""
    proof = Proof()
    for samples, pairs in ((calls.torch, max_pairs), (calls.own, max_own_pairs)):
        for sample in samples:
            for case in cases(sample):
                proof.failure = proof.failure or _try(sample, case, proof, pairs)
    return proof


def cases(sample: Sample) -> list[Case]:
    """The call as it is, and on integers where its results and gradients are integers as well."""
    found = [_case(sample)]
    if not sample.exact:
        whole = _case(sample._replace(args=tree_map(_integers, sample.args), kwargs=tree_map(_integers, sample.kwargs)))
        if whole is not None and _all_integers(whole):
            found.append(whole)
    return [case for case in found if case is not None]


def _integers(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return (value.detach() * 2).nan_to_num(1, 4, -4).round().clamp(-8, 8)


def _all_integers(case: Case) -> bool:
    values = [v for v in _made(case) if v is not None and v.is_floating_point()]
    return bool(values) and all(bool((v == v.round()).all() and (v.abs() < 2**30).all()) for v in values)


def _case(sample: Sample) -> Case | None:
    """With gradients where the operator has them. None for what cannot be run alone."""
    for differentiable in (True, False):
        args, kwargs = tree_map(lambda v: _leaf(v, differentiable), (sample.args, sample.kwargs))  # noqa: B023
        try:
            case = make_case(sample.op, args, kwargs, exact=sample.exact)
            return case if all(v is None or v.layout == torch.strided for v in _made(case)) else None
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue
    return None


def _made(case: Case) -> list[Tensor | None]:
    return [*case.results, *case.operand_gradients]


def _leaf(value: Any, differentiable: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    fits = value.is_floating_point() or value.is_complex()
    return value.detach().requires_grad_(differentiable and fits)


def _try(sample: Sample, case: Case, proof: Proof, max_pairs: int | None) -> str:
    try:
        rules = [rule for rule in axis_rules(case.graph, case.node) if _shards(rule)]
    except Exception as error:  # a rule text that does not fit the call, say
        return f"{sample}: {type(error).__name__}: {error}"[:400]
    tried = 0
    if not rules:
        return ""
    for layout in layouts(case, rules, max_pairs):
        if not admitted(case, layout):
            continue
        error = _error(case, layout)
        if error and leaves_nothing(case, layout):
            proof.needs_elements = True
            continue
        if error:
            placed = " × ".join(map(text, layout.rules))
            return f"{sample} on {list(layout.sizes)} with {placed}: {error}"[:400]
        tried += 1
    proof.calls += tried > 0
    proof.rules += len(rules)
    proof.layouts += tried
    proof.exact += tried * _all_integers(case)
    return ""


def leaves_nothing(case: Case, layout: Layout) -> bool:
    """Whether some rank holds nothing along a dim of an operand or result that has something."""
    placed = zip((*case.node.operands, *case.node.results), (*layout.operands, *layout.results), strict=True)
    return any(_has_empty(case.graph.tensors[name].shape, types, layout) for name, types in placed)


def _has_empty(shape: tuple[int, ...], types: Placement, layout: Layout) -> bool:
    return any(size and 0 in lengths_along(shape, types, dim, layout.axes) for dim, size in enumerate(shape))


def _error(case: Case, layout: Layout) -> str | None:
    try:
        return check(case, layout.rules, layout.sizes)
    except Exception as error:  # whatever the local operator raises is a failure of the rule
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _shards(rule: AxisRule) -> bool:
    return any(type_.kind in "SP" for type_ in (*rule.operands, *rule.results))


def layouts(case: Case, rules: list[AxisRule], max_pairs: int | None) -> list[Layout]:
    """Every rule on one axis of 2, 3 and 4; pairs, with R and I, on two axes: all, or a fixed random choice."""
    every = axis_rules(case.graph, case.node)
    single = [Layout((rule,), size) for size in SIZES for rule in rules]
    both = [pair for pair in itertools.product(every, repeat=2) if any(map(_shards, pair))]
    pairs = [Layout(pair, size) for size in PAIR_SIZES for pair in both]
    if case.node.op in LOWERED:  # its ranks are threads, which take their time
        max_pairs = MAX_LOWERED_PAIRS
    return single + random.Random(0).sample(pairs, len(pairs) if max_pairs is None else min(max_pairs, len(pairs)))


def _prove_group(group: tuple[str, Calls]) -> tuple[str, Proof]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with everything_trusted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return group[0], prove(group[1])


def sweep(processes: int, only: str = "") -> dict[str, Proof]:
    """The proof of each candidate whose name matches the regular expression."""
    found = {op: samples for op, samples in collect().items() if re.search(only, op)}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return dict(pool.imap(_prove_group, found.items(), chunksize=4))


def write(found: dict[str, Proof], *, keep_others: bool) -> None:
    """autopar/ops/proofs.json: for each overload that held on how many calls, rules and layouts; else the failure."""
    record = json.loads(proofs.PATH.read_text()) if keep_others else {"proved": {}, "need_elements": [], "failed": {}}
    proved = {op: text for op, text in record["proved"].items() if op not in found}
    need = {op for op in record["need_elements"] if op not in found}
    failed = {op: text for op, text in record["failed"].items() if op not in found}
    for op, p in found.items():
        if p.failure:
            failed[op] = p.failure
        elif p.holds:
            proved[op] = f"{p.calls} calls, {p.rules} rules, {p.layouts} layouts"
            need |= {op} if p.needs_elements else set()
    made = {
        "proved": dict(sorted(proved.items())),
        "need_elements": sorted(need),
        "failed": dict(sorted(failed.items())),
    }
    proofs.PATH.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


def summary(found: dict[str, Proof]) -> str:
    held = [proof for proof in found.values() if proof.holds]
    counts = Counter({name: sum(getattr(p, name) for p in held) for name in ("calls", "rules", "layouts", "exact")})
    failed = sum(bool(proof.failure) for proof in found.values())
    return (
        f"{len(held)} operators proved, {counts['calls']} calls, {counts['rules']} rules on one axis, "
        f"{counts['layouts']} layouts ({counts['exact']} of them exact); {failed} operators failed"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="overloads, a regular expression; the others stay")
    arguments = parser.parse_args()
    found = sweep(arguments.processes, arguments.only)
    for op, proof in found.items():
        if proof.failure:
            print(f"{op}: {proof.failure}")
    write(found, keep_others=bool(arguments.only))
    print(summary(found))
    own = [op for op, proof in found.items() if proof.failure and op in RULES]
    if own:
        print(f"the table's own rules fail: {', '.join(own)}")
    return bool(own)


if __name__ == "__main__":
    sys.exit(main())
