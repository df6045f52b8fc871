"""The graph of the audited decoder, written down: what a trace of `auditing.decoder` finds, without torch.export.

The decoder is ours and its layers are equal, so that its graph is known once its sizes are. Which operators a line of
`decoder.py` makes stands here beside a text of that line; that nothing differs from the trace, names and source lines
included, is what `tests/auditing/test_written.py` holds, for each kind of layer that there is.
"""

from __future__ import annotations

from autopar.auditing.job import ModelSizes
from autopar.auditing.writer import INDICES, RANK, GraphWriter
from autopar.ir.graph import Atom, Graph, Tensor
from autopar.ir.sharing import share
from autopar.trace.numbering import number

_ROOT, _FILE = "AuditedDecoder", "decoder.py"
_TIED = "embedding.token.weight"
_ACTIVATIONS = {"squared_relu": "c = relu(a); d = square(c)", "gelu_tanh": "gelu_tanh"}
"""As `routed_experts` names them; all others are gelu, as in `decoder._activated`."""


def written(sizes: ModelSizes, batch: int, seq: int, precision: str, is_compiled: bool = False) -> Graph:
    """The graph of `decoder.built`'s model of these sizes for a global batch, as `trace` makes it for training.

    precision: as a job's: "fp32", "bf16" with float32 masters, "bf16 alone".
    """
    inputs = tuple(Tensor(name, (batch, seq), INDICES) for name in ("tokens", "labels"))
    decoder = _Decoder(GraphWriter(_ROOT, _FILE, inputs), sizes, batch, seq, _dtype(precision))
    loss = decoder.loss(is_compiled)
    to = decoder.to
    kept = {item.name: "float32" for item in to.stored} if precision == "bf16" else {}
    tied = {"head.weight": _TIED} if sizes.is_tied else {}
    names = tuple(tensor.name for tensor in inputs)
    return share(number(Graph(
        names, tuple(to.stored), tuple(to.nodes), (loss,), to.tensors, loss, tied, model_name=_ROOT, kept_dtypes=kept,
    )))  # fmt: skip


def _dtype(precision: str) -> str:
    return "float32" if precision == "fp32" else "bfloat16"


