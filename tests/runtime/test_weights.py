"""Hugging Face's files: each rank reads and writes its slices, whatever the plan packs and cuts; all or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.program import load_source
from autopar.runtime.weights import initial, loading, saving
from tests.rank_pool import RankPool
from tests.runtime import test_packed_state as packed
from tests.runtime.test_checkpoint import FOUR, SHAPES, TWO, program

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 51,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
PLANS = {"tp": {"tp": 2}, "zero3": {"dp": 2, "zero": 3}, "stages": {"pp": 2, "microbatches": 2}}


def qwen() -> Any:
    """Biases, tied embeddings, an uneven vocabulary."""
    torch.manual_seed(1)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(tie_word_embeddings=True, **SIZES))


def mixtral() -> Any:
    """Experts that the model stacks and files have one by one."""
    torch.manual_seed(2)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **SIZES))


def text() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"input_ids": torch.randint(51, (4, 8)), "labels": torch.randint(51, (4, 8))}


def source(model: nn.Module, **choices: Any) -> str:
    """The program of a template's plan, without the model's weights."""
    world = choices.get("dp", 1) * choices.get("tp", 1) * choices.get("pp", 1)
    mesh = autopar.Mesh("cpu", devices_per_node=world)
    plan = autopar.template_plan(model, mesh, text(), **choices)
    return autopar.parallelize(model, mesh, text(), plan=plan).source


def there_and_back(
    number: int, world: int, text: str, given: Path, out: Path, options: dict[str, Any], saving: dict[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """Loads files and writes others; the whole weights between, and what was told."""
    rank = rt.build(load_source(text).Program)
    told = rank.load_safetensors(given, **options)
    rank.save_safetensors(out, **saving)
    return rank.full_state_dict(), str(told)


@pytest.mark.sampled(only=("tp",))
@pytest.mark.parametrize("plan", PLANS)
def test_a_saved_model_is_loaded_in_slices_and_written_as_it_was(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, plan: str
) -> None:
    model = qwen()
    model.save_pretrained(tmp_path / "given", max_shard_size="20KB")
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 2
    args = (source(model, **PLANS[plan]), tmp_path / "given", tmp_path / "out", {}, {"max_shard_bytes": 20_000})
    for state, told in rank_pool(2).run(there_and_back, *args):
        assert told == f"loaded {len(dict(model.named_parameters()))} tensors from {tmp_path / 'given'}"
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
    model.config.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    batch = text()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 22_000
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.sampled(only=("tp",))
@pytest.mark.parametrize("plan", ["tp", "stages"])
def test_experts_one_by_one_in_files_are_stacked_in_the_model(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, plan: str
) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "given")
    keys = load_file(tmp_path / "given" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in keys
    args = (source(model, **PLANS[plan]), tmp_path / "given", tmp_path / "out", {}, {})
    for state, _ in rank_pool(2).run(there_and_back, *args):
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == keys.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in keys.items())


def in_metas_order(weight: Tensor, head: int) -> Tensor:
    """Hugging Face's rows of queries or keys as Meta has them: feature j of the second half behind j of the first."""
    pairs = weight.view(-1, 2, head // 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def test_metas_names_come_with_rows_in_rotary_pairs(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    meta = {
        "tok_embeddings.weight": own["model.embed_tokens.weight"], "norm.weight": own["model.norm.weight"],
        "output.weight": own["lm_head.weight"], "rope.freqs": torch.ones(4),
    }  # fmt: skip
    for n in range(2):
        there, here = f"layers.{n}.", f"model.layers.{n}."
        meta[there + "attention_norm.weight"] = own[here + "input_layernorm.weight"]
        meta[there + "ffn_norm.weight"] = own[here + "post_attention_layernorm.weight"]
        for a, b in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            meta[f"{there}feed_forward.{a}.weight"] = own[f"{here}mlp.{b}_proj.weight"]
        for a in "qkvo":
            weight = own[f"{here}self_attn.{a}_proj.weight"]
            meta[f"{there}attention.w{a}.weight"] = in_metas_order(weight, 8) if a in "qk" else weight
    (tmp_path / "given").mkdir()
    save_file(meta, tmp_path / "given" / "consolidated.safetensors")
    (tmp_path / "given" / "params.json").write_text(json.dumps({"dim": 32, "n_heads": 4}))
    args = (source(model, dp=2, zero=3), tmp_path / "given", tmp_path / "out", {"layout": "meta"}, {})
    for state, _ in rank_pool(2).run(there_and_back, *args):
        assert all(torch.equal(state[name], tensor) for name, tensor in own.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == meta.keys() - {"rope.freqs"}
    assert all(torch.equal(tensor, meta[name]) for name, tensor in written.items())


def laid_out(number: int, world: int, axes: dict[str, int], stored: dict[str, str], given: Path, out: Path) -> Any:
    rank = rt.build(program(axes, stored))
    rank.load_safetensors(given)
    rank.save_safetensors(out)
    return rank.full_state_dict()


@pytest.mark.parametrize(("axes", "stored"), [({"a": 2, "b": 2}, FOUR), ({"a": 2}, TWO)], ids=["four", "two"])
def test_uneven_shards_buffers_and_scalars(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, axes: dict[str, int], stored: dict[str, str]
) -> None:
    torch.manual_seed(5)
    tensors = {f"inner.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    tensors |= {"inner.frozen": torch.randn(6), "inner.idle": torch.randn(6), "table": torch.randn(5)}
    tensors |= {"calls": torch.tensor(3)}
    (tmp_path / "given").mkdir()
    save_file(tensors, tmp_path / "given" / "model.safetensors")
    world = 4 if len(axes) == 2 else 2
    for state in rank_pool(world).run(laid_out, axes, stored, tmp_path / "given", tmp_path / "out"):
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def packed_there_and_back(number: int, world: int, layout: str, given: Path, out: Path) -> dict[str, Tensor]:
    rank = rt.build(packed.LAYOUTS[layout][1])
    rank.load_safetensors(given)
    rank.save_safetensors(out)
    return rank.full_state_dict()


@pytest.mark.parametrize("layout", packed.LAYOUTS)
def test_packed_split_and_transposed_parameters(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, layout: str
) -> None:
    tensors = {name: tensor.clone() for name, tensor in packed.start().items() if name != "again"}
    (tmp_path / "given").mkdir()
    save_file(tensors, tmp_path / "given" / "model.safetensors")
    for state in rank_pool(packed.LAYOUTS[layout][0]).run(
        packed_there_and_back, layout, tmp_path / "given", tmp_path / "out"
    ):
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


# Refusals, on one device ----------------------------------------


def given(folder: Path, **changes: Tensor | None) -> Path:
    """Files of the program of one rank, with some tensors changed or left out."""
    tensors: dict[str, Any] = dict(packed.start())
    del tensors["again"]
    tensors |= {f"inner.{name}": tensor for name, tensor in changes.items()}
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}, folder / "w.safetensors"
    )
    return folder


