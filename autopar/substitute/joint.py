"""The graphs that go on to placement: the given one, and for each the substitutions that lead to it.

Each distinct region is searched once (`searching`); what is found serves its twins. The best graph of one device
need not be the best one sharded (Unger et al., Unity, 2022): columns of fused weights belong to several tensors, and
heads can be sharded where these are apart. So several graphs go on, and simulated sharded step time decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.clock import Clock
from autopar.cost import Profile
from autopar.ir.graph import Graph
from autopar.ir.plan import Substitution
from autopar.ir.sharing import share, unshared
from autopar.substitute.backtracking import ALPHA, FoundGraph, Outcome, as_good_ns
from autopar.substitute.defined import Values
from autopar.substitute.lifting import lifted
from autopar.substitute.lowering import PARTS
from autopar.substitute.matching import Match, Matcher
from autopar.substitute.packing import packed
from autopar.substitute.pricing import Pricer
from autopar.substitute.regions import EqualRegions, find_regions
from autopar.substitute.replay import as_step, redone_as, spliced
from autopar.substitute.rewriting import rewritten
from autopar.substitute.rules.terms import Apply, Rule, Term, subterms, variables
from autopar.substitute.searching import LIMITS, Limits, Searcher

SEARCHING = 0.8
"""Share of the time that the search may take; the rest is for making whole graphs of what it found."""


@dataclass(frozen=True)
class GraphCandidate:
    """A graph equal to the model's, the substitutions that make it of that, and its cost on one device (ns)."""

    graph: Graph
    steps: tuple[Substitution, ...]
    cost_ns: int


@dataclass(frozen=True)
class Substituted:
    """What the search found: candidates, the fastest on one device first; the given graph's cost; how it went."""

    candidates: tuple[GraphCandidate, ...]
    before_ns: int
    seconds: float
    seen: int
    stop: str

    @property
    def best(self) -> GraphCandidate:
        """Of those that are as good as the fastest, the one of the fewest substitutions: the given graph where nothing
        gains what a profile can tell."""
        most = as_good_ns(self.before_ns, self.candidates[0].cost_ns)
        as_good = (candidate for candidate in self.candidates if candidate.cost_ns <= most)
        return min(as_good, key=lambda candidate: (len(candidate.steps), candidate.cost_ns))


def substituted(
    graph: Graph, paths: Sequence[Sequence[str]], representatives: Mapping[str, str], rules: Sequence[Rule],
    profile: Profile, *, trains: bool = True, seconds: float = 10.0, alpha: float = ALPHA,
    pinned: Collection[str] = (), limits: Limits = LIMITS,
) -> Substituted:  # fmt: skip
    """Graphs equal to the model's that are faster on one device of the profile, or easier to shard.

    paths, representatives: of equal blocks (`trace.find_blocks`). seconds: for all regions together.
    pinned: tensors that stay as they are, computed in the same way and stored by themselves.
    limits: of what is searched at once, and for how long.
    Of the rules, those that are proved are used: tests have passed rules that more tests have refuted.
    """
    clock = Clock.of(seconds)
    rules = [rule for rule in rules if rule.status == "proved" and not (trains and rule.inference)]
    if any(graph.tensors[item.tensor].dtype in ("bfloat16", "float16") for item in graph.parameters):
        rules = [rule for rule in rules if not sums_weights(rule)]
    search = _RegionSearch(
        unshared(graph), paths, representatives, rules, Pricer(profile, trains), alpha, pinned, limits
    )
    outcomes = search.outcomes(clock.part(SEARCHING))
    best = search.worth_while([outcome.best for outcome in outcomes])
    apart = [search.apart(twins) for twins in search.regions]
    changed = [search.candidate(found) for found in (apart, best) if any(own.matches for own in found)]
    given = GraphCandidate(graph, (), search.cost(search.plain))
    found = {candidate.graph.fingerprint: candidate for candidate in (*changed, given)}
    candidates = tuple(sorted(found.values(), key=lambda item: item.cost_ns))
    seen, stops = sum(outcome.seen for outcome in outcomes), dict.fromkeys(outcome.stop for outcome in outcomes)
    return Substituted(candidates, given.cost_ns, clock.passed_s, seen, "; ".join(stops))


