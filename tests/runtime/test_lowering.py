"""Local operators over shards against their single-device originals: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import runtime as rt
from autopar.runtime import randomness, redistribute
from autopar.runtime.placement import local_slices, parse_placement
from tests.rank_pool import RankPool


def part(whole: Tensor, placement: str, mesh: rt.RankMesh) -> Tensor:
    """This rank's part, as a leaf of its own."""
    types = parse_placement(placement, len(mesh.axes))
    local = whole[local_slices(whole.shape, types, mesh.axes)].detach().clone()
    return local.requires_grad_(whole.is_floating_point())


def check(found: Tensor | None, whole: Tensor | None, placement: str, mesh: rt.RankMesh) -> None:
    assert found is not None and whole is not None
    torch.testing.assert_close(found.detach(), part(whole, placement, mesh).detach(), rtol=1e-10, atol=1e-12)


CROSS_ENTROPY = [
    {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing, "weighted": weighted}
    for ignore, reduction, smoothing, weighted in product((-100, 2), ("mean", "sum", "none"), (0.0, 0.1), (False, True))
]


def hide(logits: Tensor, target: Tensor) -> Tensor:
    """Every other class that is not the target is hidden, as by a mask: −inf · 0 made NaN where a rank's first was."""
    classes = torch.arange(logits.shape[1]).view(1, -1, *[1] * (logits.dim() - 2))
    return logits.masked_fill((classes % 2 == 0) & (classes != target.unsqueeze(1)), float("-inf"))


def cross_entropies(rank: int, world: int, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    """Samples over "dp", classes over "tp", on every setting of the options."""
    mesh = rt.make_rank_mesh(sizes)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 4
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    target[0], target[-1] = 2, 2  # the ranks' valid counts differ
    samples = tuple(axis for axis in mesh.axes if axis.name.startswith("dp"))
    classes = tuple(axis for axis in mesh.axes if axis.name.startswith("tp"))
    both = " ".join("S(0)" if axis in samples else "S(1)" for axis in mesh.axes)
    rows = " ".join("S(0)" if axis in samples else "R" for axis in mesh.axes)
    for options in CROSS_ENTROPY:
        options = dict(options)
        weight = torch.rand(shape[1], generator=generator, dtype=torch.float64) if options.pop("weighted") else None
        seen = logits if options["label_smoothing"] else hide(logits, target)
        whole = seen.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, weight, **options)
        upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        expected.backward(upstream)
        local = part(seen, both, mesh)
        loss = rt.cross_entropy(
            local, part(target, rows, mesh), weight=weight, num_classes=shape[1], reduction_axes=samples,
            class_axes=classes, **options,
        )  # fmt: skip
        if options["reduction"] == "none":
            loss.backward(part(upstream, rows, mesh).detach())
            check(loss, expected, rows, mesh)
        else:
            for axis in samples:
                loss = redistribute(loss, axis, "P -> I")
            loss.backward(upstream)
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        check(local.grad, whole.grad, both, mesh)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"dp": 2}, (8, 5)),
        ({"tp": 4}, (6, 5)),
        ({"tp": 4}, (3, 9, 2)),
        ({"dp": 2, "tp": 2}, (7, 5)),
        ({"tp_outer": 2, "tp": 2}, (4, 7)),
    ],
)
def test_cross_entropy(rank_pool: Callable[[int], RankPool], sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    rank_pool(int(torch.tensor(list(sizes.values())).prod())).run(cross_entropies, sizes, shape)


def all_ignored(rank: int, world: int) -> None:
    mesh = rt.make_rank_mesh({"dp": 2})
    local = torch.ones(3, 4, requires_grad=True)
    loss = rt.cross_entropy(local, torch.full((3,), -100), reduction_axes=mesh.axes, num_classes=4)
    loss = redistribute(loss, mesh["dp"], "P -> I")
    assert loss.isnan()


def test_all_targets_ignored_is_nan_as_in_torch(rank_pool: Callable[[int], RankPool]) -> None:
    assert F.cross_entropy(torch.ones(3, 4), torch.full((3,), -100)).isnan()
    rank_pool(2).run(all_ignored)


def low_precision(rank: int, world: int) -> None:
    """bf16 logits over split classes: as close to the float64 loss as torch's own bf16 loss is."""
    mesh = rt.make_rank_mesh({"tp": 2})
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(64, 512, generator=generator) * 4).bfloat16()
    target = torch.randint(512, (64,), generator=generator)
    exact = F.cross_entropy(logits.double(), target, reduction="sum")
    loss = rt.cross_entropy(part(logits, "S(1)", mesh), target, class_axes=mesh.axes, num_classes=512, reduction="sum")
    assert abs(loss.double() - exact) <= 2 * 2**-8 * exact


