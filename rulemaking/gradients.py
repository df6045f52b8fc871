"""Gradients of both sides of a rule, compared in double precision by torch's autograd."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from autopar.substitute.rules.terms import Rule, Term
from rulemaking.instances import Instance, evaluate, instances, torch_can
from rulemaking.values import Doubles

TOLERANCE = 1e-9


def gradient_difference(rule: Rule, num_instances: int, seed: int = 0) -> str | None:
    """The first variable whose gradients differ between the sides of a rule, in words; None where none does.

    Every output gets a random gradient, the same on both sides; all variables' gradients are compared, each element
    to 1e-9 of the largest.
    """
    values = Doubles()
    drawn = (instance for instance in instances(rule, values, seed) if torch_can(instance, rule))
    for index, instance in enumerate(islice(drawn, num_instances)):
        found = [_gradients(side, instance, values, seed + index) for side in (rule.source, rule.target)]
        for name in rule.sorts:
            left, right = (gradients[name] for gradients in found)
            if not torch.allclose(left, right, rtol=TOLERANCE, atol=TOLERANCE * float(left.abs().sum() + 1)):
                return f"the gradients of {name} differ where {instance}"
    return None


def _gradients(side: tuple[Term, ...], instance: Instance, values: Doubles, seed: int) -> dict[str, torch.Tensor]:
    """The gradient of every variable; zeros where an output does not depend on it."""
    known: dict[Term, torch.Tensor] = {}
    outputs = [evaluate(term, instance, values, known) for term in side]
    random = np.random.default_rng(seed)
    total = sum((output * torch.from_numpy(random.standard_normal(tuple(output.shape)))).sum() for output in outputs)
    leaves = list(instance.arrays.values())
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in instance.arrays.items()}
    found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(instance.arrays, found, strict=True))
