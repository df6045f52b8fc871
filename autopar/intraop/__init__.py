"""Chooses a placement for every tensor on one submesh (Alpa's intra-operator pass)."""

from autopar.intraop.search import LeastMemory, least_memory, plan_placements

__all__ = ["LeastMemory", "least_memory", "plan_placements"]
