"""Whatever a model calls its parameters, buffers, modules and inputs: they stay its own.

The names of inputs, of what is stored, of operators, of the runtime's blocks and of what emitted source declares meet
in one model each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.emit.attributes import Attributes
from autopar.emit.module import Module
from autopar.errors import TraceError
from autopar.ir.graph import Stored
from autopar.trace import trace
from tests.equivalence.hard import state_of, template
from tests.equivalence.hard_jobs import trained, trained_alone
from tests.equivalence.test_hard_state import assert_trains_alike
from tests.rank_pool import pool

OPERATORS = ("mean", "mul", "linear", "tanh", "cross_entropy_loss", "alias", "getitem", "mul_shared", "x_shared")
RUNTIME = (
    "microbatch", "count", "axes", "update", "prepare", "mesh", "targets", "constants", "constants_2", "branch_0",
    "AXES", "INPUTS", "declared_parameters", "stored_parameters", "late_tensors", "model_names", "train_step",
    "full_state_dict", "clip_grad_norm_", "init_from",
)  # fmt: skip
SOURCE = ("self", "rt", "torch", "aten", "nn", "redistribute", "block", "enumerate", "dp", "tp", "print", "a b", "a-b",
          "__own", "__own__", "_Program__own", "timeout_s")  # fmt: skip
GRAPHS = ("code", "graph", "meta", "shape_env", "print_readable", "_in_spec")
LIFTED = ("lifted_tensor_0", "lifted_tensor_1", "x", "y", "module", "model")


class Named(nn.Module):
    """Whose parameters, buffers or modules have the names; two uses of a parameter, buffers that forward updates."""

    def __init__(self, *named: tuple[str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.own = nn.Linear(8, 8), nn.Linear(8, 8), named
        for name, kind in named:
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.rand(8) + 0.5))
            elif kind == "buffer":
                self.register_buffer(name, torch.rand(8) + 0.5)
            else:
                self._modules[name] = nn.Linear(8, 8)  # add_module minds attributes of nn.Module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x * torch.tensor([1.0, 2.0] * 4)))
        for name, kind in self.own:
            h = self._modules[name](h) if kind == "module" else h * getattr(self, name).clone()
            if kind == "buffer":
                with torch.no_grad():
                    getattr(self, name).add_(0.25)
        return F.cross_entropy((self.second(h) * h).mean(1, keepdim=True) + h, y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(8, (8,), generator=generator)}


TOGETHER = 5  # names of one model: where one of them fails, the error says which


def _cases() -> list[Any]:
    """Each name as a parameter, buffer or module in turn, of the runtime's as all three; a few in a model, the models
    in one of two plans in turn."""
    kinds, plans = ("parameter", "buffer", "module"), ({"dp": 2, "zero": 3}, {"tp": 2})
    names = [*OPERATORS, *SOURCE, *LIFTED, *GRAPHS]
    named = [(name, kinds[number % 3]) for number, name in enumerate(names)]
    named.remove(("lifted_tensor_0", "module"))  # refused, below
    named += [(name, kinds[(number + turn) % 3]) for turn in range(3) for number, name in enumerate(RUNTIME)]
    models = [tuple(named[first : first + TOGETHER]) for first in range(0, len(named), TOGETHER)]
    return [pytest.param(own, plans[number % 2], id=", ".join(map(" ".join, own))) for number, own in enumerate(models)]


@pytest.mark.ranks
@pytest.mark.parametrize(("named", "plan"), _cases())
def test_any_names_train_as_on_one_device(named: tuple[tuple[str, str], ...], plan: dict[str, int]) -> None:
    model = Named(*named)
    assert_trains_alike(model, batch(), template(model, batch(), **plan))


class SameNames(nn.Module):
    """Inputs that are called as what the model stores: a parameter, a buffer, a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.linear = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 16)
        self.register_buffer("scale", torch.rand(16))
        self.mask = torch.rand(8, 16).round()
        self.query_input = nn.Parameter(torch.ones(16))

    def forward(self, query: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        mine, given = self.query * self.scale + self.mask, self.linear(query) * scale - mask
        return (mine * given * self.query_input).pow(2).mean()


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_inputs_with_names_of_parameters(plan: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = {name: torch.randn(8, 16, generator=generator) for name in ("query", "scale", "mask")}
    model = SameNames()
    program = template(model, inputs, **plan)
    assert list(program.input_layout) == ["query", "scale", "mask"]
    assert_trains_alike(model, inputs, program)


def test_further_uses_of_a_parameter_are_attributes_too() -> None:
    """`weight` in two uses is `weight` and `weight_1`, which the model may call another parameter."""
    tree, layer = Module(""), Module("layer")
    tree.children["layer"] = layer
    paths = {name: f"layer.{name}" for name in ("weight", "weight_1", "mesh")}
    layer.stored = {name: Stored(path, path, "parameter") for name, path in paths.items()}
    attributes = Attributes(tree, lambda stored: 2)
    found = [attributes.path(path) for path in paths.values()]
    assert found == ["layer.weight_", "layer.weight_1", "layer.mesh_"]
    assert attributes.renamed(layer) == {"weight_": "weight", "mesh_": "mesh"}
    assert attributes.renamed(tree) == {}


@pytest.mark.parametrize("name", ["class", "lambda", "None", "ﬁ", 'a"b', "a\\b", "a\nb"])
def test_names_that_cannot_stand_in_source_are_refused(name: str) -> None:
    model = Named((name, "parameter"))
    with pytest.raises(TraceError, match="expected names of parameters, buffers and modules") as error:
        trace(model, batch())
    assert repr(name) in str(error.value)


def test_a_module_called_as_a_constant_of_torch_export_is_refused() -> None:
    with pytest.raises(TraceError, match="found 'lifted_tensor_0'; rename it"):
        trace(Named(("lifted_tensor_0", "module")), batch())


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["microbatch", "update", "mean", "query"])
def test_names_in_stages(name: str) -> None:
    model = Named((name, "module"))
    mesh = autopar.Mesh("cpu", devices_per_node=2)
    program = autopar.parallelize(model, mesh, batch(), constraints=[autopar.Constraint(stages=2)], search="fast")
    assert len(program.plan.stages) == 2
    losses, tensors, _, _ = trained_alone(model, batch(), "sgd")
    for found, found_tensors, _, _ in pool(2).run(trained, program.source, state_of(model), batch(), "sgd"):
        assert found == pytest.approx(losses, rel=1e-5)
        for key, expected in tensors.items():
            torch.testing.assert_close(found_tensors[key], expected, rtol=2e-4, atol=2e-6)
