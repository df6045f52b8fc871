"""Plans of one stage over all logical meshes, in ever more microbatches until something fits (Alpa §4)."""

from autopar.places.search import PlaceSearch

__all__ = ["PlaceSearch"]
