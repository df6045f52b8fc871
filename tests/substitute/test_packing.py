"""What may be stored packed, under which names, and that a graph computes the same with it: random moves, exactly."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor as Values

from autopar import runtime as rt
from autopar.emit.packed import pieces_text
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node, Packing, Piece, Ref, Scope, Stored, Tensor, map_references
from autopar.ir.packed import check_packing
from autopar.ops import overload
from autopar.runtime.packed import Packings
from autopar.substitute.packing import packed
from autopar.trace import find_blocks

CAT, SLICE, SPLIT, TURN = "aten.cat.default", "aten.slice.Tensor", "aten.split_with_sizes.default", "aten.t.default"
SINK = "aten.square.default"


class Builder:
    """A graph of operators on parameters, by the shapes that torch finds."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], frozen: tuple[str, ...] = ()) -> None:
        self.stored = [Stored(name, name, "parameter", name not in frozen) for name in shapes]
        self.tensors = {name: Tensor(name, shape, "float32", name not in frozen) for name, shape in shapes.items()}
        self.nodes: list[Node] = []

    def add(self, op: str, *args: Any, scope: str = "") -> list[str]:
        name = f"{op.split('.')[1]}_{len(self.nodes)}"
        metas = map_references(args, lambda tensor: torch.empty(self.tensors[tensor].shape, device="meta"))
        made = overload(op)(*metas)
        results = made if isinstance(made, (tuple, list)) else [made]
        names = [f"{name}_{number}" for number in range(len(results))]
        differentiable = any(self.tensors[ref].differentiable for ref in Node("", op, args, (), ()).operands)
        for one, value in zip(names, results, strict=True):
            self.tensors[one] = Tensor(one, tuple(value.shape), "float32", differentiable)
        self.nodes.append(Node(name, op, args, (), tuple(names), Scope(((scope, "Module"),) if scope else ())))
        return names

    def graph(self) -> Graph:
        sinks = tuple(name for node in self.nodes if node.op == SINK for name in node.results)
        return Graph((), tuple(self.stored), tuple(self.nodes), sinks, self.tensors)


def with_sinks(builder: Builder, *names: str) -> Graph:
    for name in names:
        builder.add(SINK, Ref(name))
    return packed(builder.graph())


def evaluated(graph: Graph, stored: Mapping[str, Values]) -> list[Values]:
    values = dict(stored)
    for node in graph.nodes:
        made = overload(node.op)(*map_references(node.args, values.__getitem__))
        results = made if isinstance(made, (tuple, list)) else [made]
        values |= {name: value for name, value in zip(node.outputs, results, strict=True) if name is not None}
    return [values[name] for name in graph.outputs]


def declared(graph: Graph) -> dict[str, rt.Parameter]:
    """As an emitted program declares them."""
    return {
        item.name: eval(
            f"rt.Parameter({', '.join([str(graph.tensors[item.tensor].shape), *pieces_text(graph, item)])})"
        )
        for item in graph.stored
    }


def fit(one: tuple[int, ...], other: tuple[int, ...], dim: int) -> bool:
    """Whether two shapes differ in this dim at most."""
    return len(one) == len(other) and (*one[:dim], *one[dim + 1 :]) == (*other[:dim], *other[dim + 1 :])


def random_graph(seed: int) -> Graph:
    """Moves of a few matrices and vectors, some of which are read twice, each end read by something else."""
    chance = random.Random(seed)
    shapes = {f"m.{n}.w": (chance.randint(1, 4) * 2, chance.randint(1, 4) * 2) for n in range(3)}
    builder = Builder({**shapes, "bias": (chance.randint(2, 6),), "other": (3,)})
    alive = [item.name for item in builder.stored]
    for _ in range(chance.randint(1, 7)):
        name = chance.choice(alive)
        shape = builder.tensors[name].shape
        dim = chance.randrange(len(shape))
        move = chance.choice(["join", "join", "split", "slice", "turn"])
        same = [other for other in alive if other != name and fit(shape, builder.tensors[other].shape, dim)]
        used, new = [name], list[str]()
        if move == "join" and same:
            used.append(chance.choice(same))
            new = builder.add(CAT, [Ref(one) for one in used], dim - chance.randint(0, 1) * len(shape))
        elif move == "split" and shape[dim] > 1:
            at = chance.randint(1, shape[dim] - 1)
            new = builder.add(SPLIT, Ref(name), [at, shape[dim] - at], dim)
        elif move == "slice" and shape[dim] > 1:
            at = chance.randint(1, shape[dim] - 1)
            new = builder.add(SLICE, Ref(name), dim, 0, at) + builder.add(SLICE, Ref(name), dim, at, 2**62)
        elif move == "turn" and len(shape) == 2:
            new = builder.add(TURN, Ref(name))
        if new:
            alive = [one for one in alive if one not in used or chance.random() < 0.05] + new
    for name in alive:
        builder.add(SINK, Ref(name))
    return builder.graph()