def test_cross_entropy_in_bf16(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(low_precision)


def embeddings(rank: int, world: int) -> None:
    mesh = rt.make_rank_mesh({"a": 2, "b": 2})
    generator = torch.Generator().manual_seed(0)
    for rows, axes, placement in (
        (7, mesh.axes, "S(0) S(0)"),
        (8, (mesh["b"],), "R S(0)"),
        (3, mesh.axes, "S(0) S(0)"),
    ):
        for padding in (-1, 1):
            whole = torch.randint(-9, 9, (rows, 5), generator=generator).double().requires_grad_()
            ids = torch.randint(rows, (4, 3), generator=generator)
            expected = F.embedding(ids, whole, padding_idx=None if padding < 0 else padding)
            upstream = torch.randint(-9, 9, expected.shape, generator=generator).double()
            expected.backward(upstream)
            local = part(whole, placement, mesh)
            found = rt.embedding(ids, local, axes, rows, padding_idx=padding)
            for axis in axes:
                found = redistribute(found, axis, "P -> I")
            found.backward(upstream)
            assert torch.equal(found, expected)
            check(local.grad, whole.grad, placement, mesh)


def test_embedding_with_split_rows(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(embeddings)


def batch_norms(rank: int, world: int, shape: tuple[int, ...], placement: str) -> None:
    mesh = rt.make_rank_mesh({"a": 2, "b": world // 2})
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    whole, weight, bias = draw(*shape).requires_grad_(), draw(3).requires_grad_(), draw(3).requires_grad_()
    running = draw(3), draw(3).abs()
    expected_running = running[0].clone(), running[1].clone()
    expected = F.batch_norm(whole, *expected_running, weight, bias, True, 0.3, 1e-5)
    upstream = draw(*shape)
    expected.backward(upstream)
    local, w, b = part(whole, placement, mesh), part(weight, "R R", mesh), part(bias, "R R", mesh)
    count = whole.numel() // 3
    found, _, _, mean, var = rt.batch_norm(local, w, b, *running, 0.3, 1e-5, mesh.axes, count)
    found.backward(part(upstream, placement, mesh).detach())
    check(found, expected, placement, mesh)
    check(local.grad, whole.grad, placement, mesh)
    for leaf, original in ((w, weight), (b, bias)):
        assert leaf.grad is not None
        check(summed(leaf.grad, mesh), original.grad, "R R", mesh)
    check(mean, expected_running[0], "R R", mesh)
    check(var, expected_running[1], "R R", mesh)


def summed(summand: Tensor, mesh: rt.RankMesh) -> Tensor:
    for axis in mesh.axes:
        summand = redistribute(summand, axis, "P -> I")
    return summand


@pytest.mark.parametrize(
    ("world", "shape", "placement"),
    [
        (2, (7, 3, 2), "S(0) R"),
        (4, (7, 3, 2), "S(0) S(0)"),
        (4, (2, 3, 5, 3), "S(2) S(3)"),
        (4, (3, 3, 5), "S(0) S(2)"),
    ],
)
def test_batch_norm_over_shards(
    rank_pool: Callable[[int], RankPool], world: int, shape: tuple[int, ...], placement: str
) -> None:
    rank_pool(world).run(batch_norms, shape, placement)


def low_precision_statistics(rank: int, world: int) -> None:
    """Sums of bf16 values are those of float32: a mean of ones over many rows stays one."""
    mesh = rt.make_rank_mesh({"dp": 2})
    x = torch.ones(600, 1).bfloat16()
    x[0] = 3
    found, mean, *_ = rt.batch_norm(x, None, None, None, None, 0.1, 1e-5, mesh.axes, 1200)
    assert found.dtype == torch.bfloat16 and mean.dtype == torch.float32
    torch.testing.assert_close(mean, torch.tensor([(1200 + 4) / 1200]))


def test_statistics_in_bf16(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(low_precision_statistics)


def means(rank: int, world: int) -> None:
    mesh = rt.make_rank_mesh({"dp": world})
    whole = torch.arange(30.0).view(5, 6)
    local = part(whole, "S(0)", mesh)
    found = redistribute(rt.mean(local, [0], False, 5), mesh["dp"], "P -> I")
    found.sum().backward()
    torch.testing.assert_close(found, whole.mean(0))
    check(local.grad, torch.full((5, 6), 1 / 5), "S(0)", mesh)


def test_mean_over_a_split_dim(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(4).run(means)


def masks(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    mesh = rt.make_rank_mesh({"a": 2, "b": 2})
    rt.seed_dropout(3)
    rt.set_exact_dropout(False)
    randomness.begin_pass(0, 0)  # ranks that ran stages before are in passes of these
    x = torch.ones(40, 5)
    equal, apart = rt.dropout(x, 0.5), rt.dropout(x, 0.5, (mesh["a"],))
    rt.seed_dropout(3)
    rt.set_exact_dropout(True)
    exact, kept = rt.native_dropout(x[:10], 0.25, mesh.axes, shape=(40, 5), placement="S(0) S(0)")
    rt.set_exact_dropout(False)
    assert torch.equal(exact != 0, kept)
    return equal, apart, exact


def test_masks_are_equal_or_apart_as_the_axes_say(rank_pool: Callable[[int], RankPool]) -> None:
    equal, apart, exact = zip(*rank_pool(4).run(masks), strict=True)
    assert all(torch.equal(mask, equal[0]) for mask in equal)
    assert torch.equal(apart[0], apart[1]) and torch.equal(apart[2], apart[3])
    assert not torch.equal(apart[0], apart[2])
    rt.seed_dropout(3)
    rt.set_exact_dropout(True)
    whole, _ = rt.native_dropout(torch.ones(40, 5), 0.25, (), shape=(40, 5), placement="")
    rt.set_exact_dropout(False)
    assert torch.equal(torch.cat(exact), whole)


def test_reference_dropout_draws_the_exact_masks() -> None:
    x = torch.randn(6, 4)
    with rt.reference_dropout(seed=5):
        expected = torch.nn.Dropout(0.3)(x), F.dropout(x, 0.2, training=False), F.dropout(x, 0.9)
    rt.seed_dropout(5)
    from autopar.runtime import randomness

    randomness.begin_step()
    rt.set_exact_dropout(True)
    found = rt.dropout(x, 0.3, (), (6, 4), ""), x, rt.dropout(x, 0.9, (), (6, 4), "")
    rt.set_exact_dropout(False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("lies", ["in order", "transposed", "channels last", "in part"])
def test_reference_dropout_draws_what_torch_draws_however_the_input_lies(lies: str) -> None:
    """Masks of a tensor whose memory has another order were drawn in the order of its dims: DPT's auxiliary head."""
    x = torch.ones(2, 6, 4, 8)
    x = {
        "in order": x,
        "transposed": x.transpose(1, 3),
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "in part": x.permute(0, 3, 1, 2)[:, ::2],
    }[lies]
    torch.manual_seed(5)
    expected = F.dropout(x, 0.4)
    with rt.reference_dropout(seed=5):
        found = F.dropout(x, 0.4)
    assert torch.equal(found, expected)


def test_recomputing_draws_the_same_masks() -> None:
    x = torch.randn(50, requires_grad=True)
    rt.seed_dropout(1)
    y = rt.recomputed(lambda v: rt.dropout(v.exp(), 0.5).sin(), x)
    rt.dropout(x, 0.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    rt.seed_dropout(1)
    (expected,) = torch.autograd.grad(rt.dropout(x.exp(), 0.5).sin().sum(), x)
    assert torch.equal(gradient, expected)


def test_recomputing_draws_the_same_masks_in_exact_mode() -> None:
    """The block's second run goes back to where the generator was, and the draws after it go on."""
    x = torch.randn(50, requires_grad=True)

    def noisy(v: Tensor) -> Tensor:
        return rt.dropout(v.exp(), 0.5, (), (50,), "").sin() * rt.draw(torch.rand_like, v)

    found = []
    for run in (noisy, lambda v: rt.recomputed(noisy, v)):
        rt.set_exact_dropout(True)
        rt.seed_dropout(1)
        y = run(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        found.append((y.detach(), gradient, rt.draw(torch.rand, 3)))
        rt.set_exact_dropout(False)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class OfMicrobatch(rt.Block):
    def forward(self, x: Tensor) -> Tensor:
        return (x * (1.0 + self.microbatch)).exp() * self.count


def test_recomputing_goes_back_to_its_microbatch_and_leaves_what_runs_as_it_was() -> None:
    """Between the forward and the backward pass of a microbatch, a pipeline runs others."""
    block = OfMicrobatch(rt.make_rank_mesh({}, device=torch.device("cpu")))
    progress, x = block.mesh.progress, torch.randn(5, requires_grad=True)
    progress.microbatch, progress.count = 2, 4.0
    y = rt.recomputed(block, x)
    progress.microbatch, progress.count = 5, 7.0
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 3.0 * (3.0 * x.detach()).exp() * 4.0)
    assert (progress.microbatch, progress.count, progress.is_again) == (5, 7.0, False)
