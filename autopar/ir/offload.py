"""What a plan may keep on the host instead of the device, by the words of `template_plan(offload=…)`."""

from __future__ import annotations

NOT_OFFLOADED, OPTIMIZER, ACTIVATIONS, BOTH = OFFLOADS = ("none", "optimizer", "activations", "both")
BUILT = (NOT_OFFLOADED, ACTIVATIONS)
"""Those for which programs are made."""
