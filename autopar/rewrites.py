"""The graphs that are planned: the model's, and equal ones that are faster, on one device or on a share of the batch.

What is best depends on how much there is to do: folding an adapter into its weight pays where many samples go through
it, and not where each of eight ranks has an eighth of them. So substitutions are looked for on both.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from autopar.cost import Profile, load_profile
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan, Substitution
from autopar.microbatch import microbatch_types, one_microbatch
from autopar.planning import Request, pinned_tensors
from autopar.substitute import Candidate, Substituted, load_rules, replayed, substituted
from autopar.substitute.lifting import lifted
from autopar.substitute.masks import RULE, STATEMENT, under_causal_masks, without_masks
from autopar.substitute.pricing import Pricer
from autopar.trace import find_blocks

_SHARE_OF_TIME = 0.25
"""Of the search budget, for each of the two searches."""


def rewrites(graph: Graph, request: Request) -> list[Candidate]:
    """Graphs equal to a traced model's that may be faster. What constraints speak of stays as it is."""
    if not request.budget.substitutions:
        return []
    pinned = pinned_tensors(graph, request.constraints)
    plainer, masks = _without_masks(graph, request, pinned)
    found = [*_search(plainer, request, pinned).candidates]
    share = _share(plainer, request.mesh.num_devices)
    if share is not None:
        found += _on_whole(plainer, _search(share, request, pinned).best)
    distinct = {candidate.graph.fingerprint: candidate for candidate in reversed(found)}
    distinct.pop(graph.fingerprint, None)
    ordered = sorted(distinct.values(), key=lambda candidate: candidate.cost_ns)
    return [replace(candidate, steps=(*masks, *candidate.steps)) for candidate in ordered]


def _without_masks(graph: Graph, request: Request, pinned: set[str]) -> tuple[Graph, tuple[Substitution, ...]]:
    """The graph whose attention operators know that they are causal, and the substitution that says so."""
    names = [name for name in under_causal_masks(graph) if pinned.isdisjoint(graph.node_by_name[name].results)]
    if not names:
        return graph, ()
    plainer, pricer = without_masks(graph, names), Pricer(_profile(request), request.mode == "train")
    modules = tuple(graph.node_by_name[name].scope.module for name in names)
    gain_ns = pricer(lifted(graph)) - pricer(lifted(plainer))
    return plainer, (Substitution(RULE, STATEMENT, "proved", "", modules, tuple(names), {}, gain_ns),)


def _profile(request: Request) -> Profile:
    return load_profile(request.mesh.groups[0].profile)


def _search(graph: Graph, request: Request, pinned: set[str]) -> Substituted:
    blocks = find_blocks(graph, request.constraints)
    return substituted(
        graph, blocks.paths, blocks.node_representative, load_rules(), _profile(request),
        trains=request.mode == "train", seconds=request.budget.seconds * _SHARE_OF_TIME, pinned=pinned,
    )  # fmt: skip


def _share(graph: Graph, num_devices: int) -> Graph | None:
    """The graph of one device's part of the batch, where all devices divide it."""
    if num_devices == 1:
        return None
    try:
        return one_microbatch(graph, microbatch_types(graph, num_devices), num_devices)
    except PlanError:
        return None


def _on_whole(graph: Graph, found: Candidate) -> list[Candidate]:
    """What was found for a part of the batch, for all of it; nothing where it speaks of the part's sizes."""
    with contextlib.suppress(PlanError):
        return [Candidate(_replayed(graph, found.steps), found.steps, found.cost_ns)] if found.steps else []
    return []


def graph_of(plan: Plan, graph: Graph) -> Graph:
    """The graph that a plan is for: a model's traced graph after the plan's substitutions. Raises PlanError."""
    return _replayed(graph, plan.substitutions)


def _replayed(graph: Graph, steps: tuple[Substitution, ...]) -> Graph:
    masks = [step for step in steps if step.rule == RULE]
    for step in masks:
        graph = without_masks(graph, step.roots)
    rest = [step for step in steps if step not in masks]
    if not rest:
        return graph
    blocks = find_blocks(graph)
    return replayed(graph, blocks.paths, blocks.node_representative, rest, load_rules())
