"""What a plan may keep on the host instead of the device, by the words of `template_plan(offload=…)`."""

from __future__ import annotations

from autopar.ir.plan import Plan, Stage

NOT_OFFLOADED, OPTIMIZER, ACTIVATIONS, BOTH = OFFLOADS = ("none", "optimizer", "activations", "both")
BUILT = (NOT_OFFLOADED, OPTIMIZER, ACTIVATIONS, BOTH)
"""Those for which programs are made."""


def stored_on_host(stage: Stage) -> list[str]:
    """The stored tensors of a stage that are on the host, with their gradients and optimizer state."""
    return [name for name, storage in stage.storage.items() if storage.on_host]


def uses_host(plan: Plan) -> bool:
    """Whether anything is kept on the host."""
    return bool(plan.copied_out) or any(stored_on_host(stage) for stage in plan.stages)
