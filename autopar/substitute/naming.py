"""Names for packed parameters: the modules that all pieces share, then what tells them apart, joined by "_".

`layers.0.attn.q.weight`, `layers.0.attn.k.weight` → `layers.0.attn.q_k.weight`; the second slice of `h.0.c_attn.weight`
→ `h.0.c_attn_1.weight`; a transposed `fc.weight` → `fc_transposed.weight`. Equal blocks get equal names but for the
block's own, and a list of modules stays one: no name is put among its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.graph import Graph, Packing, Piece

_MANY = 4  # names from here on are not all spelled out


def packed_names(graph: Graph, packings: Sequence[Packing]) -> dict[Packing, str]:
    """A name for each packing that the graph does not have; that of the parameter for all of one as it is."""
    taken = _taken(graph)
    ordered = sorted(packings, key=lambda packing: [(piece.name, piece.start) for piece in packing.pieces])
    found: dict[Packing, str] = {}
    slices: dict[str, int] = {}
    for packing in ordered:
        first = packing.pieces[0]
        if packing == Packing(0, (Piece(first.name),)):
            found[packing] = first.name
            continue
        names = list(dict.fromkeys(piece.name for piece in packing.pieces))
        name = _joined(names) if len(names) > 1 else _marked(first.name, _mark(packing, slices))
        found[packing] = _fresh(name, taken)
    return {packing: found[packing] for packing in packings}


def _mark(packing: Packing, slices: dict[str, int]) -> str:
    """What tells a slice of one parameter from others: its number."""
    first = packing.pieces[0]
    if len(packing.pieces) == 1 and first.length is None:
        return "transposed"
    number = slices[first.name] = slices.get(first.name, -1) + 1
    return str(number)


def _marked(name: str, mark: str) -> str:
    module, _, last = name.rpartition(".")
    in_list = module.rpartition(".")[2].isdigit()
    return f"{module}_{mark}.{last}" if module and not in_list else f"{name}_part_{mark}"


def _joined(names: Sequence[str]) -> str:
    paths = [name.split(".") for name in names]
    shared = _common(paths)
    limit = min(map(len, paths)) - shared - 1
    same = min(_common([path[::-1] for path in paths]), limit)
    middles = [path[shared : len(path) - same] for path in paths]
    if shared and any(middle[0].isdigit() for middle in middles):
        shared -= 1
        middles[0] = [paths[0][shared], *middles[0]]
    texts = ["_".join(middle) for middle in middles]
    text = "_".join(texts) if len(texts) <= _MANY else f"{texts[0]}_to_{texts[-1]}"
    return ".".join([*paths[0][:shared], text, *paths[0][len(paths[0]) - same :]])


def _common(paths: Iterable[Sequence[str]]) -> int:
    """How many parts all begin with."""
    count = 0
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        count += 1
    return count


def _taken(graph: Graph) -> set[str]:
    """Every name of a parameter or module that there is."""
    names = {*(item.name for item in graph.stored), *graph.unpacked, *graph.tied, *graph.tensors}
    names |= {path for node in graph.nodes for path, _ in node.scope.path}
    parts = [name.split(".") for name in names]
    return {".".join(path[:count]) for path in parts for count in range(1, len(path) + 1)}


def _fresh(name: str, taken: set[str]) -> str:
    module, _, last = name.rpartition(".")
    found, count = name, 2
    while found in taken:
        found, count = (f"{module}_{count}.{last}" if module else f"{name}_{count}"), count + 1
    taken.add(found)
    return found
