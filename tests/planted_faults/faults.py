"""Faults as data: what is planted, where, and what should catch it.

A check is "op:NAME" (small random programs around an operator), "random" (random programs of every kind), "mutants"
(mutated plans that verify must compute the same), or "tests:…" (a selection of the suite).
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which the file has once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...] = ("random",)


TABLE, PATTERNS, VIEWS = "autopar/ops/table.py", "autopar/ops/patterns.py", "autopar/ops/views.py"
LOOKUP, NOTATION = "autopar/ops/lookup.py", "autopar/ops/notation.py"
ATTENTION, STATISTICS = "autopar/ops/attention.py", "autopar/ops/statistics.py"
LOOKUPS, LOSSES, IMAGES = "autopar/ops/embedding.py", "autopar/ops/losses.py", "autopar/ops/windows.py"


def _losses(words: str) -> tuple[str, ...]:
    return (f'tests:tests/equivalence/test_losses.py -k "sums and {words}"',)


RULES = [
    Fault("linear adds its bias on every rank", TABLE, '"... k, n k, n -> ... n", "PRP RPP", additive=(2,))',
          '"... k, n k, n -> ... n", "PRP RPP")', ("op:linear",)),
    Fault("bmm of two summands", TABLE, '"aten.bmm.default": kinds.PRODUCT.by(Entry("b m k, b k n -> b m n", "PR RP")',
          '"aten.bmm.default": kinds.PRODUCT.by(Entry("b m k, b k n -> b m n", "PP")', ("op:bmm",)),
    Fault("matmul of two summands", TABLE, '-> {result}", "PR RP")(call)', '-> {result}", "PR RP PP")(call)',
          ("op:matmul",)),
    Fault("matmul split along k gives equal values", NOTATION,
          "tuple(_shard(dims, shape, letter) or P for dims, shape in zip(results",
          "tuple(_shard(dims, shape, letter) or R for dims, shape in zip(results", ("op:matmul",)),
    Fault("addmm adds its bias on every rank", TABLE, '"PPR PRP", additive=(0,))(call)', '"PPR PRP")(call)',
          ("op:addmm",)),
    Fault("einsum of two summands", "autopar/ops/long_tail.py", '"".join("P" if i == p else "R" for i in range(count))',
          '"".join("P" for i in range(count))', ("op:einsum",)),
    Fault("causal attention splits its queries", ATTENTION, 'q = "Q" if causal else "q"', 'q = "q"', ("op:attention",)),
    Fault("attention splits its keys", ATTENTION, '{batch}h T D, {batch}h T V"', '{batch}h t D, {batch}h t V"',
          ("op:attention",)),
    Fault("grouped heads split within groups", ATTENTION,
          "if any(count % shards for count in heads if count > 1):", "if not heads:", ("op:attention",)),
    Fault("layer norm splits what it normalises", STATISTICS, 'own = " ".join(f"H{i}" for i in range(width))',
          'own = " ".join(f"h{i}" for i in range(width))', ("op:layer_norm",)),
    Fault("rows of an embedding give equal values", LOOKUPS, "AxisRule((S(0), R), (P,)), *(AxisRule(",
          "AxisRule((S(0), R), (R,)), *(AxisRule(", ("op:embedding",)),
    Fault("a loss of split samples is taken for whole", LOSSES, "(S(position) if spread else P,)",
          "(S(position) if spread else R,)", ("op:cross_entropy",)),
    Fault("group norm splits within groups", STATISTICS, "if groups % shards else None", "if not groups else None",
          ("op:group_norm",)),
    Fault("convolution splits within groups", IMAGES, "if groups > 1 and groups % shards else None",
          "if not groups else None", ("op:conv2d",)),
    Fault("gather splits the dim that it gathers along", "autopar/ops/indexing.py",
          "whole=lambda d: d == dim or not same[d] or lengths", "whole=lambda d: not same[d] or lengths",
          ("op:gather",)),
    Fault("softmax and cumsum split the dim that they run along", PATTERNS, "for dim in range(rank) if dim != own]",
          "for dim in range(rank)]", ("op:softmax",)),
    Fault("a sum over a split dim gives equal values", PATTERNS,
          "AxisRule((S(dim),), (P,)) for dim in sorted(_reduced(call))",
          'AxisRule((S(dim),), (P._replace(kind="R"),)) for dim in sorted(_reduced(call))', ("op:sum",)),
    Fault("amax splits the dim that it reduces", PATTERNS,
          "stay = [dim for dim in range(rank) if dim not in gone]\n    count",
          "stay = [dim for dim in range(rank) if dim not in gone or keep]\n    count", ("op:amax",)),
    Fault("summands pass through relu", TABLE, '**_named("relu", Operator(saved=saved.result, in_bits=in_bits.RELU)),',
          '**_named("relu", Operator(saved=saved.result, in_bits=in_bits.RELU, linear="P")),', ("op:relu",)),
    Fault("a product of two summands", TABLE, 'linear="P PR RP"', 'linear="P PR RP PP"', ("op:mul",)),
    Fault("a number is added to summands", TABLE, 'saved.gradients_of_sum, linear="PP"',
          'saved.gradients_of_sum, linear="P PP"', ("op:shift",)),
    Fault("a quotient of summands", TABLE, 'linear="P PR"),', 'linear="P PP"),', ("op:div",)),
    Fault("a reshape moves the last dim of a group", VIEWS, "source, target = _leading(before, left), _leading",
          "source, target = (left[-1] if left else None), _leading", ("op:merge",)),
    Fault("a reshape splits what its slices do not keep whole", VIEWS,
          "math.gcd(before[dim], after[target])", "math.lcm(before[dim], after[target])", ("op:unmerge", "op:merge")),
    Fault("transpose leaves dims where they are", VIEWS, "order[first], order[second] = order[second], order[first]",
          "order[first], order[second] = order[first], order[second]", ("op:transpose",)),
    Fault("permute by the inverse order", VIEWS, 'dim_map([dim % rank for dim in call.arguments["dims"]])',
          'dim_map([list(call.arguments["dims"]).index(dim) for dim in range(rank)])', ("op:permute",)),
    Fault("unsqueeze forgets the dim that it makes", VIEWS, "None if dim == new else dim - (dim > new)",
          "None if dim == new else min(dim, rank - 1)", ("op:unsqueeze",)),
    Fault("select forgets the dim that goes", VIEWS, "dim_map([dim + (dim >= gone)", "dim_map([dim + (dim > gone)",
          ("op:select",)),
    Fault("slice splits the dim that it cuts", VIEWS, "None if dim == cut and not whole else dim", "dim",
          ("op:slice",)),
    Fault("split cuts a split dim", VIEWS, "(S(dim),) * count) for dim in range(rank) if dim != cut]",
          "(S(dim),) * count) for dim in range(rank)]", ("op:split",)),
    Fault("cat joins along a split dim", VIEWS, "for dim in range(rank) if dim != joined)]", "for dim in range(rank))]",
          ("op:cat",)),
    Fault("stack forgets the dim that it makes", VIEWS, "(S(d - (d > new)),) * count", "(S(min(d, rank - 2)),) * count",
          ("op:stack",)),
    Fault("padding with ones is taken for linear", VIEWS, 'linear = not call.arguments["value"] and',
          "linear = ", ("op:pad",)),
    Fault("padding splits the dim that it pads", VIEWS, "None if dim in padded else dim", "dim", ("op:pad",)),
    Fault("flip and roll split the dim that they move", VIEWS, "None if dim in moved else dim", "dim",
          ("op:flip", "op:roll")),
    Fault("an expanded dim counts as there before", VIEWS,
          "None if dim < lead or before[dim - lead] != after[dim] or after[dim] == 1 else dim - lead",
          "None if dim < lead else dim - lead", ("op:expand",)),
    Fault("a bias is replicated where its product is a summand", NOTATION,
          "P if summed and position in additive else R", "R", ("op:linear",)),
]  # fmt: skip

CHANGES = "autopar/runtime/redistributing.py"
_I_R = '("I", "R"): (lambda m, x: x, lambda m, g: pieces.sum_over(g, m.axis)),'
_R_I = '("R", "I"): (lambda m, x: x, lambda m, g: pieces.keep_on_first(g, m.axis)),'
_I_S = (
    "lambda m, x: pieces.cut(x, m.target, m.axis),\n"
    "        lambda m, g: pieces.gather(g, m.target, m.axis, m.target_size),"
)
_R_S = "lambda m, g: pieces.place(g, m.target, m.axis, m.target_size)"
_P_S = "lambda m, x: pieces.reduce_scatter(x, m.target, m.axis),"

REDISTRIBUTIONS = [
    Fault("I → R: the gradient is not summed", CHANGES, _I_R, '("I", "R"): (lambda m, x: x, lambda m, g: g),'),
    Fault("R → I: every rank keeps the gradient", CHANGES, _R_I, '("R", "I"): (lambda m, x: x, lambda m, g: g),'),
    Fault("I → S: the gradient is not gathered", CHANGES, _I_S, _I_S.replace("pieces.gather", "pieces.place")),
    Fault("R → S: the gradient is gathered", CHANGES, _R_S, _R_S.replace("place", "gather")),
    Fault("S → R: the gradient is not summed", CHANGES, "lambda m, g: pieces.reduce_scatter(g, m.source, m.axis)",
          "lambda m, g: pieces.cut(g, m.source, m.axis)"),
    Fault("S → I: the gradient is summed", CHANGES, "lambda m, g: pieces.cut(g, m.source, m.axis)",
          "lambda m, g: pieces.reduce_scatter(g, m.source, m.axis)"),
    Fault("S → S: the dims are swapped on the way back", CHANGES,
          "pieces.all_to_all(g, m.target, m.source, m.axis, m.target_size)",
          "pieces.all_to_all(g, m.source, m.target, m.axis, m.source_size)"),
    Fault("P → R: the gradient is not summed", CHANGES,
          "pieces.sum_over(x, m.axis), lambda m, g: pieces.sum_over(g, m.axis)),",
          "pieces.sum_over(x, m.axis), lambda m, g: g),"),
    Fault("P → I: the gradient is summed", CHANGES, "wait=m.wait), lambda m, g: g),",
          "wait=m.wait), lambda m, g: pieces.sum_over(g, m.axis)),"),
    Fault("P → S: scattered along the wrong dim", CHANGES, _P_S, _P_S.replace("m.target", "max(m.target - 1, 0)")),
    Fault("I → P: every rank keeps the value", CHANGES,
          '("I", "P"): (lambda m, x: pieces.keep_on_first(x, m.axis),', '("I", "P"): (lambda m, x: x,'),
    Fault("R → P: every rank keeps the gradient", CHANGES, "lambda m, g: pieces.keep_on_first(g, m.axis),\n    ),",
          "lambda m, g: g,\n    ),"),
    Fault("an uneven last shard keeps its padding", "autopar/runtime/pieces.py",
          "reshape(shape).narrow(dim, 0, size).contiguous()", "reshape(shape).contiguous()"),
    Fault("an all-to-all keeps its padding", "autopar/runtime/pieces.py",
          "return whole.narrow(target, 0, local_size(target_size, axis)).contiguous()", "return whole.contiguous()"),
    Fault("two axes that cut one dim: the inner offset is that of even parts", "autopar/runtime/placement.py",
          "offset, size = offset + start, end - start", "offset, size = offset + start, -(-size // axis.size)",
          ("random", "op:embedding", "tests:tests/runtime/test_redistribute.py")),
    Fault("a value kept once is kept by the last rank and the first", "autopar/runtime/pieces.py",
          "if axis.index:\n        return torch.zeros_like(x)",
          "if axis.index and axis.index != axis.size - 1:\n        return torch.zeros_like(x)"),
    Fault("a step is taken though an inner axis cuts the same dim", "autopar/ir/redistribution.py",
          'return not any(type_.kind == "S" and type_ in inner for type_ in (step.before, step.after))', "return True",
          ("random", "mutants")),
]  # fmt: skip

EMBEDDING, LOSS = "autopar/runtime/lowering/embedding.py", "autopar/runtime/lowering/cross_entropy.py"
NORMS, RANDOM = "autopar/runtime/lowering/statistics.py", "autopar/runtime/randomness.py"
CALLS, CLASSES = "autopar/emit/calls.py", "autopar/emit/classes.py"

LOWERING = [
    Fault("a masked lookup with the offset of even rows", EMBEDDING,
          "ids - local_offset(num_embeddings, *axes)\n    elsewhere", "ids - rows * axes[0].index\n    elsewhere",
          ("op:embedding",)),
    Fault("a lookup that is not masked", EMBEDDING, "return found.masked_fill(elsewhere.unsqueeze(-1), 0)",
          "return found", ("op:embedding",)),
    Fault("the padding row of a split table has a gradient", EMBEDDING, "if padding_idx >= 0:", "if padding_idx > 99:",
          ("op:embedding",)),
    Fault("ignored targets are counted by each rank for itself", LOSS,
          "wait = comm.start_all_reduce(count, split[0]) if split else None", "wait = None", ("op:cross_entropy",)),
    Fault("targets are counted over one axis of two", LOSS, "for axis in split[1:]:", "for axis in split[2:]:",
          ("op:cross_entropy",)),
    Fault("split classes: targets are not shifted", LOSS, "safe - start,", "safe,", ("op:cross_entropy",)),
    Fault("split classes: each rank shifts by its own largest logit", LOSS,
          "comm.all_reduce(largest, axis, dist.ReduceOp.MAX)", "pass", ("op:cross_entropy",)),
    Fault("split classes: every rank subtracts its first class", LOSS, "-(factor * here).unsqueeze(1)",
          "-factor.unsqueeze(1)", ("op:cross_entropy",)),
    Fault("a mean divides by the local length", NORMS, "return x.sum(tuple(dims), keepdim) / count",
          "return x.mean(tuple(dims), keepdim)", ("op:mean",)),
    Fault("batch norm with the mean of the local samples", NORMS,
          "average = _summed(wide.sum(dims), axes) / count", "average = wide.mean(dims)", ("op:batch_norm",)),
    Fault("batch norm keeps the biased variance", NORMS, "(count / (count - 1))", "1.0", ("op:batch_norm",)),
    Fault("group norm with local variances", NORMS, "_sum_over(centred.square().sum(2, keepdim=True), axes) / count",
          "centred.square().mean(2, keepdim=True)", ("op:group_norm",)),
    Fault("dropout: exact masks of the first part everywhere", RANDOM,
          "part = whole[local_slices(whole.shape, shards, axes)]",
          "part = whole[tuple(slice(0, length) for length in like.shape)]", ("op:dropout",)),
    Fault("recomputation draws new numbers", "autopar/runtime/recomputing.py", "        randomness.go_to(place)\n", "",
          ("tests:tests/runtime/test_lowering.py -k recomputing",)),
    Fault("recomputation runs as another microbatch", "autopar/runtime/recomputing.py",
          "self.then = progress.microbatch, progress.count", "self.then = 0, progress.count",
          ("tests:tests/runtime/test_lowering.py -k recomputing",)),
    Fault("dropout: shards draw the same mask", RANDOM, "_key(tuple((axis.name, axis.index) for axis in axes))",
          "_key(())", ("tests:tests/runtime/test_lowering.py -k masks",)),
    Fault("a mean in an emitted program is always local", STATISTICS,
          'if not any(type_.kind == "S" and type_.dim in dims for type_ in local.placements[0]):', "if dims:",
          ("op:mean",)),
    Fault("a table split over two axes takes them in the wrong order", LOOKUPS,
          "rt.embedding({ids}, {table}, {tuple_of(axes)},",
          "rt.embedding({ids}, {table}, {tuple_of(axes[::-1])},", ("op:embedding",)),
    Fault("uneven lengths are not told", CLASSES,
          "if are_alike(tensor.shape, placement, step.before.dim, self.stage.axes):", "if tensor.shape:"),
    Fault("two uses of a parameter read the first", CLASSES,
          'return self.attributes.path(stored.name) + (f"_{position}" if position else "")',
          "return self.attributes.path(stored.name)"),
    Fault("a converted buffer of a block is taken for its attribute", CLASSES,
          "stored is None or (stored.kind != \"parameter\" and value[1] != self.stage.storage[value[0]].placement)",
          "stored is None", ("tests:tests/random_programs/test_random_programs.py -k buffer",)),
    Fault("a regathered parameter is not marked", CLASSES, "if storage.regather:", "if storage.regather is None:"),
    Fault("microbatches divide their loss by their own count", CALLS,
          'self.count_of(name) if is_mean and self._is_microbatched(statement) else ""', '""',
          ("op:cross_entropy",)),
    Fault("microbatches sum a mask of their own", "autopar/runtime/inputs.py",
          "torch.stack(list(parts)).sum(0)", "parts[0]", _losses("counted")),
    Fault("every microbatch adds a penalty on parameters", "autopar/runtime/inputs.py",
          "return x if index == 0 else x * 0", "return x", _losses("penalty")),
    Fault("weights of classes are not counted", "autopar/emit/counting.py", "rt.valid_count({counted}, weight=weight)",
          "rt.valid_count({counted})", _losses("class")),
    Fault("all means of a model divide by one count", "autopar/emit/calls.py",
          'return "self.count" if len(self.means) == 1 else', 'return "self.count" if self.means else', _losses("two")),
]  # fmt: skip

HALO, WINDOWS = "autopar/runtime/lowering/halo.py", "autopar/runtime/lowering/windows.py"
EXPERTS, EXCHANGE = "autopar/runtime/lowering/experts.py", "autopar/runtime/lowering/exchange.py"
GROUPED, SLICED = "autopar/runtime/lowering/grouped.py", "autopar/runtime/lowering/sliced.py"
ACTIVATIONS = "autopar/runtime/lowering/activations.py"
SEEN = "autopar/runtime/lowering/window.py"


def _samples(words: str) -> tuple[str, ...]:
    return (f"tests:tests/ops/test_rules.py -k {words}",)


INSIDE = [
    Fault("a row that several ranks needed keeps the gradient of one", HALO, ".add_(piece)", ".copy_(piece)",
          _samples("conv1d")),
    Fault("gradients of keys that come home take the place of a rank's own", SEEN, ".add_(part.view(shape))",
          ".copy_(part.view(shape))", ("tests:tests/runtime/test_window_attention.py -k split_the_sequence",)),
    Fault("gradients of a triangle from behind stay in that order", "autopar/runtime/lowering/band.py",
          "part = part.flip(2) if piece.is_behind else part", "part = part",
          ("tests:tests/runtime/test_window_attention.py -k under_its_mask",)),
    Fault("sinks take no share of the weights where gradients are made", SEEN,
          "return torch.logaddexp(lse, scores)", "return lse",
          ("tests:tests/runtime/test_window_attention.py -k under_its_mask",)),
    Fault("a mask that hides little is one", "autopar/substitute/sinks.py", "torch.finfo(dtype).min / 2)", "0.0)",
          ("tests:tests/substitute/test_sinks.py -k stays",)),
    Fault("positions within documents are taken for places whatever numbers these", "autopar/substitute/bands.py",
          "is_joined and rest == positions and", "is_joined and",
          ("tests:tests/substitute/test_bands.py -k stays",)),
    Fault("every rank pads on both sides", HALO, "front = min(max(0, -begin), end - begin)", "front = window.padding",
          _samples("conv1d")),
    Fault("zeros win a maximum in the padding", WINDOWS, 'float("-inf"))', "0.0)", _samples("max_pool")),
    Fault("a mean at the border divides by the whole window", WINDOWS, "(window.kernel / exist)", "(exist / exist)",
          _samples("avg_pool")),
    Fault("a slice of the groups is told of all groups", IMAGES,
          'local.on_rank().arguments["groups"]', 'local.call.arguments["groups"]',
          _samples("conv")),
    Fault("choices go where the first experts are", EXPERTS, "table[begin:end] =", "table[: end - begin] =",
          _samples("routed_experts")),
    Fault("rows stay in the order of the ranks they are from", EXPERTS,
          "exchange.reordered(exchange.end(begun[chunk]), way.order)", "exchange.end(begun[chunk])",
          _samples("routed_experts")),
    Fault("a token's gradient is that of its last choice", EXPERTS,
          "return spread.view(tokens, choices, grad.size(1)).sum(1), None, None",
          "return spread.view(tokens, choices, grad.size(1))[:, -1], None, None", _samples("routed_experts")),
    Fault("choices of experts that others compute are computed", EXPERTS,
          "if all(split.leg >= 0 or index == split.own for", "if all(split.size > 0 for", _samples("routed_experts")),
    Fault("experts add each other's biases", GROUPED, "bias.unbind(0), strict", "bias.flip(0).unbind(0), strict",
          _samples("routed_experts")),
    Fault("gradients of rows go on the way that rows went", EXCHANGE, "start(grad, not ctx.flight.is_back)",
          "start(grad, ctx.flight.is_back)", _samples("routed_experts")),
    Fault("rows are sent on to the second axis as they came along the first", EXCHANGE,
          "sent = rows if is_back else reordered(rows, leg.order)", "sent = rows",
          ("tests:tests/ops/test_exchanges.py",)),
    Fault("every slice of an expert adds its bias", SLICED, "LocalExperts(held._replace(down_bias=None)",
          "LocalExperts(held", ("tests:tests/ops/test_sliced.py",)),
    Fault("rows go home in the order of the experts", SLICED,
          "exchange.begin(exchange.reordered(made, order, is_back=True), leg, is_back=True)",
          "exchange.begin(made, leg, is_back=True)", ("tests:tests/ops/test_sliced.py",)),
    Fault("a gate's even columns are its odd ones", ACTIVATIONS, '{"a": hidden[:, ::2], "b": hidden[:, 1::2]}',
          '{"b": hidden[:, ::2], "a": hidden[:, 1::2]}', ("tests:tests/trace/test_routing.py -k every",)),
    Fault("every rank adds the bias of what experts make", "autopar/ops/experts.py",
          'added = (len(operands) - 1,) if', "added = () if", _samples("routed_experts")),
    Fault("a bias of any rows is an expert's", "autopar/trace/routing.py",
          'require(_only(taken.args[1]).tensor == self._made(order, "aten.sort.default").outputs[0])', "pass",
          ("tests:tests/trace/test_routing.py -k bias",)),
    Fault("halves of a gate are any halves", "autopar/trace/activations.py",
          '"ab"[node.outputs.index(value.tensor)]', '"ab"[0]', ("tests:tests/trace/test_routing.py",)),
    Fault("a bag's mean divides by the rows of this rank", EMBEDDING, "_bag_sizes(counted, offsets",
          "_bag_sizes(counted & here, offsets", _samples("embedding_bag")),
]  # fmt: skip

RUNTIME = [
    Fault("a bucket forgets its first gradient", "autopar/runtime/reducing.py",
          "for slot, tensor in zip(self.slots, self.tensors, strict=True):\n            slot.parameter",
          "for slot, tensor in list(zip(self.slots, self.tensors, strict=True))[1:]:\n            slot.parameter"),
    Fault("a parameter of two uses keeps the gradient of one", "autopar/runtime/stored.py",
          "self.gradient.add_(local)", "self.gradient = local"),
    Fault("gradients are added up in memory that is still to be read", "autopar/runtime/stored.py",
          "self.gradient, self._is_owned = local, owned", "self.gradient, self._is_owned = local, True",
          ("tests:tests/runtime/test_shared_gradients.py",)),
    Fault("a converted parameter is not converted again after an optimizer step", "autopar/runtime/gathering.py",
          "        self.first.launch()", "        if self.first._read is not None:\n            self.first.launch()"),
    Fault("what is freed for good is gathered again", "autopar/runtime/gathering.py",
          "self._part in unit.runs_in and not unit.is_done:", "self._part in unit.runs_in:",
          ("tests:tests/runtime/test_gathers_ahead.py -k others_read",)),
    Fault("a buffer's update is lost", "autopar/runtime/state.py", "self.local.copy_(self.latest)", "pass",
          ("op:batch_norm",)),
    Fault("the clipped norm counts each replica", "autopar/runtime/state.py",
          "if kind.is_shard and mesh.axes[i].size > 1)", "if mesh.axes[i].size > 1)"),
    Fault("the clipped norm is that of the local shards", "autopar/runtime/state.py",
          "if kind.is_shard and mesh.axes[i].size > 1)", "if kind.is_shard and mesh.axes[i].size > 99)"),
    Fault("the end of a step does not wait for the loss", "autopar/runtime/comm.py", "axis.late.pop(0)()",
          "axis.late.pop(0)"),
    Fault("every microbatch is the first", "autopar/runtime/inputs.py",
          "return [part[slices].to(spec.compute", "return [parts[0][slices].to(spec.compute"),
    Fault("a gradient's steps home are taken in the forward order", "autopar/runtime/reducing.py",
          "self._start([slot.steps[place] for slot in self.slots])",
          "self._start([slot.steps[len(slot.steps) - 1 - place] for slot in self.slots])"),
    Fault("a gradient that a program holds is overwritten", "autopar/runtime/stored.py",
          "held.add_(gradient)", "held.copy_(gradient)"),
    Fault("weights are loaded from the first rank's part", "autopar/runtime/state.py",
          "stored.local.copy_(whole[local_slices(stored.declared.shape, stored.types, stored.mesh.axes)])",
          "stored.local.copy_(whole[tuple(slice(0, n) for n in stored.local.shape)])"),
    Fault("gradients of a bf16 program are summed in bf16", "autopar/runtime/reducing.py",
          "self.dtype, self.is_cast = declared.dtype,", "self.dtype, self.is_cast = slots[0].dtype,",
          ("tests:tests/equivalence/test_precision.py -k summed",)),
    Fault("microbatches of a bf16 program add up in bf16", "autopar/runtime/reducing.py",
          "elif bucket.has_buffer or bucket.is_cast:", "elif bucket.has_buffer:",
          ("tests:tests/equivalence/test_precision.py -k summed",)),
    Fault("a checkpoint leaves the stream of masks where it is", "autopar/runtime/checkpoint.py",
          "randomness.restore_stream(seed, dropout_step)", "randomness.restore_stream(seed, dropout_step + 1)",
          ("tests:tests/runtime/test_checkpoint.py -k stream",)),
    Fault("what one node alone has goes to no other", "autopar/runtime/elastic/mirrors.py",
          "max(0, mirrors + 1 - len(known))", "max(0, mirrors - len(known))",
          ("tests:tests/ladder/test_transitions.py -k mirrors",)),
    Fault("a state of which a part is lost is taken for whole", "autopar/runtime/elastic/held.py",
          "sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(kind[0])",
          "sum(math.prod(chunk.sizes) for chunk in tensor.chunks) < 0",
          ("tests:tests/ladder/test_elastic.py -k missed",)),
    Fault("what a rank waits for others is its own time", "autopar/runtime/comm.py",
          "waited.seconds += spent", "waited.seconds += 0 * spent",
          ("tests:tests/ladder/test_stragglers.py -k slow_rank",)),
    Fault("constants outlive the buffers that they are made of", "autopar/runtime/constants.py",
          "or kept.versions != [tensor._version for tensor in kept.made_of]", "",
          ("tests:tests/runtime/test_checkpoint.py -k in_place",)),
]  # fmt: skip

CHECKER = "autopar/ir/verifier.py"
VERIFIER = [
    Fault("operands are not checked", CHECKER, "if placements[name] != wanted and (name, wanted) not in arrived:",
          "if wanted is None:", ("mutants",)),
    Fault("rules are not checked", CHECKER, "if reason is not None:", "if reason == node:", ("mutants",)),
    Fault("results may be anything where operands follow a rule", LOOKUP, "if rule not in known:",
          "if rule.operands not in {other.operands for other in known}:", ("mutants",)),
    Fault("shapes are not checked", LOOKUP, "    return shape_error(graph, node, operands, axes)\n",
          "    return None\n", ("random", "op:unmerge")),
    Fault("steps need not be of the table", CHECKER,
          "if not (0 <= step.axis < len(stage.axes) and is_legal(step, placement)):",
          "if not 0 <= step.axis < len(stage.axes):", ("mutants",)),
    Fault("steps need not end at the target", CHECKER, "if placement != redistribute.target:",
          "if not where:", ("mutants",)),
    Fault("outputs may end anyhow", CHECKER,
          "if placements[name] != target and (name, target) not in arrived:", "if target is None:", ("mutants",)),
    Fault("parameters may be stored anyhow", CHECKER,
          'fine = all(type_ == whole or type_.kind == "S" for type_ in storage.placement)', "fine = True",
          ("mutants",)),
    Fault("inputs may be summands", CHECKER, 'if any(type_.kind not in "RS" for type_ in placement)',
          'if any(type_.kind not in "RSPI" for type_ in placement)', ("mutants",)),
    Fault("a buffer that forward changes may be split", CHECKER,
          'if is_updated and any(type_.kind == "S" for type_ in storage.placement):', "if stored.name is None:",
          ("tests:tests/ir/test_verifier.py -k buffer",)),
    Fault("a plan for another model is accepted", CHECKER, "if plan.fingerprint != graph.fingerprint:",
          "if plan.fingerprint is None:", ("tests:tests/pipeline/test_errors.py",)),
    Fault("the axes need not be the mesh", CHECKER,
          "if math.prod(sizes) != num_devices or [axis.stride for axis in axes] != row_major:",
          "if not sizes and row_major:",
          ("tests:tests/pipeline/test_plan_files.py", "tests:tests/pipeline/test_errors.py")),
    Fault("microbatches may cut any input", "autopar/microbatch.py", "if plan.microbatch_inputs != batch:",
          "if plan.microbatch_inputs is None:", ("tests:tests/ir/test_verifier.py -k microbatches",)),
    Fault("an earlier file may say anything of microbatches", "autopar/microbatch.py",
          "if said[name] != found.get(name)", "if name not in found",
          ("tests:tests/pipeline/test_earlier_plans.py -k over_microbatches",)),
    Fault("a stage sums what it receives before it has it", "autopar/microbatch.py",
          "if (before, after) == (P, R) and name not in graph.stored_by_tensor", "if before == after",
          ("tests:tests/pipeline/test_stages.py -k receives_in_each",)),
]  # fmt: skip

CONVERT, ATTRIBUTES = "autopar/trace/convert.py", "autopar/emit/attributes.py"
NAMES = "tests:tests/equivalence/test_names.py"
LOST = [
    Fault("a closure's module is not looked for", "autopar/trace/losses.py",
          'code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None) or ()',
          'code, cells = getattr(value, "__code__", None), ()',
          ("tests:tests/equivalence/test_arguments.py -k closure",)),
    Fault("constants of a step may be others", "autopar/runtime/inputs.py",
          "elif isinstance(value, Tensor) or type(value) is not type(tree) or repr(value) != repr(tree):",
          "elif isinstance(value, Tensor):", ("tests:tests/equivalence/test_arguments.py -k other_constants",)),
    Fault("rows of any two masks are put together", "autopar/trace/rows.py",
          "if not _same(other.origin, rows.origin):", "if other.mask.shape != rows.mask.shape:",
          ("tests:tests/equivalence/test_losses.py -k another",)),
    Fault("what rows left out hold is kept", "autopar/trace/rows.py",
          "return torch.where(_beside(self.mask, self.data), self.data, _filler(self.data.dtype))", "return self.data",
          ("tests:tests/equivalence/test_losses.py -k left_out",)),
]  # fmt: skip

NAMED = [
    Fault("an input is taken for the parameter of its name", CONVERT,
          "while name in taken or (name != given and name in names):", "while name != given and name in names:",
          (f"{NAMES} -k inputs",)),
    Fault("an operator is taken for a buffer of its name", CONVERT, 'return f"%{node.name}" if self.copy is None',
          "return node.name if self.copy is None", (f"{NAMES} -k 'mul or mean'",)),
    Fault("a parameter is taken for what the runtime calls so", ATTRIBUTES, "name in RESERVED or name in others",
          "name in others", (f"{NAMES} -k microbatch",)),
    Fault("a parameter is taken for another use of its neighbour", ATTRIBUTES, "name in RESERVED or name in others",
          "name in RESERVED", (f"{NAMES} -k further",)),
    Fault("what is renamed in source is saved under that name", "autopar/runtime/local.py",
          "yield prefix + names.get(attribute, attribute)", "yield prefix + attribute", (f"{NAMES} -k count",)),
]  # fmt: skip

WIDE = "autopar/trace/wide.py"
PRECISE = [
    Fault("what a model computes with in float32 is rounded", WIDE, "found |= of if tensors[node.results[0]].dtype",
          "found |= set() if tensors[node.results[0]].dtype",
          ("tests:tests/trace/test_wide.py -k llama",)),
    Fault("positions beside such buffers are rounded", WIDE, "if not of.isdisjoint(found & buffers) for name in of}",
          "if of <= found for name in of}", ("tests:tests/trace/test_wide.py -k computed",)),
]  # fmt: skip

TRACED = [
    Fault("a write that autograd does not see loses its gradient", "autopar/trace/writes.py",
          "written.args = (live, self._make(place, live, overwritten, live, value))", "written.args = (live, value)",
          ("tests:tests/trace/test_guard.py -k own", "tests:tests/trace/test_writes.py -k no_grad-mul_-activation")),
    Fault("a gradient's hook is dropped", "autopar/runtime/functions.py",
          "return ctx.hook(gradient, *others), None,", "return gradient, None,",
          ("tests:tests/carried/test_hooks.py -k scaled",)),
    Fault("a recomputed module reads the new value of a buffer", "autopar/runtime/state.py",
          "        self.latest = value\n", "        self.latest = value\n        self.used.copy_(value)\n",
          ("tests:tests/equivalence/test_hard_writes.py -k recompute",)),
    Fault("rows that go by number are taken in another order", "autopar/trace/inner_batch.py",
          "return node.operands[0] not in self.batches", "return True",
          ("tests:tests/carried/test_inner_batch.py -k lookup",)),
    Fault("a batch is parted on the wrong side", "autopar/trace/inner_batch.py",
          "return (*shape[: self.dim], self.outer, length, *shape[self.dim + 1 :])",
          "return (*shape[: self.dim], length, self.outer, *shape[self.dim + 1 :])",
          ("tests:tests/carried/test_inner_batch.py -k 'frames and microbatches'",)),
    Fault("a norm that counts batches takes the last one's statistics", "autopar/trace/written_out.py",
          "kept[name].add_((value - kept[name]) / counted)", "kept[name].add_(value - kept[name])",
          ("tests:tests/carried/test_written_out.py -k 'counting and how0'",)),
]  # fmt: skip

STORED, OF_PARAMETERS = "autopar/runtime/stored.py", "tests:tests/carried/test_parameters.py"
UPDATED = [
    Fault("a parameter's update is lost", STORED, "self.local.copy_(self._latest)", "pass",
          (f"{OF_PARAMETERS} -k normalised",)),
    Fault("it is given to the gathered copy alone", "autopar/runtime/local.py",
          "target.take_update(value.clone() if is_own else value)",
          "holder.__dict__[attribute] = value",
          (f"{OF_PARAMETERS} -k 'shards and row and zero'",)),
    Fault("it is there before the backward pass", STORED, "self._latest = value.to(self.declared.dtype)",
          "self.local.copy_(value)", (f"{OF_PARAMETERS} -k 'made and decayed and recompute'",)),
    Fault("it is applied twice", STORED, "self.local.copy_(self._latest)",
          "self.local.add_(self._latest - self.local, alpha=2)", (f"{OF_PARAMETERS} -k normalised",)),
    Fault("each rank has the first one's shard of it", STORED,
          "value = value[local_slices(self.declared.shape, self.types, self.mesh.axes)]",
          "value = value[tuple(map(slice, self.local.shape))]", (f"{OF_PARAMETERS} -k shares",)),
    Fault("it is rounded with what is computed", "autopar/trace/wide.py", "else item.name in graph.mutations",
          "else False", (f"{OF_PARAMETERS} -k master",)),
]  # fmt: skip

BACKUP, OF_BACKUP = "autopar/runtime/backup.py", "tests:tests/equivalence/test_backup.py"
WITHOUT_THE_LAST = [
    Fault("a mean is that of all ranks, those left out too", BACKUP, "else self._axis.size / self._first", "else 1.0",
          (f"{OF_BACKUP} -k squares",)),
    Fault("it is divided by one rank's count", BACKUP, "factor = 1 / numbers[_DIVISOR].item()",
          "factor = 1 / self._parts(own)[0][_DIVISOR].item() / self._first", (f"{OF_BACKUP} -k hf_llama",)),
    Fault("a late rank keeps its own gradient", BACKUP, "item.gradient.copy_(part)", "pass",
          (f"{OF_BACKUP} -k 'late and mlp'",)),
    Fault("ranks wait for a late one's loss", "autopar/runtime/comm.py",
          "    if alone_on(axis) is not None:\n        return lambda: None\n", "", (f"{OF_BACKUP} -k squares",)),
]  # fmt: skip

FAULTS = [*RULES, *REDISTRIBUTIONS, *LOWERING, *INSIDE, *RUNTIME, *VERIFIER, *LOST, *NAMED, *PRECISE, *TRACED, *UPDATED,
          *WITHOUT_THE_LAST]  # fmt: skip
