"""What random programs are made of: for each operator how it is written, and how its operands are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.random_programs.programs import Length

if TYPE_CHECKING:
    from tests.random_programs.generate import Pool

Shapes = list[tuple[int, ...]]
Text = Callable[[list[str], Shapes, list[Any]], str]
Found = tuple[list[str], tuple[Any, ...]]  # operands, arguments
Propose = Callable[["Pool"], Found]


@dataclass(frozen=True)
class Operator:
    """`text(names, shapes, args)` is the expression; `module(shapes, args)` makes a submodule, named last in `names`.

    `exact`: integers in, integers out, with integer gradients.
    """

    name: str
    text: Text
    propose: Propose
    exact: bool = True
    module: Callable[[Shapes, list[Any]], str] | None = None
    weight: int = 2


class NoOperands(Exception):
    """There is nothing in the pool that the operator could work on."""


def one(**wanted: Any) -> Propose:
    return lambda pool: ([pool.value(**wanted)], ())


def along(min_rank: int = 1, **wanted: Any) -> Propose:
    """One operand and one of its dims."""

    def propose(pool: Pool) -> Found:
        name = pool.value(min_rank=min_rank, **wanted)
        return [name], (pool.dim(name),)

    return propose


def call(function: str) -> Text:
    return lambda names, shapes, args: f"{function}({', '.join([*names, *map(str, args)])})"


def infix(sign: str) -> Text:
    return lambda names, shapes, args: f"{names[0]} {sign} {names[1] if len(names) > 1 else args[0]}"


def pair(pool: Pool) -> Found:
    """Two operands that broadcast: alike, or one a parameter of some of the dims."""
    left = pool.value()
    return [left, pool.partner(left)], ()


def swapped(pool: Pool) -> Found:
    operands, args = pair(pool)
    return operands[::-1], args


def linear(pool: Pool) -> Found:
    x = pool.value(min_rank=1)
    width = pool.length()
    bias = [pool.leaf((width,))] if pool.chance(0.6) else []
    return [x, pool.leaf((width, pool.shape(x)[-1])), *bias], ()


def linear_module(pool: Pool) -> Found:
    return [pool.value(min_rank=1)], (Length(pool.length()), pool.chance(0.6))


def matrix_product(pool: Pool) -> Found:
    x = pool.value(min_rank=2)
    shape = pool.shape(x)
    others = [name for name in pool.values(min_rank=2) if pool.shape(name)[-2] == shape[-1]]
    others = [n for n in others if len(pool.shape(n)) == 2 or pool.shape(n)[:-2] == shape[:-2]]
    if others and pool.chance(0.7):
        return [x, pool.pick(others)], ()
    return [x, pool.leaf((shape[-1], pool.length()))], ()


def batched_product(pool: Pool) -> Found:
    x = pool.value(rank=3)
    b, _, k = pool.shape(x)
    others = [name for name in pool.values(rank=3) if pool.shape(name)[0] == b and pool.shape(name)[1] == k]
    return [x, pool.pick(others) if others and pool.chance(0.7) else pool.leaf((b, k, pool.length()))], ()


def contraction(pool: Pool) -> Found:
    """einsum with an equation of its own: letters of the operands kept or summed at random."""
    x = pool.value(min_rank=2, max_rank=3)
    letters = "abc"[: len(pool.shape(x))]
    shared = pool.rng.sample(range(len(letters)), pool.rng.randint(1, len(letters)))
    shape = (*(pool.shape(x)[dim] for dim in shared), pool.length())
    other = "".join(letters[dim] for dim in shared) + "z"
    kept = [letter for letter in letters + "z" if pool.chance(0.7) or letter == "z"]
    pool.rng.shuffle(kept)
    return [x, pool.leaf(shape)], (f"{letters},{other}->{''.join(kept)}",)


def added_product(pool: Pool) -> Found:
    x = pool.value(rank=2)
    n = pool.length()
    return [pool.leaf((n,)), x, pool.leaf((pool.shape(x)[1], n))], ()


def unmerge(pool: Pool) -> Found:
    name = pool.value(min_rank=1, max_rank=3)
    dims = [(d, k) for d, n in enumerate(pool.shape(name)) for k in range(2, n) if n % k == 0]
    if not dims:
        raise NoOperands
    return [name], pool.pick(dims)


def unmerge_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    dim, first = args
    shape = shapes[0]
    if shape[dim] % first:
        raise ValueError(f"{shape} has no {first} rows along {dim}")
    return f"{names[0]}.reshape({[*shape[:dim], first, shape[dim] // first, *shape[dim + 1 :]]})"


def merge(pool: Pool) -> Found:
    name = pool.value(min_rank=2)
    return [name], (pool.rng.randrange(len(pool.shape(name)) - 1),)


def merge_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    (dim,), shape = args, shapes[0]
    if dim + 1 >= len(shape):
        raise ValueError("no two dims to merge")
    return f"{names[0]}.reshape({[*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]]})"


def permute(pool: Pool) -> Found:
    name = pool.value(min_rank=2)
    order = list(range(len(pool.shape(name))))
    pool.rng.shuffle(order)
    return [name], (tuple(order),)


def two_dims(pool: Pool) -> Found:
    name = pool.value(min_rank=2)
    return [name], tuple(pool.rng.sample(range(len(pool.shape(name))), 2))


def cut(pool: Pool) -> Found:
    """A part of a dim that is longer than 1."""
    name = pool.value(min_rank=1)
    dims = [dim for dim, size in enumerate(pool.shape(name)) if size > 1]
    if not dims:
        raise NoOperands
    dim = pool.pick(dims)
    start = pool.rng.randrange(pool.shape(name)[dim] - 1)
    return [name], (dim, start, pool.rng.randint(start + 1, pool.shape(name)[dim]), pool.pick([1, 1, 2]))


def slice_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    dim, start, end, step = args
    index = [":"] * len(shapes[0])
    index[dim] = f"{start}:{end}" + (f":{step}" if step > 1 else "")
    return f"{names[0]}[{', '.join(index)}]"


def in_place_cut(pool: Pool) -> Found:
    names, (dim, start, end, _) = cut(pool)
    return names, (dim, start, end, 3.0)


def select(pool: Pool) -> Found:
    names, (dim, start, _, _) = cut(pool)
    return names, (dim, start)


def pieces(pool: Pool) -> Found:
    """One of the pieces of a split, which need not be equal."""
    names, (dim, start, end, _) = cut(pool)
    size = max(1, end - start)
    count = -(-pool.shape(names[0])[dim] // size)
    return names, (size, dim, pool.rng.randrange(count))


def several(pool: Pool) -> Found:
    """Two or three of one shape, and a dim."""
    name = pool.value(min_rank=1)
    shape = pool.shape(name)
    same = [other for other in pool.values() if pool.shape(other) == shape] + [pool.leaf(shape)]
    return [name, *(pool.pick(same) for _ in range(pool.rng.randint(1, 2)))], (pool.dim(name),)


def padding(pool: Pool) -> Found:
    name = pool.value(min_rank=1, max_rank=3)
    widths = [pool.rng.randint(0, 2) for _ in range(2 * pool.rng.randint(1, len(pool.shape(name))))]
    return [name], (tuple(widths), pool.pick([0.0, 0.0, 1.0]))


def grow(pool: Pool) -> Found:
    """A new dim that all share."""
    name = pool.value(max_rank=3)
    return [name], (pool.rng.randint(0, len(pool.shape(name))), Length(pool.length()))


def grow_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    dim, size = args
    return f"{names[0]}.unsqueeze({dim}).expand({[*shapes[0][:dim], size, *shapes[0][dim:]]})"


def choice(pool: Pool) -> Found:
    left = pool.value()
    masks = [name for name in pool.values(kind="bool") if pool.broadcasts(name, left)]
    mask = pool.pick(masks) if masks else pool.input("mask", pool.shape(left))
    return [mask, left, pool.partner(left, same=True)], ()


def masked(pool: Pool) -> Found:
    operands, _ = choice(pool)
    return [operands[1], operands[0]], (pool.pick([0.0, 2.0]),)


def lookup(pool: Pool) -> Found:
    rows = pool.length()
    shape = pool.short_shape(2)
    padding_idx = pool.pick(["None", "None", 1])
    return [pool.input("ids", shape, high=rows), pool.leaf((rows, pool.length()))], (padding_idx,)


def bag(pool: Pool) -> Found:
    """Row numbers of bags of one length."""
    rows = pool.length()
    return [pool.input("ids", (pool.length(), pool.length()), high=rows), pool.leaf((rows, pool.length()))], ()


def experts(pool: Pool) -> Found:
    """Rows that each go through a few of some experts; with biases, a gate, chunks and ways by load as it comes."""
    x = pool.value(rank=2)
    (tokens, width), count = pool.shape(x), pool.rng.randint(2, 6)
    hidden, made, choices = pool.length(), pool.length(), pool.rng.randint(1, 3)
    ids = pool.input("ids", (tokens, choices), high=count)
    parts = pool.pick([(), (), (2,)])
    operands = [x, ids, pool.input("float", (tokens, choices)), pool.leaf((count, width, *parts, hidden))]
    operands += [pool.leaf((count, hidden, made))]
    if pool.chance(0.3):
        operands += [pool.leaf((count, *parts, hidden)), pool.leaf((count, made))]
    activation = pool.pick(["relu"] if pool.exact else ["relu", "silu", "gelu"])
    by_load = pool.pick(["", "", "0:flat:1;3:two-level:4", "0:two-level:2;5:flat:1;9:flat:2"])
    return operands, (activation, bool(parts), count, pool.pick([1, 1, 2, 4]), by_load)


def experts_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    activation, gated, count, chunks, by_load = args
    told = [*names[:5], repr(activation), repr(gated), str(count), *names[5:], f"chunks={chunks}, exchange={by_load!r}"]
    return f"torch.ops.autopar.routed_experts({', '.join(told)})"


def gathered(pool: Pool) -> Found:
    """Like `x` but for the dim that is gathered along; the last one may be any part."""
    name = pool.value(min_rank=1, max_rank=3)
    dim = pool.dim(name)
    shape = list(pool.shape(name))
    high = shape[dim]
    shape[dim] = pool.length()
    return [name, pool.input("ids", tuple(shape), high=high)], (dim,)


def indexed(pool: Pool) -> Found:
    name = pool.value(min_rank=1, max_rank=3)
    dim = pool.dim(name)
    return [name, pool.input("ids", (pool.length(),), high=pool.shape(name)[dim])], (dim,)


def index_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    return f"{names[0]}[{', '.join([':'] * args[0] + [names[1]])}]"


def one_hot(pool: Pool) -> Found:
    rows = pool.length()
    return [pool.input("ids", pool.short_shape(2), high=rows)], (Length(rows),)


def normalised(affine: int) -> Propose:
    def propose(pool: Pool) -> Found:
        name = pool.value(min_rank=2)
        width = pool.shape(name)[-1]
        if width < 2:
            raise NoOperands
        return [name, *(pool.leaf((width,)) for _ in range(affine if pool.chance(0.8) else 0))], ()

    return propose


def norm_text(function: str) -> Text:
    def text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
        return f"F.{function}({names[0]}, [{shapes[0][-1]}]{''.join(', ' + name for name in names[1:])}, eps=0.01)"

    return text


def attention(pool: Pool) -> Found:
    """Queries of more heads than keys are grouped; a mask, a causal one, or none."""
    batch, heads, width = pool.pick([2, 3, 4, 6]), pool.pick([2, 4, 6]), pool.pick([2, 4])
    groups = pool.pick([1, 1, 2])
    length = pool.pick([3, 4, 6])
    queries = [name for name in pool.values(rank=4) if pool.shape(name)[1] % groups == 0]
    query = pool.pick(queries) if queries else pool.input("float", (batch, heads, length, width))
    batch, heads, length, width = pool.shape(query)
    keys = pool.pick([length, length, 5])
    key = pool.leaf_or_value((batch, heads // groups, keys, width))
    value = pool.leaf_or_value((batch, heads // groups, keys, width))
    mask = [pool.input("mask", (length, keys))] if keys != length or pool.chance(0.0) else []
    return [query, key, value], ("causal" if not mask and pool.chance(0.5) else "full", groups > 1)


def attention_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    kind, grouped = args
    extra = (", is_causal=True" if kind == "causal" else "") + (", enable_gqa=True" if grouped else "")
    if kind == "causal" and shapes[0][2] != shapes[1][2]:
        raise ValueError("causal attention of unequal lengths")
    return f"F.scaled_dot_product_attention({', '.join(names)}{extra})"


def loss(pool: Pool) -> Found:
    """Rows of logits with their targets, some of them ignored."""
    logits = pool.value(min_rank=2, max_rank=3)
    shape = pool.shape(logits)
    targets = pool.input("ids", (shape[0], *shape[2:]), high=shape[1], ignored=pool.chance(0.6))
    smoothing = pool.pick([0.0, 0.0, 0.0, 0.125])
    return [logits, targets], (pool.pick(["mean", "mean", "sum"]), smoothing)


def loss_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    smoothing = f", label_smoothing={args[1]}" if args[1] else ""
    return f"F.cross_entropy({names[0]}, {names[1]}, reduction={args[0]!r}{smoothing})"


def image(pool: Pool) -> str:
    """A value (n, c, height, width), made where there is none."""
    found = [name for name in pool.values(rank=4) if min(pool.shape(name)[2:]) >= 3]
    return pool.pick(found) if found and pool.chance(0.7) else pool.input("float", pool.image_shape())


def convolution(pool: Pool) -> Found:
    x = image(pool)
    channels, groups = pool.shape(x)[1], 1
    if channels % 2 == 0 and pool.chance(0.3):
        groups = 2
    out = pool.pick([2, 4, 6])
    bias = [pool.leaf((out,))] if pool.chance(0.6) else []
    kernel = pool.pick([1, 2, 3])
    return [x, pool.leaf((out, channels // groups, kernel, kernel)), *bias], (
        pool.pick([1, 1, 2]), pool.pick([0, 1]), groups,
    )  # fmt: skip


def convolution_text(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    stride, pad, groups = args
    return f"F.conv2d({', '.join(names)}, stride={stride}, padding={pad}, groups={groups})"


def batch_norm_module(shapes: Shapes, args: list[Any]) -> str:
    kind = {2: "1d", 3: "1d", 4: "2d"}[len(shapes[0])]
    return f"nn.BatchNorm{kind}({shapes[0][1]}, eps=0.01)"


def batch_norm(pool: Pool) -> Found:
    name = pool.value(min_rank=2, max_rank=4)
    shape = pool.shape(name)
    if math.prod(shape) // shape[1] < 2:
        raise NoOperands
    return [name], ()


def group_norm(pool: Pool) -> Found:
    name = pool.value(min_rank=3, max_rank=4)
    counts = [n for n in (2, 3, 4) if pool.shape(name)[1] % n == 0 and pool.shape(name)[1] > n]
    if not counts:
        raise NoOperands
    return [name], (pool.pick(counts),)


def scalar(*values: float) -> Propose:
    return lambda pool: ([pool.value()], (pool.pick(list(values)),))


def reduced(pool: Pool) -> Found:
    name = pool.value(min_rank=1)
    return [name], (pool.dim(name), pool.chance(0.5))


def several_dims(pool: Pool) -> Found:
    name = pool.value(min_rank=2)
    return [name], (tuple(sorted(pool.rng.sample(range(len(pool.shape(name))), 2))), pool.chance(0.5))


def reduction_text(function: str) -> Text:
    return lambda names, shapes, args: f"{names[0]}.{function}({args[0]}, keepdim={args[1]})"


def method(name: str) -> Text:
    return lambda names, shapes, args: f"{names[0]}.{name}({', '.join([*names[1:], *map(str, args)])})"


def pooled(pool: Pool) -> Found:
    return [image(pool)], (2, pool.pick([1, 2]))


def mask_pair(pool: Pool) -> Found:
    left = pool.value(kind="bool")
    same = [name for name in pool.values(kind="bool") if pool.shape(name) == pool.shape(left)]
    return [left, pool.pick(same)], ()


def module_linear(shapes: Shapes, args: list[Any]) -> str:
    return f"nn.Linear({shapes[0][-1]}, {args[0]}, bias={args[1]}, dtype=torch.float64)"


def module_call(names: list[str], shapes: Shapes, args: list[Any]) -> str:
    return f"{names[1]}({names[0]})"


_EXACT = [
    Operator("add", infix("+"), pair, weight=6),
    Operator("sub", infix("-"), pair, weight=3),
    Operator("rsub", infix("-"), swapped),
    Operator("mul", infix("*"), pair, weight=5),
    Operator("scale", infix("*"), scalar(2.0, -1.0, 3.0), weight=3),
    Operator("shift", infix("+"), scalar(1.0, -2.0)),
    Operator("negate", lambda n, s, a: f"-{n[0]}", one()),
    Operator("relu", call("torch.relu"), one(), weight=5),
    Operator("abs", call("torch.abs"), one()),
    Operator("clamp", lambda n, s, a: f"{n[0]}.clamp({a[0]}, 4.0)", scalar(-3.0, 0.0)),
    Operator("square", call("torch.square"), one(), weight=1),
    Operator("detach", method("detach"), one(), weight=1),
    Operator("greater", infix(">"), scalar(0.0, 1.0)),
    Operator("both", infix("&"), mask_pair, weight=1),
    Operator("as float", method("double"), one(kind="bool"), weight=1),
    Operator("add in place", call("add_in_place"), lambda pool: pool.same_shape(), weight=2),
    Operator("set in place", call("set_in_place"), in_place_cut, weight=2),
    Operator("linear", call("F.linear"), linear, weight=12),
    Operator("nn.Linear", module_call, linear_module, module=module_linear, weight=8),
    Operator("matmul", infix("@"), matrix_product, weight=8),
    Operator("bmm", call("torch.bmm"), batched_product, weight=3),
    Operator("einsum", lambda n, s, a: f"torch.einsum({a[0]!r}, {', '.join(n)})", contraction, weight=5),
    Operator("addmm", call("torch.addmm"), added_product, weight=3),
    Operator("sum", reduction_text("sum"), reduced, weight=4),
    Operator("sum of dims", reduction_text("sum"), several_dims),
    Operator("amax", reduction_text("amax"), reduced),
    Operator("cumsum", method("cumsum"), along()),
    Operator("merge", merge_text, merge, weight=5),
    Operator("unmerge", unmerge_text, unmerge, weight=5),
    Operator("permute", method("permute"), permute, weight=4),
    Operator("transpose", method("transpose"), two_dims, weight=4),
    Operator("unsqueeze", method("unsqueeze"), along(max_rank=3)),
    Operator("squeeze", method("squeeze"), along(), weight=1),
    Operator("expand", grow_text, grow, weight=3),
    Operator("slice", slice_text, cut, weight=4),
    Operator("select", method("select"), select),
    Operator("split", lambda n, s, a: f"torch.split({n[0]}, {a[0]}, {a[1]})[{a[2]}]", pieces, weight=3),
    Operator("cat", lambda n, s, a: f"torch.cat([{', '.join(n)}], {a[0]})", several, weight=4),
    Operator("stack", lambda n, s, a: f"torch.stack([{', '.join(n)}], {a[0]})", several),
    Operator("pad", lambda n, s, a: f"F.pad({n[0]}, {a[0]}, value={a[1]})", padding, weight=3),
    Operator("flip", lambda n, s, a: f"{n[0]}.flip([{a[0]}])", along()),
    Operator("roll", lambda n, s, a: f"torch.roll({n[0]}, 1, {a[0]})", along()),
    Operator("tril", method("tril"), one(min_rank=2)),
    Operator("where", call("torch.where"), choice, weight=4),
    Operator("masked_fill", method("masked_fill"), masked, weight=3),
    Operator("embedding", lambda n, s, a: f"F.embedding({n[0]}, {n[1]}, {a[0]})", lookup, weight=6),
    Operator("embedding_bag", lambda n, s, a: f"F.embedding_bag({n[0]}, {n[1]}, mode='sum')", bag, weight=3),
    Operator("gather", lambda n, s, a: f"{n[0]}.gather({a[0]}, {n[1]})", gathered, weight=2),
    Operator("index_select", lambda n, s, a: f"{n[0]}.index_select({a[0]}, {n[1]})", indexed, weight=2),
    Operator("index", index_text, indexed, weight=2),
    Operator("one_hot", lambda n, s, a: f"F.one_hot({n[0]}, {a[0]}).double()", one_hot),
    Operator("conv2d", convolution_text, convolution, weight=4),
    Operator("routed_experts", experts_text, experts, weight=3),
    Operator("max_pool2d", lambda n, s, a: f"F.max_pool2d({n[0]}, {a[0]}, {a[1]})", pooled, weight=1),
]

_ROUNDED = [
    Operator("mean of bags", lambda n, s, a: f"F.embedding_bag({n[0]}, {n[1]}, mode='mean')", bag, exact=False),
    Operator("div", lambda n, s, a: f"{n[0]} / ({n[1]} * {n[1]} + 1.0)", pair, exact=False, weight=3),
    Operator("gelu", call("F.gelu"), one(), exact=False, weight=4),
    Operator("tanh", call("torch.tanh"), one(), exact=False, weight=4),
    Operator("sigmoid", call("torch.sigmoid"), one(), exact=False),
    Operator("silu", call("F.silu"), one(), exact=False),
    Operator("softmax", call("torch.softmax"), along(), exact=False, weight=4),
    Operator("log_softmax", call("F.log_softmax"), along(), exact=False),
    Operator("logsumexp", call("torch.logsumexp"), along(), exact=False),
    Operator("mean", reduction_text("mean"), reduced, exact=False, weight=5),
    Operator("mean of dims", reduction_text("mean"), several_dims, exact=False, weight=2),
    Operator("var", reduction_text("var"), lambda pool: ([n := pool.value(min_rank=1)], (pool.long_dim(n), True)),
             exact=False),
    Operator("layer_norm", norm_text("layer_norm"), normalised(2), exact=False, weight=6),
    Operator("rms_norm", norm_text("rms_norm"), normalised(1), exact=False, weight=3),
    Operator("group_norm", lambda n, s, a: f"F.group_norm({n[0]}, {a[0]}, eps=0.01)", group_norm, exact=False),
    Operator("attention", attention_text, attention, exact=False, weight=6),
    Operator("cross_entropy", loss_text, loss, exact=False, weight=8),
    Operator("avg_pool2d", lambda n, s, a: f"F.avg_pool2d({n[0]}, {a[0]}, {a[1]})", pooled, exact=False, weight=1),
    Operator("batch_norm", module_call, batch_norm, exact=False, module=batch_norm_module, weight=4),
    Operator("dropout", lambda n, s, a: f"F.dropout({n[0]}, {a[0]}, self.training)", scalar(0.5, 0.25), exact=False,
             weight=2),
]  # fmt: skip

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in (*_EXACT, *_ROUNDED)}
