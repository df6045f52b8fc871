"""The graph means what the model means: loss, gradients and buffers of the graph run by itself equal the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.constraint import Constraint
from autopar.ops import coverage
from autopar.trace import find_blocks, trace
from tests.trace.interpret import check_flags, graph_gradients, run_graph


class Calls(nn.Module):
    """One function of a parameterised tensor, as a loss."""

    def __init__(self, function: Callable[..., Tensor], width: int, *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(x * self.weight, *self.parts) * 1.5).sum()


def _write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = x[:, 1]
    y[:, 2] = 1.0
    return y


def _complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(4, 6, 4, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones(4), torch.arange(4.0))).flatten(2)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mse": (lambda x: F.mse_loss(x, torch.ones_like(x)),),
    "l1": (lambda x: F.l1_loss(x, torch.ones_like(x)),),
    "huber": (lambda x: F.huber_loss(x, torch.zeros_like(x)),),
    "binary": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),),
    "kl": (lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),),
    "nll": (lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(-1), torch.arange(24) % 8),),
    "group norm": (lambda x, m: m(x.transpose(1, 2)), nn.GroupNorm(2, 8)),
    "instance norm": (lambda x: F.instance_norm(x),),
    "attention": (lambda x, m: m(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
    "encoder": (lambda x, m: m(x), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "lstm": (lambda x, m: m(x)[0], nn.LSTM(8, 8, batch_first=True)),
    "gru": (lambda x, m: m(x)[0], nn.GRU(8, 8, batch_first=True)),
    "transposed": (lambda x, m: m(x), nn.ConvTranspose1d(6, 4, 2)),
    "glu": (lambda x: F.glu(x),),
    "prelu": (lambda x, m: m(x), nn.PReLU()),
    "cosine": (lambda x: F.cosine_similarity(x, x + 1.0, -1),),
    "normalize": (lambda x: F.normalize(x, dim=-1),),
    "std": (lambda x: x.std(-1),),
    "write": (_write,),
    "complex": (_complex,),
    "where": (lambda x: torch.where(x > 0, x, 0.5),),
    "tile": (lambda x: x.tile(2),),
    "repeat": (lambda x: x.repeat_interleave(2, 1),),
    "index add": (lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 2]), x[:, :2]),),
    "reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"),),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([1, 2], [1, 2])),),
    "chunk": (lambda x: x.chunk(2, -1)[1],),
    "in place": (lambda x: (x + 1).add_(2).relu_(),),
    "gather": (lambda x: x.gather(1, x.detach().argsort(1)),),
    "one hot": (lambda x: F.one_hot(x.argmax(-1), 8) * x,),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_value_and_gradient_and_have_rules(name: str) -> None:
    function, *modules = FUNCTIONS[name]
    torch.manual_seed(0)
    model = Calls(function, 8, *modules)
    x = torch.randn(4, 6, 8)
    graph = trace(model, (x,))
    check_against_model(graph, model, {"x": x})
    replicated = [op for op, source in coverage(graph).items() if source.startswith("replicated")]
    assert not replicated


def check_against_model(graph: Any, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    model.zero_grad()
    output = model(**inputs)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    check_flags(graph, run_graph(graph, model, inputs))
    found, gradients = graph_gradients(graph, model, inputs)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) <= set(expected)
    for parameter, gradient in expected.items():
        found = gradients.get(parameter, torch.zeros_like(gradient))
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6, msg=lambda m, p=parameter: f"{p}: {m}")


class Stopped(nn.Module):
    """Half of the loss is computed where no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.first(x).relu()
            with torch.enable_grad():
                target = target * 2
        return ((self.second(x) - target) ** 2).mean() + self.first(x).sum()


def test_no_grad_regions_stop_the_gradient() -> None:
    model, x = Stopped(), torch.randn(3, 4)
    graph = trace(model, {"x": x})
    check_against_model(graph, model, {"x": x})
    assert any(node.op == "aten.detach.default" for node in graph.nodes)