def built() -> rt.Rank:
    rank = rt.build(packed.LAYOUTS["merged on 1"][1])
    rank.load_full_state_dict(packed.start())
    return rank


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"q": None}, "missing in the files: inner.q; rename="),
        ({"other": torch.ones(2)}, "unexpected in the files: inner.other; strict=False"),
        ({"c": torch.ones(6, 10)}, r"inner.c: expected \(6, 11\), found \(6, 10\) of inner.c"),
        ({"s": torch.ones(13, dtype=torch.float64)}, "inner.s: expected float32, found float64; convert=True"),
        ({"s": torch.ones(13, dtype=torch.int64)}, "inner.s: expected float32, found int64; convert=True"),
    ],
)
def test_what_does_not_belong_is_refused_with_nothing_loaded(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    rank = built()
    folder = given(tmp_path, m=torch.zeros(5, 9), **changes)
    with pytest.raises(rt.ProgramError, match=told):
        rank.load_safetensors(folder)
    torch.testing.assert_close(rank.full_state_dict(), packed.start(), rtol=0, atol=0)


def test_conversions_and_what_is_left_out_are_told(tmp_path: Path) -> None:
    rank = built()
    half = torch.randn(7, 5).bfloat16()
    folder = given(tmp_path, q=half, c=torch.ones(6, 11).double(), k=None, other=torch.ones(1))
    told = rank.load_safetensors(folder, strict=False, convert=True)
    assert str(told) == (
        f"loaded 8 tensors from {folder}; 1 of them converted from bfloat16 to float32; 1 of them converted from "
        "float64 to float32; not in the files, left as they were: inner.k; in the files alone: inner.other"
    )
    state = rank.full_state_dict()
    assert torch.equal(state["inner.q"], half.float())
    assert torch.equal(state["inner.k"], packed.start()["inner.k"])


def test_files_that_are_cut_off_or_lack_one_another_are_refused(tmp_path: Path) -> None:
    rank = built()
    path = given(tmp_path) / "w.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(rt.ProgramError, match="expected a whole safetensors file"):
        rank.load_safetensors(path)
    with pytest.raises(rt.ProgramError, match="no such folder"):
        rank.load_safetensors(tmp_path / "nowhere")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"inner.q": "lost.safetensors"}}))
    with pytest.raises(rt.ProgramError, match=r"expected the file .*lost.safetensors"):
        rank.load_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"inner.q": "../w.safetensors"}}))
    with pytest.raises(rt.ProgramError, match="expected files beside"):
        rank.load_safetensors(tmp_path)
    torch.testing.assert_close(rank.full_state_dict(), packed.start(), rtol=0, atol=0)