def test_random_moves_are_stored_and_compute_the_same() -> None:
    """Few are left: what is read twice, or sliced along both dims."""
    moved = left = 0
    for seed in range(400):
        graph = random_graph(seed)
        found = packed(graph)
        check_packing(found)
        own = {item.name: torch.randn(graph.tensors[item.name].shape) for item in graph.stored}
        packings = Packings(declared(found))
        stored = {item.name: packings.packed(item.name, own) for item in found.stored}
        for one, other in zip(evaluated(graph, own), evaluated(found, stored), strict=True):
            assert torch.equal(one, other), seed
        back = packings.unpacked(dict(stored))
        assert back.keys() == own.keys() and all(torch.equal(back[name], own[name]) for name in own), seed
        assert packed(found) is found, "there is nothing left to do"
        moved += len(graph.nodes) - len(found.nodes)
        left += sum(node.op != SINK for node in found.nodes)
    assert moved > 3 * left > 0


def test_merged_parameters_get_a_name_of_the_modules_that_they_share() -> None:
    builder = Builder({f"h.{n}.attn.{name}.weight": (4, 6) for n in range(2) for name in "qkv"})
    for n in range(2):
        refs = [Ref(f"h.{n}.attn.{name}.weight") for name in "qkv"]
        made = builder.add(CAT, refs, 0, scope=f"h.{n}")
        builder.add(SINK, Ref(made[0]), scope=f"h.{n}")
    graph = packed(builder.graph())
    assert [item.name for item in graph.stored] == ["h.0.attn.q_k_v.weight", "h.1.attn.q_k_v.weight"]
    assert graph.packed["h.1.attn.q_k_v.weight"] == Packing(0, tuple(Piece(f"h.1.attn.{n}.weight") for n in "qkv"))
    assert graph.tensors["h.0.attn.q_k_v.weight"] == Tensor("h.0.attn.q_k_v.weight", (12, 6), "float32", True)
    assert find_blocks(graph).paths == (("h.0", "h.1"),)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.weight", "b.weight"], "a_b.weight"),
        (["w1", "w2"], "w1_w2"),
        (["net.0.weight", "net.1.weight"], "net_0_1.weight"),  # a list of modules stays one
        (["d.0.x.k.weight", "d.1.x.k.weight"], "d_0_1.x.k.weight"),
        ([f"e.{n}.weight" for n in range(6)], "e_0_to_5.weight"),
        (["a.weight", "a.b.weight"], "a.weight_b_weight"),
    ],
)
def test_names(names: list[str], expected: str) -> None:
    builder = Builder(dict.fromkeys(names, (2, 3)))
    graph = with_sinks(builder, *builder.add(CAT, [Ref(name) for name in names], 0))
    assert list(graph.packed) == [expected]


def test_a_name_that_the_model_has_is_not_taken() -> None:
    builder = Builder(dict.fromkeys(["m.a.weight", "m.b.weight", "m.a_b.weight"], (2, 3)))
    graph = with_sinks(builder, "m.a_b.weight", *builder.add(CAT, [Ref("m.a.weight"), Ref("m.b.weight")], 0))
    assert list(graph.packed) == ["m.a_b_2.weight"]


def test_slices_of_one_parameter_are_numbered_in_order() -> None:
    builder = Builder({"c.weight": (4, 6)})
    graph = with_sinks(builder, *reversed(builder.add(SPLIT, Ref("c.weight"), [2, 4], 1)))
    assert {name: item.pieces[0].start for name, item in graph.packed.items()} == {"c_0.weight": 0, "c_1.weight": 2}
    assert [item.name for item in graph.stored] == ["c_0.weight", "c_1.weight"]