class Counting(nn.Module):
    """Two buffers change in forward: one in place, one by batch-norm."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(x.detach().sum(0))
        return (self.norm(self.linear(x)) * self.steps).square().mean()


def test_buffers_written_in_place_are_mutations() -> None:
    model, x = Counting(), torch.randn(6, 4)
    graph = trace(model, (x,))
    assert set(graph.mutations) >= {"steps", "norm.running_mean", "norm.running_var"}
    assert not model.steps.any(), "tracing changed the model"
    values = run_graph(graph, model, {"x": x})
    model(x)
    buffers = dict(model.named_buffers())
    for name, tensor in graph.mutations.items():
        torch.testing.assert_close(values[tensor], buffers[name])


def test_tensors_with_several_consumers_go_through_one_identity() -> None:
    model = Calls(lambda x: x.relu() + x.tanh() * x, 8)
    graph = trace(model, (torch.randn(2, 8),))
    identities = [node for node in graph.nodes if node.op == "aten.alias.default"]
    assert len(identities) == 1
    for name, users in graph.consumers.items():
        if graph.tensors[name].differentiable and name not in graph.stored_by_tensor:
            assert len(users) <= 1 or graph.producers[name] in identities


def test_equal_calls_are_merged_and_dead_ones_dropped() -> None:
    def function(x: Tensor) -> Tensor:
        _ = x.exp().cos()
        return x.sin() + x.sin() + x.view(x.shape)

    ops = [node.op for node in trace(Calls(function, 8), (torch.randn(2, 8),)).nodes]
    assert ops.count("aten.sin.default") == 1
    assert "aten.exp.default" not in ops and "aten.view.default" not in ops


def test_loss_fn_takes_the_inputs_that_forward_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, target = torch.randn(6, 4), torch.arange(6) % 3
    graph = trace(model, (x, target), loss_fn=F.cross_entropy)
    assert graph.inputs == ("input", "target")
    values = run_graph(graph, model, {"input": x, "target": target})
    assert graph.loss is not None
    torch.testing.assert_close(values[graph.loss], F.cross_entropy(model(x), target))
    assert [item.name for item in graph.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {node.scope.module for node in graph.nodes if "linear" in node.op} == {"0", "2"}


def test_no_loss_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(TraceError, match="pass loss_fn="):
        trace(nn.Linear(4, 4), (torch.randn(2, 4),))
    graph = trace(nn.Linear(4, 4), (torch.randn(2, 4),), mode="inference")
    assert graph.loss is None and len(graph.outputs) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)), ids)


def test_tied_weights_are_one_parameter() -> None:
    model, ids = Tied(), torch.arange(6)
    graph = trace(model, (ids,))
    assert graph.tied == {"head.weight": "embedding.weight"}
    assert [item.name for item in graph.parameters] == ["embedding.weight"]
    check_against_model(graph, model, {"ids": ids})


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the branch
            return x.sum()
        return x.mean()


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y[y > 0].sort().values.sum()  # the mask


@pytest.mark.parametrize(("model", "comment"), [(Branches(), "# the branch"), (Masks(), "# the mask")])
def test_control_by_values_is_refused_with_the_source_line(model: nn.Module, comment: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith(comment))
    with pytest.raises(TraceError) as caught:
        trace(model, (torch.randn(3, 4),))
    assert f"{__file__}:{line}" in str(caught.value)
    assert "torch.where" in str(caught.value)


def test_inputs_that_forward_writes_to_are_refused() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1).sum()

    with pytest.raises(TraceError, match=r"leave its inputs alone, .*'x' at\n.*test_trace\.py:\d+: return x\.add_"):
        trace(Writes(), (torch.randn(2, 2),), mode="inference")


def test_a_tensor_is_among_example_inputs() -> None:
    with pytest.raises(TraceError, match="found int"):
        trace(nn.Linear(2, 2), (3,))
    with pytest.raises(TraceError, match="found str"):
        trace(nn.Linear(2, 2), "x")


class Stack(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 8)) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_repeated_blocks_are_found() -> None:
    graph = trace(Stack([16, 16, 12, 16]), (torch.randn(4, 8),))
    blocks = find_blocks(graph)
    assert sorted(blocks.paths) == [("layers.0", "layers.1", "layers.3"), ("layers.2",)]
    for name, twin in blocks.node_representative.items():
        assert graph.node_by_name[name].op == graph.node_by_name[twin].op
    assert blocks.representative_tensor("layers.3.0.weight") == "layers.0.0.weight"
    assert blocks.representative_tensor("layers.2.0.weight") == "layers.2.0.weight"


def test_a_block_of_which_a_constraint_says_something_else_is_not_equal() -> None:
    """It was taken for one of its equals, and the constraint was not heard where the first of them is another."""
    graph = trace(Stack([16] * 4), (torch.randn(4, 8),))
    rule, every = Constraint("layers.2.0.weight", ("S(0)",), "used"), Constraint("layers.*.0.weight", ("R",), "used")
    blocks = find_blocks(graph, [every, rule])
    assert sorted(blocks.paths) == [("layers.0", "layers.1", "layers.3"), ("layers.2",)]
    assert find_blocks(graph, [every, Constraint(stages=2)]) == find_blocks(graph)
    each = [Constraint(f"layers.{number}", ("R",), "output") for number in range(4)]
    assert find_blocks(graph, each).paths == find_blocks(graph).paths, "of all they say the same"


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    trace(model, (torch.randn(6, 4),), loss_fn=lambda y: y.mean())
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_fingerprint_follows_the_graph() -> None:
    x = torch.randn(4, 8)
    same = [trace(Stack([16, 16]), (x,)).fingerprint for _ in range(2)]
    assert same[0] == same[1]
    assert trace(Stack([16, 12]), (x,)).fingerprint != same[0]
    assert trace(Stack([16, 16]), (torch.randn(2, 8),)).fingerprint != same[0]


class _Autocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x * 2.0).sum()


def test_operators_inside_of_autocast_have_a_source() -> None:
    """torch keeps no line of theirs: it is that of the forward."""
    graph = trace(_Autocast(), {"x": torch.ones(3)}, mode="inference")
    assert [node.op for node in graph.nodes] == ["aten.mul.Tensor", "aten.sum.default"]
    line = _Autocast.forward.__code__.co_firstlineno
    assert {node.source for node in graph.nodes} == {f"trace/test_trace.py:{line}"}


def test_casts_of_one_tensor_to_integers_and_to_floats_are_told_apart() -> None:
    """Whether a gradient flows through a cast is its dtype's affair, in whatever order casts are seen."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            rounded = h.to(torch.int32)
            return (h.to(torch.float64) * rounded + h.to(torch.complex64).real).mean()

    graph = trace(Casts(), (torch.randn(2, 4),))
    casts = {graph.tensors[n.results[0]].dtype: n.results[0] for n in graph.nodes if "_to_copy" in n.op}
    flows = {dtype: graph.tensors[name].differentiable for dtype, name in casts.items()}
    assert {"int32": False, "float64": True, "complex64": True}.items() <= flows.items()


def test_squeezing_dims_that_are_not_one_is_nothing() -> None:
    """In a microbatch of one sample it would take the dim away."""

    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).squeeze(0).square().mean()

    graph = trace(Squeezing(), {"x": torch.randn(4, 8)})
    assert not any("squeeze" in node.op for node in graph.nodes)


@pytest.mark.parametrize("dims", [(), (1,), ((0, 1),), ((-1, -2, 0),)])
def test_squeezed_dims_are_those_that_are_one_in_the_model(dims: tuple[Any, ...]) -> None:
    """In a microbatch of one sample, the dim of samples is 1 too, and stays."""

    class Squeezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).cumsum(0).view(4, 1, 8).squeeze(*dims).square().mean((1,)).sum()

    graph = trace(Squeezing(), {"x": torch.randn(4, 8)})
    [node] = [node for node in graph.nodes if "squeeze.d" in node.op]
    assert node.args[-1] in (1, (1,))
