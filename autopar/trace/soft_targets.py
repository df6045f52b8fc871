"""Cross-entropy of probabilities, in the operators that it is made of: each has rules, the whole has none.

Before → after, as torch computes it, of N samples, C classes, weights w, smoothing ε:

    loss = cross_entropy_loss(z, p)  →  −Σ log_softmax(z) · (p · (1 − ε) + ε / C) · w   (a mean divides by N)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.trace.dropout import Writer, replaced

aten = torch.ops.aten


def write_out_soft_targets(module: fx.GraphModule) -> None:
    """Rewrites the exported, not yet functional graph in place."""
    for node in list(module.graph.nodes):
        if node.target == aten.cross_entropy_loss.default and node.args[1].meta["val"].is_floating_point():
            replaced(module, node, _cross_entropy)
    module.recompile()


def _cross_entropy(call: Writer, given: dict[str, Any]) -> fx.Node:
    logits, target = given["self"], given["target"]
    shape, smoothing = logits.meta["val"].shape, float(given["label_smoothing"])
    dim = 0 if len(shape) == 1 else 1
    if smoothing:
        target = call(aten.mul.Tensor, target, 1 - smoothing)
        target = call(aten.add.Tensor, target, smoothing / shape[dim])
    losses = call(aten.mul.Tensor, call(aten.log_softmax.int, logits, dim), target)
    if given["weight"] is not None:
        others = [1] * (len(shape) - dim - 1)
        losses = call(aten.mul.Tensor, losses, call(aten.reshape.default, given["weight"], [shape[dim], *others]))
    losses = call(aten.neg.default, call(aten.sum.dim_IntList, losses, [dim]))
    reductions = {1: aten.mean.default, 2: aten.sum.default}
    return call(reductions[given["reduction"]], losses) if given["reduction"] else losses