def test_what_is_split_and_joined_again_is_the_models_own() -> None:
    builder = Builder({"c.weight": (4, 6)})
    parts = builder.add(SPLIT, Ref("c.weight"), [2, 4], 1)
    graph = with_sinks(builder, *builder.add(CAT, [Ref(part) for part in parts], 1))
    assert (graph.packed, [node.op for node in graph.nodes]) == ({}, [SINK])
    assert [item.name for item in graph.stored] == ["c.weight"]


def test_packed_parameters_are_packed_further() -> None:
    builder = Builder({"q": (2, 4), "k": (2, 4), "v": (2, 4)})
    once = with_sinks(builder, *builder.add(CAT, [Ref("q"), Ref("k")], 0), "v")
    again = Builder({})
    again.stored, again.tensors = list(once.stored), {item.tensor: once.tensors[item.tensor] for item in once.stored}
    made = again.add(CAT, [Ref("q_k"), Ref("v")], 0)
    again.add(SINK, Ref(made[0]))
    graph = packed(replace(again.graph(), packed=once.packed, unpacked=once.unpacked))
    assert graph.packed == {"q_k_v": Packing(0, (Piece("q"), Piece("k"), Piece("v")))}
    check_packing(graph)


@pytest.mark.parametrize("case", ["read as it is", "twice in one", "part is not read", "frozen and trained", "output"])
def test_what_cannot_be_packed_stays_an_operator(case: str) -> None:
    builder = Builder({"a": (2, 4), "b": (2, 4)}, ("b",) if case == "frozen and trained" else ())
    if case == "part is not read":
        made = builder.add(SLICE, Ref("a"), 0, 0, 1)
    else:
        made = builder.add(CAT, [Ref("a"), Ref("a" if case == "twice in one" else "b")], 0)
    builder.add(SINK, Ref(made[0]))
    if case == "read as it is":
        builder.add(SINK, Ref("b"))
    graph = builder.graph()
    if case == "output":
        graph = replace(graph, outputs=(*graph.outputs, made[0]))
    assert packed(graph) is graph


def split_graph() -> Graph:
    builder = Builder({"c.weight": (4, 6), "d.weight": (4, 6)})
    return with_sinks(builder, *builder.add(SPLIT, Ref("c.weight"), [2, 4], 1), *builder.add(TURN, Ref("d.weight")))


def packing(name: str, /, **changes: Any) -> dict[str, Packing]:
    found = dict(split_graph().packed)
    found[name] = replace(found[name], pieces=(replace(found[name].pieces[0], **changes),))
    return found


PACKED, OWN = split_graph().packed, split_graph().unpacked


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packed": packing("c_1.weight", start=1)}, r"each element of c.weight in one place, found \[0:4, 0:2\] and"),
        ({"packed": {n: p for n, p in PACKED.items() if n != "c_1.weight"}}, "expected all 24 elements of c.weight"),
        ({"packed": packing("c_1.weight", start=3)}, r"a slice of c.weight\[4, 6\], found Piece"),
        ({"packed": packing("d_transposed.weight", transposed=False)}, r"make up d_transposed.weight \[6, 4\], found"),
        ({"packed": packing("c_0.weight", name="e.weight")}, "expected e.weight, of which c_0.weight is made"),
        ({"packed": {**PACKED, "e": Packing(0, (Piece("c.weight"),))}}, "expected the packed parameter e among"),
        ({"unpacked": {n: replace(t, dtype="bfloat16") for n, t in OWN.items()}}, "to be bfloat16 and trained"),
        ({"unpacked": {n: replace(t, differentiable=False) for n, t in OWN.items()}}, "to be float32 and frozen"),
    ],
)  # fmt: skip
def test_a_packing_that_loses_or_repeats_elements_is_refused(changes: dict[str, Any], message: str) -> None:
    graph = replace(split_graph(), **changes)
    with pytest.raises(PlanError, match=message):
        check_packing(graph)


def test_the_fingerprint_tells_packings_apart() -> None:
    graph = split_graph()
    other = dict(graph.packed)
    other["c_0.weight"], other["c_1.weight"] = (
        replace(item, pieces=(replace(item.pieces[0], start=start),))
        for item, start in ((other["c_0.weight"], 4), (other["c_1.weight"], 0))
    )
    turned = replace(graph, packed=other)
    check_packing(turned)
    assert graph.fingerprint != turned.fingerprint
