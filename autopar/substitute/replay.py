"""Substitutions as data, and their replay: the same graph again, from the model's graph and what a plan lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph, Node, Tensor, reading, with_nodes
from autopar.ir.plan import Substitution
from autopar.ir.sharing import share, unshared
from autopar.substitute.defined import Values
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import lowered
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.packing import packed
from autopar.substitute.regions import EqualRegions, RewriteRegion, find_regions, in_twin, names_in
from autopar.substitute.rewriting import rewritten
from autopar.substitute.rules.terms import Rule

Paths = Sequence[Sequence[str]]


def replayed(
    graph: Graph, paths: Paths, representatives: Mapping[str, str], steps: Sequence[Substitution], rules: Sequence[Rule]
) -> Graph:
    """The graph after a plan's substitutions. Raises PlanError for one that does not apply, or whose rule changed."""
    if not steps:
        return graph
    known = {rule.name: rule for rule in rules}
    for step in steps:
        _check(step, known)
    plain = unshared(graph)
    regions = find_regions(plain, paths, representatives)
    firsts = {twins.first.nodes(plain)[0].name: twins for twins in regions}
    changed: dict[str, list[Substitution]] = {}
    for step in steps:
        if step.region not in firsts:
            raise PlanError(f"expected a part of the model that begins with {step.region!r}, found none; plan again")
        changed.setdefault(step.region, []).append(step)
    redone = [_redone(plain, firsts[name], own, known) for name, own in changed.items()]
    return share(packed(spliced(plain, redone)))


def _check(step: Substitution, known: Mapping[str, Rule]) -> None:
    rule = known.get(step.rule)
    if rule is None or str(rule) != step.statement:
        found = "no such rule" if rule is None else f"{rule}"
        raise PlanError(f"expected the rule {step.rule}: {step.statement}; found {found}; plan again")


Redone = list[tuple[RewriteRegion, Values]]
"""Regions, and what computes their results now."""


def _redone(graph: Graph, twins: EqualRegions, steps: Sequence[Substitution], known: Mapping[str, Rule]) -> Redone:
    first = twins.first.nodes(graph)
    found = []
    for region in twins.regions:
        names = names_in(first, region.nodes(graph))
        values = lifted(region.graph(graph))
        for step in steps:
            values = _applied(values, step, known[step.rule], names)
        found.append((region, values))
    return found


def _applied(values: Values, step: Substitution, rule: Rule, names: Mapping[str, str]) -> Values:
    roots = tuple(in_twin(root, names) for root in step.roots)
    binding = {key: value if key[:1] == "?" else in_twin(str(value), names) for key, value in step.binding.items()}
    missing = [name for name in (*roots, *_values_of(binding)) if not _has(values, name)]
    if missing:
        raise PlanError(f"expected the values that {step.rule} was applied to, found no {missing[0]!r}; plan again")
    try:
        after = rewritten(values, Matcher(rule).at(values, roots, binding))
    except AutoparError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:  # variables of another rule, numbers for tensors
        raise PlanError(f"expected what {step.rule} binds, found {dict(step.binding)}; plan again") from error
    if after is None:
        raise PlanError(f"expected {step.rule} to apply at {', '.join(roots)}, found that it does not; plan again")
    return after


def _values_of(binding: Mapping[str, object]) -> list[str]:
    return [str(value) for key, value in binding.items() if key[0] != "?"]


def _has(values: Values, name: str) -> bool:
    return name in values.definitions or (name in values.graph.tensors and name not in values.renamed)


def redone_as(graph: Graph, twins: EqualRegions, matches: Sequence[Match], known: Mapping[str, Rule]) -> Redone:
    """The regions after what was found for the first of them."""
    steps = [as_step(graph, twins, match, 0) for match in matches]
    return _redone(graph, twins, steps, known)


def as_step(graph: Graph, twins: EqualRegions, match: Match, gain_ns: int) -> Substitution:
    """A match as a plan states it. gain_ns: in one of the twins."""
    nodes = twins.first.nodes(graph)
    return Substitution(
        rule=match.rule.name, statement=str(match.rule), status=match.rule.status, region=nodes[0].name,
        modules=twins.paths, roots=match.roots, binding=dict(match.binding), gain_ns=gain_ns * len(twins.regions),
    )  # fmt: skip


def spliced(graph: Graph, changes: Sequence[Redone]) -> Graph:
    """The graph without identity nodes with other nodes in some of its regions."""
    new = {region.start: (region, values) for change in changes for region, values in change}
    nodes: list[Node] = []
    tensors: dict[str, Tensor] = dict(graph.tensors)
    renamed: dict[str, str] = {}
    position = 0
    while position < len(graph.nodes):
        if position in new:
            region, values = new[position]
            part = lowered(values)
            nodes += part.nodes
            tensors.update(part.tensors)
            renamed.update((old, now) for old, now in zip(region.graph(graph).outputs, part.outputs, strict=True))
            position = region.stop
        else:
            nodes.append(graph.nodes[position])
            position += 1
    return _with_names(graph, nodes, tensors, {old: now for old, now in renamed.items() if old != now})


def _with_names(graph: Graph, nodes: list[Node], tensors: dict[str, Tensor], renamed: dict[str, str]) -> Graph:
    """The graph of these nodes, where some tensors are others now."""

    def now(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    nodes = [reading(node, {name: now(name) for name in node.operands if name in renamed}) for node in nodes]
    return with_nodes(graph, nodes, tensors, now)
