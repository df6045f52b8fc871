"""Chooses a placement for every tensor on one submesh (Alpa's intra-operator pass)."""

from autopar.intraop.search import plan_placements

__all__ = ["plan_placements"]
