"""One substitution: the values that a match's outputs are get the definitions that the rule's target states."""

from __future__ import annotations

from autopar.ir.graph import Tensor
from autopar.substitute.defined import Definition, Values
from autopar.substitute.fitting import Misfit, made_shape
from autopar.substitute.matching import Binding, Match, attribute
from autopar.substitute.rules.terms import Apply, Attribute, Term, Variable


def rewritten(values: Values, match: Match) -> Values | None:
    """The values after a substitution; None where its target does not apply to these shapes, or changes nothing."""
    try:
        return _MatchRewriting(values, match).result()
    except Misfit:
        return None


class _MatchRewriting:
    """The definitions that one match brings."""

    def __init__(self, values: Values, match: Match) -> None:
        self.values, self.match = values, match
        self.new: dict[str, Definition] = {}
        self.number = values.number
        self.same: list[tuple[str, str]] = []

    def result(self) -> Values | None:
        for root, term in zip(self.match.roots, self.match.rule.target, strict=True):
            self._redefine(root, term)
        if not self.new and not self.same:
            return None
        values = self.values.defined(self.new, self.number)
        for name, other in self.same:
            values = values.same(values.now(name), values.now(other))
        return None if values.has_cycle else values

    def _redefine(self, root: str, term: Term) -> None:
        tensor = self.values.tensor(root)
        if isinstance(term, Variable):
            other = self.match.binding[term.name]
            if self.values.tensor(other).shape != tensor.shape or other == root:
                raise Misfit
            self.same.append((root, other))
            return
        op, attributes, operands, made = self._applied(term)
        if made.shape != tensor.shape or made.dtype != tensor.dtype:
            raise Misfit
        if not self.values.definitions[root].says(op, attributes, operands):
            self.new[root] = Definition(op, attributes, operands, tensor)

    def _applied(self, term: Apply) -> tuple[str, tuple[Attribute, ...], tuple[str, ...], Tensor]:
        operands = tuple(map(self._value, term.operands))
        attributes = tuple(_bound(item, self.values, self.match.binding) for item in term.attributes)
        tensors = [self._tensor(operand) for operand in operands]
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise Misfit
        shape = made_shape(term.op, attributes, [tensor.shape for tensor in tensors])
        differentiable = any(tensor.differentiable for tensor in tensors)
        return term.op, attributes, operands, Tensor("", shape, tensors[0].dtype, differentiable)

    def _value(self, term: Term) -> str:
        """The value of a term: one that is computed already, or a new one."""
        if isinstance(term, Variable):
            found: str = self.match.binding[term.name]
            return found
        op, attributes, operands, tensor = self._applied(term)
        for name in (*self.values.readers.get(operands[0], ()), *self.new) if operands else ():
            known = self.new.get(name) or self.values.definitions[name]
            if name not in self.match.roots and known.says(op, attributes, operands):
                return name
        self.number += 1
        name = f"{self.match.roots[0].partition('~')[0]}~s{self.number}"
        self.new[name] = Definition(
            op, attributes, operands, Tensor(name, tensor.shape, tensor.dtype, tensor.differentiable)
        )
        return name

    def _tensor(self, name: str) -> Tensor:
        return self.new[name].tensor if name in self.new else self.values.tensor(name)


def _bound(wanted: Attribute, values: Values, binding: Binding) -> Attribute:
    found = attribute(wanted, values, binding)
    if found is None:
        raise Misfit(f"{wanted}")
    return found
