"""Plans of one stage over all logical meshes, in ever more microbatches until something fits (Alpa §4)."""

from autopar.places.copied import CopiedPlace, copied_ladders
from autopar.places.search import PlaceSearch

__all__ = ["CopiedPlace", "PlaceSearch", "copied_ladders"]
