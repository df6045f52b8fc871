"""What the tests of this folder run on ranks: functions that the rank pool finds by their module's path."""

from __future__ import annotations

from autopar.program import load_source


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
