"""The storage placements a parameter may have, and their ZeRO names.

Bytes a parameter of Ψ elements holds with 16-byte Adam state in mixed precision on N ranks (ZeRO, SC'20, table 1):
stage 0: 16Ψ; 1: 4Ψ + 12Ψ/N; 2: 2Ψ + 14Ψ/N; 3: 16Ψ/N. Here a stage is a property of one parameter: what it
stores on each axis, whether its gradient is reduced each microbatch, and whether it is gathered
again for the backward pass.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from autopar.ir.graph import Tensor
from autopar.ir.mesh import LogicalMesh
from autopar.ir.placement import I, Placement, R, S, Type, num_shards
from autopar.ir.plan import Storage


def storage_options(
    tensor: Tensor, axes: LogicalMesh, microbatches: int = 1, may_offload: bool = False, must_offload: bool = False
) -> list[Storage]:
    """Every storage of a parameter: I or S(d) on each axis; sharded ones kept or gathered again (ZeRO-1/2, ZeRO-3).

    A tensor that needs no gradient stores R where another stores I. may_offload: what is trained may be on the host,
    too, brought to the device once a step (ZeRO-Offload) or for each use (ZeRO-Infinity); must_offload: it is there.
    """
    options = _on_device(tensor, axes, microbatches)
    if not tensor.differentiable or not (may_offload or must_offload):
        return options
    streamed = [Storage(o.placement, True, True) for o in options if not any(t.kind == "S" for t in o.placement)]
    offloaded = [replace(option, on_host=True) for option in (*options, *streamed)]
    return offloaded if must_offload else [*options, *offloaded]


def _on_device(tensor: Tensor, axes: LogicalMesh, microbatches: int) -> list[Storage]:
    whole = I if tensor.differentiable else R
    candidates: list[tuple[Type, ...]] = [(whole, *map(S, range(len(tensor.shape)))) for _ in axes]
    options = []
    for placement in itertools.product(*candidates):
        if not _fits(tensor.shape, placement, axes):
            continue
        options.append(Storage(placement))
        if any(type_.kind == "S" for type_ in placement) and tensor.differentiable:
            options.append(Storage(placement, regather=True, reduce_each_microbatch=True))
            if microbatches > 1:
                options.append(Storage(placement, reduce_each_microbatch=True))
    return options


def _fits(shape: tuple[int, ...], placement: Placement, axes: LogicalMesh) -> bool:
    return all(shape[type_.dim] >= num_shards(placement, type_.dim, axes) for type_ in placement if type_.kind == "S")
