"""The arguments that say of which slices of the model's parameters a stored one is made."""

from __future__ import annotations

from autopar.ir.graph import Graph, Piece, Stored


def pieces_text(graph: Graph, stored: Stored) -> list[str]:
    """`pieces=…` and `packed_dim=…`; nothing for one of the model's own parameters."""
    packing = graph.packed.get(stored.name)
    if packing is None:
        return []
    pieces = "".join(f"{_piece(graph, stored, piece)}, " for piece in packing.pieces)
    text = pieces[:-2] if len(packing.pieces) > 1 else pieces[:-1]
    return [f"pieces=({text})", *([f"packed_dim={packing.dim}"] if packing.dim else [])]


def _piece(graph: Graph, stored: Stored, piece: Piece) -> str:
    parts = [repr(relative_name(stored.name, piece.name)), str(graph.unpacked[piece.name].shape)]
    if piece.length is not None:
        parts += [f"dim={piece.dim}"] if piece.dim else []
        parts += [f"start={piece.start}", f"length={piece.length}"]
    parts += ["transposed=True"] if piece.transposed else []
    return f"rt.Piece({', '.join(parts)})"


def relative_name(stored: str, name: str) -> str:
    """A name in the model from the module on that stores a packed parameter, as in Python's relative imports."""
    module, path = stored.split(".")[:-1], name.split(".")
    shared = 0
    while shared < min(len(module), len(path) - 1) and module[shared] == path[shared]:
        shared += 1
    up = len(module) - shared
    return ("." * (up + 1) if up else "") + ".".join(path[shared:])
