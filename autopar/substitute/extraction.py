"""The cheapest graph in an e-graph, by integer programming, and the substitutions that lead to it.

    minimise Σ time of chosen nodes + Σ over classes of (chosen readers − 1) sums of gradients
    one node of each class that is needed; what a chosen node reads is needed; numbers go up along what is chosen

What several read is paid once: that is where taking the cheapest node of each class for itself goes wrong, as one of
two parts of a merged product costs all of it (Yang et al., Tensat, MLSys'21). Parts of one tensor are cut at once.
What only moves parameters costs nothing; in inference, neither does what is made of parameters alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import networkx
from ortools.sat.python import cp_model

from autopar.ir.graph import Tensor
from autopar.substitute.backtracking import Found, cheaper
from autopar.substitute.defined import OPAQUE, Definition, Values
from autopar.substitute.lowering import PARTS, WRITERS
from autopar.substitute.matching import Binding, Match, Matcher, attribute
from autopar.substitute.pricing import Pricer
from autopar.substitute.rewriting import rewritten
from autopar.substitute.rules.generation import GENERATED
from autopar.substitute.rules.terms import Apply, Term, Variable
from autopar.substitute.saturation import EGraph, ENode, Link

COMMUTED = ("add-commuted", "mul-commuted")
MOST_SECONDS = 1.0
"""Of one integer program: what is found by then is nearly always what is found at all."""

MOVING = frozenset({"concat", "transpose", *PARTS})
"""Operators of the algebra that move elements and compute nothing."""


class Extraction:
    """The choice of nodes for one e-graph, and the way there."""

    def __init__(self, egraph: EGraph, pricer: Pricer) -> None:
        self.egraph, self.pricer = egraph, pricer
        self.ends = tuple(dict.fromkeys(map(egraph.find, egraph.values.ends)))
        self.classes: dict[str, list[ENode]] = {}
        self.leaves = {egraph.find(name): name for name in egraph.values.live if name not in egraph.values.definitions}
        for node, name in egraph.nodes.items():
            if egraph.find(name) not in self.leaves:
                self.classes.setdefault(egraph.find(name), []).append(node)
        self.stored = self._made_of_parameters()

    # what is chosen

    def chosen(self, seconds: float) -> dict[str, ENode] | None:
        """The node of each class that is needed; None where none was found in some seconds."""
        model = cp_model.CpModel()
        takes = {node: model.new_bool_var("") for nodes in self.classes.values() for node in nodes}
        needs = {name: model.new_bool_var("") for name in (*self.classes, *self.leaves)}
        for name, nodes in self.classes.items():
            model.add_exactly_one([*(takes[node] for node in nodes), ~needs[name]])
        for node, take in takes.items():
            for operand in self._reads(node):
                model.add_implication(take, needs[operand])
        readers: dict[str, list[cp_model.IntVar]] = {name: [] for name in needs}
        for node, take in takes.items():
            for operand in self._reads(node):
                readers[operand].append(take)
        for name, need in needs.items():
            if name in self.ends:
                model.add(need == 1)
            else:
                model.add_bool_or([*readers[name], ~need])
        self._acyclic(model, takes)
        model.minimize(self._cost(model, takes, needs))
        for node, name in self.egraph.given.items():
            if node in takes:
                model.add_hint(takes[node], self.egraph.find(name) in needs)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
        solver.parameters.catch_sigint_signal = False  # Ctrl-C is the search's own (`autopar.interrupt`)
        solver.parameters.linearization_level = 2  # the bound of the relaxation is what proves a choice best
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return {self.egraph.find(self.egraph.nodes[n]): n for n, take in takes.items() if solver.value(take)}

    def _reads(self, node: ENode) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.egraph.find, node.operands)))

    def _acyclic(self, model: cp_model.CpModel, takes: Mapping[ENode, cp_model.IntVar]) -> None:
        graph = networkx.DiGraph(
            (name, operand) for name, nodes in self.classes.items() for node in nodes for operand in self._reads(node)
        )
        knots = list(networkx.strongly_connected_components(graph))
        knot_of = {name: number for number, knot in enumerate(knots) for name in knot}
        place = {
            name: model.new_int_var(0, len(knot) - 1, "") for knot in knots if len(knot) > 1 for name in knot
        }  # fmt: skip
        for name, nodes in self.classes.items():
            for node in nodes:
                for operand in self._reads(node):
                    if operand == name:
                        model.add(takes[node] == 0)
                    elif knot_of[operand] == knot_of[name]:
                        model.add(place[name] > place[operand]).only_enforce_if(takes[node])

    # what it costs

    def _cost(
        self, model: cp_model.CpModel, takes: Mapping[ENode, cp_model.IntVar], needs: Mapping[str, cp_model.IntVar]
    ) -> cp_model.LinearExpr:
        terms, together = [], dict[tuple[object, ...], tuple[cp_model.IntVar, int]]()
        for node, take in takes.items():
            cost_ns = self.node_ns(node)
            kind = self._at_once(node)
            if kind is None:
                terms.append(cost_ns * take)
            else:
                if node.op in PARTS and self.pricer.trains:
                    cost_ns += self.pricer.sum_ns(self.egraph.tensor(self._cut_from(node)))
                once, most = together.setdefault(kind, (model.new_bool_var(""), 0))
                together[kind] = once, max(most, cost_ns)
                model.add_implication(take, once)
        terms += [cost_ns * once for once, cost_ns in together.values()]
        if self.pricer.trains:
            terms += self._sums(takes, needs)
        return cp_model.LinearExpr.sum(terms)

    def _at_once(self, node: ENode) -> tuple[object, ...] | None:
        """Equal for nodes that are paid once: results of one operator, and parts of one tensor along one dim."""
        if node.op == OPAQUE:
            return OPAQUE, node.attributes[1]
        return (PARTS, self._cut_from(node), node.attributes[0]) if node.op in PARTS else None

    def _cut_from(self, node: ENode) -> str:
        """What a part is cut from in the end: parts of a part are cut from the whole, with the part."""
        seen, name = set[str](), self.egraph.find(node.operands[0])
        while name not in seen:
            seen.add(name)
            outer = (each for each in self.classes.get(name, ()) if each.op in PARTS)
            same = next((each for each in outer if each.attributes[0] == node.attributes[0]), None)
            name = name if same is None else self.egraph.find(same.operands[0])
        return name

    def _sums(
        self, takes: Mapping[ENode, cp_model.IntVar], needs: Mapping[str, cp_model.IntVar]
    ) -> Iterator[cp_model.LinearExpr]:
        """Of the gradients of what several read."""
        sum_ns = {name: self.pricer.sum_ns(self.egraph.tensor(name)) for name in needs}
        for node, take in takes.items():
            if node.op not in PARTS:
                yield sum(sum_ns[name] for name in self._reads(node)) * take
        for name, need in needs.items():
            if sum_ns[name]:
                yield -sum_ns[name] * need

    def node_ns(self, node: ENode) -> int:
        """Time of a node by itself."""
        if node.op in MOVING and self._is_stored(node):
            return 0
        name = self.egraph.find(self.egraph.nodes[node])
        if not self.pricer.trains and name in self.stored:
            return 0
        given = self.egraph.given.get(node)
        definition = None if given is None else self.egraph.values.definitions[given]
        made = None if definition is None else definition.node
        if made is not None and definition is not None and made.results == (given,) and not definition.through:
            return self.pricer.of_node_ns(made, self.egraph.values.graph.tensors)
        if node.op == OPAQUE or node.op not in (*WRITERS, *PARTS):
            assert made is not None, "rules make no such operators"
            return self.pricer.of_node_ns(made, self.egraph.values.graph.tensors)
        return self._written_ns(node, name)

    def _is_stored(self, node: ENode) -> bool:
        """Whether what a node moves can be stored as it is then: parameters, all trained or all frozen."""
        alike = len({self.egraph.tensor(name).differentiable for name in node.operands}) == 1
        return alike and all(self.egraph.find(name) in self.stored for name in node.operands)

    def _written_ns(self, node: ENode, name: str) -> int:
        """Of a new node: of a graph that has no other."""
        operands = {f"x{number}": self.egraph.tensor(operand) for number, operand in enumerate(node.operands)}
        tensors = {key: replace(tensor, name=key) for key, tensor in operands.items()}
        graph = replace(
            self.egraph.values.graph, inputs=tuple(tensors), stored=(), nodes=(), outputs=("y",), mutations={},
            tensors=tensors, loss=None,
        )  # fmt: skip
        made = self.egraph.tensor(name)
        result = Tensor("y", made.shape, made.dtype, made.differentiable)
        definition = Definition(node.op, node.attributes, tuple(tensors), result)
        return self.pricer(Values(graph, {"y": definition}, frozenset()))

    def _made_of_parameters(self) -> set[str]:
        """Classes that hold parameters, or what moves them; in inference, what is computed of them, too."""
        graph = self.egraph.values.graph
        found = {self.egraph.find(s.tensor) for s in graph.stored if s.tensor in self.egraph.parents}
        while True:
            more = {
                name
                for name, nodes in self.classes.items()
                if name not in found
                for node in nodes
                if (node.op in MOVING or (not self.pricer.trains and node.op != OPAQUE))
                and node.operands
                and all(self.egraph.find(operand) in found for operand in node.operands)
            }
            if not more:
                return found
            found |= more

    # the way there

    def found(self, chosen: Mapping[str, ENode], start: Found) -> Found:
        """The graph after the substitutions that make what is chosen of the graph as it is.

        First those that make it at once, then all that brought it, in the order in which they were met. One that does
        not apply, as its source is another form by then, is left out; of the graphs on the way, the cheapest is taken.
        """
        names = {name: self.egraph.find(name) for name in self.egraph.values.live}
        way = [start]
        for numbers in (self._direct(chosen), self._needed(chosen)):
            names = self._go(numbers, way, names)
        return min(way, key=cheaper)

    def _go(self, left: list[int], way: list[Found], names: dict[str, str]) -> dict[str, str]:
        """Adds to the way the graph after each application, as soon as it applies; returns the classes of values."""
        while left:
            missed = []
            for number in left:
                now = way[-1]
                step = self._step(now.values, number, names)
                if step is None:
                    missed.append(number)
                    continue
                match, after = step
                names = self._named(number, match, after, names)
                cost_ns = self.pricer(after)
                way.append(Found(after, (*now.matches, match), (*now.gains_ns, now.cost_ns - cost_ns), cost_ns))
            if len(missed) == len(left):
                break
            left = missed
        return names

    def _direct(self, chosen: Mapping[str, ENode]) -> list[int]:
        """Applications whose targets are what is chosen for their roots, and not what is given."""
        find, given = self.egraph.find, self.egraph.given
        found = []
        for number, application in enumerate(self.egraph.applications):
            wanted = [chosen.get(find(root)) for root in application.roots]
            tops = [self._top(term, application.binding) for term in application.rule.target]
            if wanted == tops and not any(top in given for top in tops):
                found.append(number)
        return found

    def _top(self, term: Term, binding: Binding) -> ENode | None:
        """The node of a term that an application has added; None for a variable."""
        if isinstance(term, Variable):
            return None
        attributes = tuple(attribute(item, self.egraph, binding) for item in term.attributes)
        operands = tuple(self._class_of(operand, binding) for operand in term.operands)
        return ENode(term.op, attributes, operands)  # type: ignore[arg-type] # what a rule has added is bound

    def _class_of(self, term: Term, binding: Binding) -> str:
        top = self._top(term, binding)
        if top is not None:
            return self.egraph.find(self.egraph.nodes[top])
        assert isinstance(term, Variable)
        return self.egraph.find(binding[term.name])

    def _needed(self, chosen: Mapping[str, ENode]) -> list[int]:
        """The applications that brought what is chosen where it is read, and those that these needed."""
        egraph, reached, wanted = self.egraph, set[str](), set[int]()
        last = len(egraph.applications)
        stack = [*egraph.values.ends]
        while stack:
            sought = stack.pop()
            if sought in reached:
                continue
            reached.add(sought)
            name = egraph.find(sought)
            if name in self.leaves:
                wanted |= egraph.reasons(sought, self.leaves[name], last)
                continue
            node = chosen[name]
            birth = egraph.births[node]
            wanted |= self._of(Link(sought, birth.name, birth.maker), last)
            stack += birth.operands
        return sorted(self._closed(wanted))

    def _of(self, link: Link, before: int) -> set[int]:
        """The applications by which a node is in the class that it is sought in."""
        return self.egraph.reasons(link.sought, link.born, before) | (set() if link.maker is None else {link.maker})

    def _closed(self, wanted: Iterable[int]) -> set[int]:
        found, stack = set[int](), list(wanted)
        while stack:
            number = stack.pop()
            if number not in found:
                found.add(number)
                links = self.egraph.applications[number].links
                stack += (new for link in links for new in self._of(link, number))
        return found

    def _step(self, values: Values, number: int, names: Mapping[str, str]) -> tuple[Match, Values] | None:
        """An application as a substitution of the graph as it is now."""
        wanted = self.egraph.applications[number]
        find = self.egraph.find
        roots = tuple(map(find, wanted.roots))
        for match in Matcher(wanted.rule).matches(values):
            if tuple(names[root] for root in match.roots) == roots and all(
                (value == wanted.binding[key]) if key[0] == "?" else names[value] == find(wanted.binding[key])
                for key, value in match.binding.items()
            ):
                after = rewritten(values, match)
                if after is not None:
                    return match, after
        return None

    def _named(self, number: int, match: Match, after: Values, names: Mapping[str, str]) -> dict[str, str]:
        """The classes of values, with those that a substitution made."""
        known, binding = dict(names), self.egraph.applications[number].binding
        stack: list[tuple[Term, str]] = list(zip(match.rule.target, match.roots, strict=True))
        while stack:
            term, name = stack.pop()
            if isinstance(term, Apply) and name in after.definitions:
                known[name] = self._class_of(term, binding)
                stack += zip(term.operands, after.definitions[name].operands, strict=True)
        return known


def saturated(start: Found, matchers: Sequence[Matcher], pricer: Pricer, seconds: float) -> Found:
    """The cheapest graph that saturation and extraction, again and again as long as they gain, reach in some seconds.

    matchers: of rules, those first that are to have a place where there is not enough for all.
    """
    end = time.monotonic() + seconds
    now = start
    while (left := end - time.monotonic()) > 0:
        egraph = EGraph(now.values)
        egraph.saturate(matchers_for(now.values, matchers), left / 2)
        extraction = Extraction(egraph, pricer)
        chosen = extraction.chosen(min(MOST_SECONDS, max(0.0, end - time.monotonic())))
        found = None if chosen is None else extraction.found(chosen, now)
        if found is None or found.cost_ns >= now.cost_ns:
            break
        now = found
    return now


def matchers_for(values: Values, matchers: Sequence[Matcher]) -> list[Matcher]:
    """Those whose source has operators alone that some rule or the graph makes: others can never match.

    Rules that were generated follow from the stated ones, and operands that change places are met as they are.
    """
    rest = [matcher for matcher in matchers if not matcher.rule.name.startswith((GENERATED, *COMMUTED))]
    matchers, known = list(rest), set(values.by_op)
    while True:
        fits = [matcher for matcher in rest if _operators(matcher.rule.source) <= known]
        if not fits:
            return [matcher for matcher in matchers if matcher not in rest]
        rest = [matcher for matcher in rest if matcher not in fits]
        known.update(op for matcher in fits for op in _operators(matcher.rule.target))


def _operators(terms: Iterable[object]) -> set[str]:
    stack, found = list(terms), set[str]()
    while stack:
        term = stack.pop()
        if isinstance(term, Apply):
            found.add(term.op)
            stack += term.operands
    return found
