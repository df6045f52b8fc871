"""How parameters are stored between steps (ZeRO 0 to 3), as storage placements."""

from autopar.zero.storage import storage_options, zero_stage

__all__ = ["storage_options", "zero_stage"]