def test_a_failure_while_reading_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = built()
    reads = iter(range(5))

    def fails(*args: Any) -> Tensor:
        if next(reads) == 4:
            raise rt.ProgramError("a disk went away")
        return read(*args)

    read = loading.read_region
    monkeypatch.setattr(loading, "read_region", fails)
    with pytest.raises(rt.ProgramError, match="a disk went away"):
        rank.load_safetensors(given(tmp_path))
    assert all(tensor.isnan().all() for tensor in rank.full_state_dict().values())


def test_names_with_another_prefix_are_found_and_two_as_good_are_not_guessed(tmp_path: Path) -> None:
    rank = built()
    tensors = {name.removeprefix("inner."): x.clone() for name, x in packed.start().items() if name != "again"}
    save_file(tensors, tmp_path / "model.safetensors")
    rank.load_full_state_dict({name: torch.zeros_like(x) for name, x in packed.start().items()})
    rank.load_safetensors(tmp_path)
    torch.testing.assert_close(rank.full_state_dict(), packed.start(), rtol=0, atol=0)
    two = {f"{tower}.{name}": x.clone() for tower in ("text", "image") for name, x in packed.start().items()}
    save_file(two, tmp_path / "model.safetensors")
    with pytest.raises(rt.ProgramError, match=r'9 of the model\'s tensors as "text…" and as many as "image…"|rename='):
        rank.load_safetensors(tmp_path)
    rank.load_safetensors(tmp_path, rename=lambda name: f"text.{name}", strict=False)


def test_tied_tensors_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    rank = built()
    folder = given(tmp_path)
    tensors = load_file(folder / "w.safetensors")
    save_file({**tensors, "again": tensors["inner.k"] + 1}, folder / "w.safetensors")
    with pytest.raises(rt.ProgramError, match="since the model ties them"):
        rank.load_safetensors(folder)
    save_file({**tensors, "again": tensors["inner.k"].clone()}, folder / "w.safetensors")
    rank.load_safetensors(folder)