class _RegionSearch:
    """The regions of one graph without identity nodes, and the rules for them."""

    def __init__(
        self, plain: Graph, paths: Sequence[Sequence[str]], representatives: Mapping[str, str], rules: Sequence[Rule],
        pricer: Pricer, alpha: float, pinned: Collection[str], limits: Limits,
    ) -> None:  # fmt: skip
        self.plain, self.pricer = plain, pricer
        self.regions = find_regions(plain, paths, representatives)
        self.rules = {rule.name: rule for rule in rules}
        self.matchers = [Matcher(rule, frozenset(pinned)) for rule in rules]
        self.limits, self.searcher = limits, Searcher(self.matchers, pricer, alpha, limits)
        self.splitting = [matcher for matcher in self.matchers if is_splitting(matcher.rule)]

    def cost(self, graph: Graph) -> int:
        """Of a whole graph without identity nodes."""
        return self.pricer(lifted(graph))

    def outcomes(self, clock: Clock) -> list[Outcome]:
        """What is found for each region: each may take an equal share of the time and of the graphs that are left."""
        found = list[Outcome]()
        for number, twins in enumerate(self.regions):
            regions_left = len(self.regions) - number
            seconds = max(0.0, clock.left_s) / regions_left
            most = (self.limits.most - sum(outcome.seen for outcome in found)) // regions_left
            found.append(self.searcher.run(self._values(twins), seconds, most))
        return found

    def worth_while(self, found: Sequence[FoundGraph]) -> list[FoundGraph]:
        """What was found for each region, but for those without which the whole graph is as good: much of a small
        region can be little of the whole."""
        gains_ns = [sum(own.gains_ns) * len(twins.regions) for twins, own in zip(self.regions, found, strict=True)]
        given_ns = self.cost(self.plain)
        least_ns = given_ns - sum(gains_ns)
        spare_ns = as_good_ns(given_ns, least_ns) - least_ns
        kept = [*found]
        for number in sorted(range(len(found)), key=gains_ns.__getitem__):
            if gains_ns[number] <= spare_ns:
                spare_ns -= gains_ns[number]
                kept[number] = self._as_given(self.regions[number])
        return kept

    def _as_given(self, twins: EqualRegions) -> FoundGraph:
        values = self._values(twins)
        return FoundGraph(values, (), (), self.pricer(values))

    def _values(self, twins: EqualRegions) -> Values:
        return lifted(twins.first.graph(self.plain))

    def apart(self, twins: EqualRegions) -> FoundGraph:
        """Every splitting of fused weights that is possible, one after the other."""
        now = self._as_given(twins)
        while (step := next(self._splittings(now.values), None)) is not None:
            match, after = step
            cost_ns = self.pricer(after)
            now = FoundGraph(after, (*now.matches, match), (*now.gains_ns, now.cost_ns - cost_ns), cost_ns)
        return now

    def _splittings(self, values: Values) -> Iterator[tuple[Match, Values]]:
        for matcher in self.splitting:
            for match in matcher.matches(values):
                after = rewritten(values, match)
                if after is not None:
                    yield match, after

    def candidate(self, found: Sequence[FoundGraph]) -> GraphCandidate:
        """The whole graph after what was found for each region."""
        changes, steps = [], list[Substitution]()
        for twins, own in zip(self.regions, found, strict=True):
            if own.matches:
                pairs = zip(own.matches, own.gains_ns, strict=True)
                steps += [as_step(self.plain, twins, match, gain_ns) for match, gain_ns in pairs]
                changes.append(redone_as(self.plain, twins, own.matches, self.rules))
        plain = spliced(self.plain, changes)
        return GraphCandidate(share(packed(plain)), tuple(steps), self.cost(plain))


def is_splitting(rule: Rule) -> bool:
    """Whether a rule computes parts of one tensor apart from each other."""
    parts = [term for term in rule.source if isinstance(term, Apply) and term.op in PARTS]
    whole = {term.operands for term in parts}
    left = [term for term in rule.target if not (isinstance(term, Apply) and term.op in PARTS)]
    return len(parts) == len(rule.source) == len(left) > 1 and len(whole) == 1


def sums_weights(rule: Rule) -> bool:
    """Whether a rule adds up weights that were not added up before: in few bits, a small one is lost in a large one."""
    return _sums(rule, rule.target) and not _sums(rule, rule.source)


def _sums(rule: Rule, terms: Sequence[Term]) -> bool:
    inner = (term for outer in terms for term in subterms(outer) if isinstance(term, Apply))
    return any(
        term.op in ("add", "sub")
        and all(rule.sorts.get(name) in ("weight", "kernel", "vector") for name in variables(term))
        for term in inner
    )