class _Decoder:
    """A method writes a module of the same name in `decoder.py`: it takes and returns tensors by name."""

    def __init__(self, to: GraphWriter, sizes: ModelSizes, batch: int, seq: int, dtype: str) -> None:
        self.to, self.sizes, self.batch, self.seq, self.dtype = to, sizes, batch, seq, dtype

    def loss(self, is_compiled: bool) -> str:
        """Of all of it."""
        to, sizes, tokens = self.to, self.sizes, self.batch * self.seq
        self.parameters()
        x = self.embedding()
        angles = self.angles() if sizes.positions == "rotary" else ()
        for place in range(sizes.layers):
            x = self.layer(f"layers.{place}", x, angles)
        logits = self.linear("logits = self.head", "head", self.norm("logits = self.head", "final_norm", x))
        logits = logits if is_compiled else to.cast("logits if self.is_compiled", logits, "float32")
        line = "return F.cross_entropy"
        flat, labels = to.reshape(line, logits, tokens, sizes.vocab), to.reshape(line, "labels", tokens)
        return to.one(line, "aten.cross_entropy_loss.default", (flat, labels), ())

    # What is stored, in the order of modules ----------------------------------------

    def parameters(self) -> None:
        sizes = self.sizes
        self.matrix(_TIED, sizes.vocab, sizes.hidden)
        if sizes.positions == "learned":
            self.matrix("embedding.position.weight", max(self.seq, sizes.max_positions), sizes.hidden)
        for place in range(sizes.layers):
            self.layer_parameters(f"layers.{place}")
        self.norm_parameters("final_norm")
        if not sizes.is_tied:
            self.matrix("head.weight", sizes.vocab, sizes.hidden)

    def layer_parameters(self, name: str) -> None:
        sizes, size = self.sizes, self.sizes.head_size
        self.norm_parameters(f"{name}.attention_norm")
        self.norm_parameters(f"{name}.mlp_norm")
        width = sizes.kv_heads * (sizes.heads // sizes.kv_heads + 2) * size
        self.linear_parameters(f"{name}.attention.query_key_value", width, sizes.hidden)
        self.linear_parameters(f"{name}.attention.output", sizes.hidden, sizes.heads * size)
        parts = 2 if sizes.is_gated else 1
        if not sizes.experts:
            self.linear_parameters(f"{name}.mlp.up", parts * sizes.ffn, sizes.hidden)
            self.linear_parameters(f"{name}.mlp.down", sizes.hidden, sizes.ffn)
            return
        self.matrix(f"{name}.mlp.up", sizes.experts, parts * sizes.expert_ffn, sizes.hidden)
        self.matrix(f"{name}.mlp.down", sizes.experts, sizes.hidden, sizes.expert_ffn)
        self.matrix(f"{name}.mlp.router.weight", sizes.experts, sizes.hidden)

    def matrix(self, name: str, *shape: int) -> None:
        self.to.parameter(name, shape, self.dtype)

    def norm_parameters(self, name: str) -> None:
        self.matrix(f"{name}.weight", self.sizes.hidden)
        if self.sizes.norm != "rms":
            self.matrix(f"{name}.bias", self.sizes.hidden)

    def linear_parameters(self, name: str, outside: int, inside: int) -> None:
        self.matrix(f"{name}.weight", outside, inside)
        if self.sizes.has_bias:
            self.matrix(f"{name}.bias", outside)

    # Torch's own modules ----------------------------------------

    def linear(self, line: str, name: str, x: str) -> str:
        to, weight, bias = self.to, f"{name}.weight", f"{name}.bias"
        weight = weight if weight in to else _TIED
        args = (x, weight, bias) if bias in to else (x, weight)
        with to.module(name, "Linear"):
            return to.one(line, "aten.linear.default", args, (*to.shape(x)[:-1], to.shape(weight)[0]))

    def norm(self, line: str, name: str, x: str) -> str:
        to, width, weight = self.to, (self.sizes.hidden,), f"{name}.weight"
        if self.sizes.norm == "rms":
            with to.module(name, "RMSNorm"):
                return to.one(line, "aten.rms_norm.default", (x, width, weight), to.shape(x))
        with to.module(name, "LayerNorm"):
            return to.one(line, "aten.layer_norm.default", (x, width, weight, f"{name}.bias", 1e-5, False), to.shape(x))

    def lookup(self, line: str, name: str, indices: str) -> str:
        to, weight = self.to, f"{name}.weight"
        with to.module(name, "Embedding"):
            shape = (*to.shape(indices), self.sizes.hidden)
            return to.one(line, "aten.embedding.default", (weight, indices), shape, self.dtype)

    # The decoder's ----------------------------------------

    def embedding(self) -> str:
        to = self.to
        with to.module("embedding", "AuditedEmbedding"):
            x = self.lookup("x: Tensor = self.token", "embedding.token", "tokens")
            if self.sizes.positions != "learned":
                return x
            line = "x if self.position is None"
            places = to.one(line, "aten.arange.default", (self.seq,), (self.seq,), INDICES, (RANK,))
            return to.add(line, x, self.lookup(line, "embedding.position", places))

    def angles(self) -> tuple[str, str]:
        to, line, size, wide = self.to, "cosines, sines = self._angles", self.sizes.head_size, "float32"
        half, told = -(-size // 2), (("dtype", Atom("dtype", wide)), RANK)
        exponents = to.one(line, "aten.arange.start_step", (0, size, 2), (half,), wide, told)
        positions = to.one(line, "aten.arange.default", (self.seq,), (self.seq,), wide, told)
        column = to.one(line, "aten.unsqueeze.default", (positions, 1), (self.seq, 1))
        divided = to.one(line, "aten.neg.default", (exponents,), (half,))
        divided = to.one(line, "aten.div.Tensor", (divided, size), (half,))
        powers = to.one(line, "aten.pow.Scalar", (10_000.0, divided), (half,))
        angles = to.one(line, "aten.mul.Tensor", (column, powers), (self.seq, half))
        cosines = to.cast(line, to.one(line, "aten.cos.default", (angles,), (self.seq, half)), self.dtype)
        sines = to.cast(line, to.one(line, "aten.sin.default", (angles,), (self.seq, half)), self.dtype)
        return cosines, sines

    def layer(self, name: str, x: str, angles: tuple[str, ...]) -> str:
        to, attention, mlp = self.to, "x = x + self.attention(", "return x + self.mlp("
        with to.module(name, "AuditedLayer"):
            mixed = self.attention(f"{name}.attention", self.norm(attention, f"{name}.attention_norm", x), angles)
            x = to.add(attention, x, mixed)
            normed = self.norm(mlp, f"{name}.mlp_norm", x)
            made = self.experts(f"{name}.mlp", normed) if self.sizes.experts else self.mlp(f"{name}.mlp", normed)
            return to.add(mlp, x, made)

    def attention(self, name: str, x: str, angles: tuple[str, ...]) -> str:
        sizes, to, batch, seq = self.sizes, self.to, self.batch, self.seq
        queries, size, groups = sizes.heads // sizes.kv_heads, sizes.head_size, (batch, seq, sizes.kv_heads)
        with to.module(name, "AuditedAttention"):
            line = "groups = self.query_key_value"
            made = to.reshape(line, self.linear(line, f"{name}.query_key_value", x), *groups, (queries + 2) * size)
            parts = (queries * size, size, size)
            shapes = [(*groups, part) for part in parts]
            query, *rest = to.call("groups.split(", "aten.split_with_sizes.default", (made, parts, -1), *shapes)
            line = "query = query.unflatten"
            query = to.reshape(line, query, *groups, queries, size)
            query = to.transpose(line, to.reshape(line, query, batch, seq, sizes.heads, size), 1, 2)
            key, value = (to.transpose("key, value = key.transpose", one, 1, 2) for one in rest)
            if angles:
                op = "autopar_audit.rotate.default"
                query, key = (to.one("rotate(query,", op, (one, *angles), to.shape(one)) for one in (query, key))
            told = (("enable_gqa", True),) if queries > 1 else ()
            args, op = (query, key, value, None, 0.0, True), "aten.scaled_dot_product_attention.default"
            mixed = to.one("F.scaled_dot_product_attention", op, args, to.shape(query), told=told)
            line = "self.output(mixed"
            mixed = to.reshape(line, to.transpose(line, mixed, 1, 2), batch, seq, sizes.heads * size)
            return self.linear(line, f"{name}.output", mixed)

    def mlp(self, name: str, x: str) -> str:
        sizes, to, line = self.sizes, self.to, "hidden = gated("
        with to.module(name, "AuditedMLP"):
            made = self.linear("made = self.up(x)", f"{name}.up", x)
            shape = (self.batch, self.seq, sizes.ffn)
            if sizes.is_gated:
                hidden = to.one(line, "autopar_audit.gated.default", (to.reshape(line, made, *shape, 2),), shape)
            elif sizes.activation == "squared_relu":
                hidden = to.one(line, "aten.relu.default", (made,), shape)
                hidden = to.one(line, "aten.square.default", (hidden,), shape)
            else:
                told = (("approximate", "tanh"),) if sizes.activation == "gelu_tanh" else ()
                hidden = to.one(line, "aten.gelu.default", (made,), shape, told=told)
            return self.linear("return self.down(hidden)", f"{name}.down", hidden)

    def experts(self, name: str, x: str) -> str:
        sizes, to, tokens = self.sizes, self.to, self.batch * self.seq
        count, chosen, width = sizes.experts, (tokens, sizes.chosen_experts), sizes.expert_ffn
        with to.module(name, "AuditedExperts"):
            rows = to.reshape("sizes, tokens = self.sizes", x, tokens, sizes.hidden)
            line = "weights, ids = self.router"
            shares = self.linear(line, f"{name}.router", rows)
            shares = to.one(line, "aten.softmax.int", (shares, -1), (tokens, count))
            dtypes = (self.dtype, INDICES)
            args = (shares, sizes.chosen_experts)
            weights, ids = to.call(line, "aten.topk.default", args, chosen, chosen, dtypes=dtypes)
            up = to.transpose("rows = torch._grouped_mm(tokens", f"{name}.up", -2, -1)
            down = to.transpose("rows = torch._grouped_mm(rows", f"{name}.down", -2, -1)
            line = "mixed = rows[back]"
            up = to.reshape(line, up, count, sizes.hidden, 2, width) if sizes.is_gated else up
            kind = "silu" if sizes.is_gated else _ACTIVATIONS.get(sizes.activation, "gelu")
            all_of = (rows, ids, weights, up, down, kind, sizes.is_gated, count)
            mixed = to.one(line, "autopar.routed_experts.default", all_of, (tokens, sizes.hidden))
            return to.reshape("return mixed.unflatten", mixed, self.batch, self.seq, sizes.hidden)
