"""Cuts a chain of layers into stages on submeshes (Alpa's inter-operator pass)."""

from autopar.interop.chunks import chunk_counts, chunk_sizes
from autopar.interop.clustering import Layers, Members, balanced_layers, block_layers
from autopar.interop.dp import ChosenStage, StageChoice, StageKind, StageSearch, best_stages, equally_cut
from autopar.interop.folding import Folded, fold

__all__ = [
    "ChosenStage",
    "Folded",
    "Layers",
    "Members",
    "StageChoice",
    "StageKind",
    "StageSearch",
    "balanced_layers",
    "best_stages",
    "block_layers",
    "chunk_counts",
    "chunk_sizes",
    "equally_cut",
    "fold",
]
