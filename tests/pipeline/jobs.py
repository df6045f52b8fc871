"""What the tests of this folder run on ranks: functions that the rank pool finds by their module's path."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.program import load_source


@torch.library.custom_op("autopar_test::scaled_product", mutates_args=())
def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """x (b, s, d), weight (d, h) → (b, s, h): an operator that only its users know."""
    return (x @ weight) * scale


@scaled_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = context.saved_tensors
    gradient = gradient * context.scale
    return gradient @ weight.T, x.flatten(0, 1).T @ gradient.flatten(0, 1), None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


scaled_product.register_autograd(_backward, setup_context=_save)


class Custom(nn.Module):
    """Two products by the custom operator with a GELU between, and a squared loss."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(16, hidden) / 4)
        self.down = nn.Parameter(torch.randn(hidden, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(scaled_product(x, self.up, 0.5))
        return scaled_product(hidden, self.down, 2.0).square().mean()


def gradients(rank: int, world: int, source: str, state: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
    """Loss, whole gradients and this rank's parameter shapes after one step of an emitted program."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    loss = built.train_step(x)
    shapes = {name: tuple(p.to_local().shape) for name, p in built.named_parameters()}  # type: ignore[attr-defined]
    return loss, built.full_gradients(), shapes


def refusal(rank: int, world: int, source: str, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    """What `build` raises here: without a device mesh when `shape` is empty, else with that one."""
    from torch.distributed.device_mesh import init_device_mesh

    from autopar import runtime as rt
    from autopar.runtime.errors import WorldError

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None
    try:
        rt.build(load_source(source).Program, mesh)
    except WorldError as error:
        return str(error)
    return "built"


def groups_of_meshes(rank: int, world: int) -> list[int]:
    """The groups that meshes made one after another talk to; the last is that of none."""
    from autopar.runtime.mesh import make_rank_mesh

    meshes = [make_rank_mesh({name: world}) for name in ("dp", "tp", "dp")]
    return [*(id(mesh.axes[0].group) for mesh in meshes), id(None)]