def test_a_write_that_ends_midway_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = built()
    writes = iter(range(4))

    def fails(*args: Any) -> None:
        if next(writes) == 3:
            raise OSError("no space left")
        write(*args)

    write = saving._write_all
    monkeypatch.setattr(saving, "_write_all", fails)
    with pytest.raises(rt.ProgramError, match="no space left"):
        rank.save_safetensors(tmp_path, max_shard_bytes=200)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(saving, "_write_all", write)
    rank.save_safetensors(tmp_path, dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["inner.q"].dtype == torch.float16
    with pytest.raises(rt.ProgramError, match="expected a folder without weights"):
        rank.save_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dtype": torch.int32}, r"floating-point type .* found torch.int32"),
        ({"dtype": "bfloat16"}, "found 'bfloat16'"),
        ({"max_shard_bytes": 0}, "max_shard_bytes from 1 up, found 0"),
        ({"rename": {"inner.k": "inner.v"}}, r"one place .* found inner.k, inner.v in inner.v .*; rename="),
        ({"rename": lambda name: None}, r"expected rename= to give what the files call .*, found None"),
    ],
)
def test_what_would_lose_weights_is_not_written(tmp_path: Path, asked: dict[str, Any], told: str) -> None:
    """Numbers would be cut to whole ones, or one tensor written over another."""
    with pytest.raises(rt.ProgramError, match=told):
        built().save_safetensors(tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


# The model's own first values ----------------------------------------


class Plain(nn.Module):
    """Modules of torch with `reset_parameters`, one of whose parameters another module sets again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 12, padding_idx=0)
        self.inner = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 51, bias=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.head.weight[7:9].mul_(0.5)
            self.inner[0].weight.add_(self.inner[2].weight.t() * 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.inner(self.embedding(input_ids)).flatten(0, 1)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), labels.flatten())


def started(number: int, world: int, text: str, model: nn.Module, held: int) -> dict[str, Tensor]:
    initial.HELD_BYTES = held
    rank = rt.build(load_source(text).Program)
    rank.init_weights(model, seed=11)
    return rank.full_state_dict()


@pytest.mark.sampled
@pytest.mark.parametrize("held", [0, 1 << 20], ids=["one tensor at a time", "all"])
@pytest.mark.parametrize("plan", ["zero3", "stages"])
@pytest.mark.parametrize("make", [qwen, Plain])
def test_meta_models_start_as_on_one_device(
    rank_pool: Callable[[int], RankPool], plan: str, make: Callable[[], Any], held: int
) -> None:
    with torch.device("meta"):
        model = make()
    if plan == "stages" and make is Plain:
        plan = "tp"
    one = deepcopy(model).to_empty(device="cpu")
    torch.manual_seed(11)
    if make is Plain:
        one.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    else:
        one.init_weights()
    expected = one.state_dict()
    for state in rank_pool(2).run(started, source(model, **PLANS[plan]), model, held):
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


def test_what_nobody_sets_is_refused() -> None:
    rank = rt.build(packed.LAYOUTS["separate on 1"][1])
    with torch.device("meta"):
        model = nn.Module()
        model.inner = nn.Module()
        for name, shape in packed.SHAPES.items():
            model.inner.register_parameter(name, nn.Parameter(torch.empty(shape)))
    with pytest.raises(rt.ProgramError, match=r"found none for inner.a, inner.b, .*reset_parameters"):
        rank.init_weights(model)
    rank.init_weights(model, init=lambda given: [x.fill_(2.0) for x in given.parameters()])
    assert all((tensor == 2).all() for tensor in rank.full_state_dict().values())
    with pytest.raises(rt.ProgramError, match="work on each tensor by itself"):
        rank.init_weights(model, init=lambda given: given.inner.q.fill_(given.inner.k.sum().to("meta").item()))
    with pytest.raises(rt.ProgramError, match="expected a model on the meta device"):
        rank.init_weights(nn.Linear(2, 2))
