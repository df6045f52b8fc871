"""Whole iterations of GPUs: rows become plans, reasons are told, figures are what they are said to be."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from autopar.cost import Profile
from autopar.cost.compute import node_time_ns
from autopar.ir.graph import Graph
from autopar.ir.structure import block_paths
from autopar.profiler import load_profile
from autopar.trace import trace
from benchmarks.accuracy.gpu import decoder, predictions
from benchmarks.accuracy.gpu.__main__ import main
from benchmarks.accuracy.gpu.fitting import named_constants, values_of, with_values
from benchmarks.accuracy.gpu.plans import (
    TRACED_LENGTH,
    dense_layers,
    empty_stages,
    near_devices,
    of_length,
    of_whole_layers,
    profile_name,
    stage_layers,
    with_half_head,
)
from benchmarks.accuracy.gpu.predictions import Predicted, with_float8
from benchmarks.accuracy.gpu.rows import GRID, Row, Sizes, read_rows
from benchmarks.accuracy.gpu.scores import fast_runs, needs_no_more, of_grid, regret, spearman, summary
from benchmarks.accuracy.gpu.softwares import by_threshold, read_softwares, software_of, write_softwares

PLAIN = {
    "id": "a", "source": "tests", "framework": "Megatron-LM", "gpu": "H100-SXM5-80GB", "gpus": "2",
    "gpus_per_node": "2", "model": "mcore-test L2 h256 heads4 kv4 ffndefault", "precision": "bf16", "seq": "128",
    "micro_batch": "2.0", "global_batch": "8", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "dp": "2", "vp": "1.0",
    "sequence_parallel": "0.0", "dp_sharding": "zero1 (distributed optimizer)", "recompute": "none", "offload": "none",
    "step_time_s": "0.01",
}  # fmt: skip
COLUMNS = [*PLAIN, "other_settings", "memory_GiB", "notes", "task"]


def training_csv(path: Path, *changes: dict[str, str]) -> Path:
    """Rows that differ from a plain one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({**PLAIN, **change} for change in changes)
    return path


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"dp_sharding": "fsdp FULL_SHARD"}, "zero", 3),
        ({"dp_sharding": "fsdp SHARD_GRAD_OP"}, "zero", 2),
        ({"dp_sharding": "zero1 (distributed optimizer)"}, "zero", 1),
        ({"dp_sharding": "none (ZeRO 0)"}, "zero", 0),
        ({"dp_sharding": "fsdp over 8"}, "hsdp", 8),
        ({"dp_sharding": "per stage (weights,grads,optimizer): [[0, 0, 1], [0, 0, 1]]"}, "zero", 1),
        ({"recompute": "full/uniform/1"}, "recompute", "full"),
        ({"recompute": "not stated"}, "recompute", "none"),
        ({"recompute": "full, 5 layers a stage"}, "again", (5,)),
        ({"recompute": "checkpointed layers a stage [2, 0]"}, "again", (2, 0)),
        ({"recompute": "full/block/3"}, "again", (3,)),
        ({"recompute": "full/uniform/2"}, "recompute", "full"),
        ({"dp_sharding": "zero_optimization: stage 2"}, "zero", 2),
        ({"precision": "tf32"}, "precision", "tf32"),
        ({"precision": "fp32 (TF32 possible)"}, "precision", "fp32"),
        ({"precision": "bf16 + float8"}, "precision", "fp8"),
        ({"other_settings": "torch.compile; foreach"}, "is_compiled", True),
        ({"other_settings": "no torch.compile"}, "is_compiled", False),
        ({"precision": "amp_bf16"}, "precision", "bf16"),
        ({"precision": "fp8 (per-tensor current scaling)"}, "precision", "fp8"),
        ({"other_settings": "layers a stage [3, 5]", "pp": "2", "dp": "1"}, "layers", (3, 5)),
    ],
)
def test_what_columns_say(tmp_path: Path, change: dict[str, str], field: str, value: object) -> None:
    (row,) = read_rows(training_csv(tmp_path / "rows.csv", change))
    assert getattr(row, field) == value
    assert not row.unknown


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "something-7b"}, "no sizes known of the model 'something-7b'"),
        ({"micro_batch": ""}, "micro_batch"),
        ({"tp": "1/2"}, "tp: expected one number"),
        ({"dp_sharding": "a new kind"}, "dp_sharding"),
        ({"recompute": "per operator"}, "recompute"),
        ({"gpus": "4"}, "4 GPUs are not dp × tp × pp × cp"),
        ({"global_batch": "7"}, "not of whole micro batches"),
        ({"dp": "3", "gpus": "3", "global_batch": "12"}, "3 GPUs are not whole nodes of 2"),
        ({"step_time_s": ""}, "step_time_s ''"),
        ({"step_time_s": "0"}, "expected a positive number, found '0'"),
        ({"model": "mcore-test L2 h256 heads0 kv0 ffndefault"}, "model 'mcore-test L2 h256 heads0 kv0 ffndefault'"),
        ({"offload": "ratios 0.5"}, "offload"),
    ],
)
def test_what_is_not_understood_is_told(tmp_path: Path, change: dict[str, str], told: str) -> None:
    (row,) = read_rows(training_csv(tmp_path / "rows.csv", change))
    assert told in row.unknown


def test_what_other_columns_say_is_read_from_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(
        "id,model,gpu,gpus,micro_batch,global_batch,seq,tp,pp,precision,tokens_per_s_per_gpu\n"
        "a,mcore-test L2 h256 heads4 kv4 ffndefault,H100-SXM5-80GB,8,1,16,128,2,2,bf16,1024\n"
        "a,no such model,H100-SXM5-80GB,8,1,16,128,2,2\n",
        encoding="utf-8",
    )
    whole, other = read_rows(path)
    assert (whole.dp, whole.per_node, whole.zero, whole.measured_s) == (2, 8, 0, 16 * 128 / (1024 * 8))
    assert not whole.unknown
    assert "no sizes known" in other.unknown and "no models.csv beside the file" in other.unknown
    assert whole.id != other.id, "errors are kept by names"


def test_columns_that_are_not_there_are_told_from_values_that_are_not_understood(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("model,gpu,gpus,micro_batch,tp,precision\ngpt,H100-SXM5-80GB,8,1,,bf16\n", encoding="utf-8")
    (row,) = read_rows(path)
    assert "pp: no such column" in row.unknown and "tp: expected one number, found ''" in row.unknown


def test_a_grid_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    path.write_text(
        "model,nodes,dp,tp,pp,mbs,grad_acc,zero,tokens_s\n80B,8,8,8,1,1,4,1,1000\n2B,1,8,1,1,1,4,1,\n"
        "8B,1,8,1,1,none,4,1,1000\n8B,1,8,1,1,1,4,5,1000\n",
        encoding="utf-8",
    )
    known, model, micro_batch, zero = read_rows(path)
    assert known.measured_s == 32 * 4096 / 1000 and not known.unknown
    assert "2B" in model.unknown and model.measured_s is None
    assert "mbs: expected one number" in micro_batch.unknown and "zero: expected 0 to 3" in zero.unknown


def test_models_of_the_grid_are_of_the_size_that_they_are_called() -> None:
    for name, count in {"1B": 1.34e9, "3B": 3.57e9, "8B": 8.86e9, "80B": 80.0e9}.items():
        sizes = GRID[name]
        layer = (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.head_size * sizes.hidden + 3 * sizes.hidden * sizes.ffn
        words = sizes.vocab * sizes.hidden * (1 if sizes.is_tied else 2)
        assert words + sizes.layers * layer == pytest.approx(count, rel=0.003)


def test_a_file_of_another_form_is_refused_by_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "found ['a', 'b']" in capsys.readouterr().err


def test_what_fails_on_a_row_is_told_and_ends_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plan_of(graph: Graph, row: Row, software: object) -> object:
        if row.id == "bad":
            raise ZeroDivisionError("by nothing")
        return original(graph, row, software)

    original = predictions.plan_of
    monkeypatch.setattr(predictions, "plan_of", plan_of)
    rows = read_rows(training_csv(tmp_path / "rows.csv", {"id": "good"}, {"id": "bad"}))
    found = {item.row.id: item for item in predictions.planned(rows, read_softwares())}
    assert found["good"].plan is not None
    assert found["bad"].reason == "a mistake of this benchmark: ZeroDivisionError in plan_of: by nothing"


def test_rows_are_predicted_or_listed(tmp_path: Path) -> None:
    rows = training_csv(
        tmp_path / "rows.csv", {"id": "known"}, {"id": "framework", "framework": "a software of its own"},
        {"id": "gpu", "gpu": "MI300X"}, {"id": "ep", "ep": "2"},
        {"id": "again", "recompute": "full, 1 layers a stage"},
        {"id": "tp", "tp": "2", "dp": "1", "sequence_parallel": "1.0", "dp_sharding": "ddp"},
        {"id": "given", "gpu": "of our own"}, {"id": "stages", "pp": "8", "gpus": "8", "dp": "1", "gpus_per_node": ""},
        {"id": "experts", "model": f"{PLAIN['model']} experts4 topk2 moe_ffn", "ep": "2"},
        {"id": "slices", "model": f"{PLAIN['model']} experts4 topk2 moe_ffn", "tp": "2", "dp": "1"},
        {"id": "windows", "notes": "sliding window 128 in every other layer"},
    )  # fmt: skip
    assert main([str(rows), "--profile", "of our own=h100", "--output", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    columns, *known = written["rows"]
    assert {row[0] for row in known} == {"known", "framework", "again", "tp", "given", "experts", "slices"}
    assert all(row[columns.index("predicted_s")] > 0 and row[columns.index("predicted_GB")] > 0 for row in known)
    reasons = {name: reason for name, _, reason in written["not_predicted"]}
    assert "no profile is shipped of MI300X" in reasons["gpu"]
    assert reasons["ep"] == "ep=2: the model has no experts"
    assert "template_plan" in reasons["stages"] and "windows" in reasons["windows"]
    assert len(reasons) == 4, "every row is here or there"


# Softwares ----------------------------------------


def test_layers_are_cut_where_the_cost_goes_beyond_a_share() -> None:
    layers = [by_threshold([1.0] * 16 + [4.0], 4)[:-1].count(stage) for stage in range(4)]
    assert layers == [5, 5, 5, 1]  # 20 in all: a stage ends with the block that comes to 5, 10 and 15
    assert by_threshold([1.0, 1.0, 1.5, 1.0], 2) == [0, 0, 0, 1]


def test_nanotrons_stages_follow_its_rule() -> None:
    sizes = Sizes(16, 2048, 32, 32, 64, 8192, True, 131072, True)
    row = Row("1", "s", "nanotron", "H100-SXM5-80GB", 8, 8, "1B", sizes, "bf16", 4096, 1, 256, 2, 1, 4)
    nanotron = software_of("nanotron", read_softwares())
    assert stage_layers(row, nanotron) == (5, 5, 5, 1)  # the head costs as much as four layers
    assert not empty_stages(row, nanotron) and not empty_stages(replace(row, pp=8), nanotron)
    assert empty_stages(replace(row, pp=16), nanotron), "the head takes more than three stages' share"
    assert stage_layers(row, software_of("Megatron-LM", read_softwares())) is None


def test_every_framework_has_a_software_and_the_file_is_what_is_written(tmp_path: Path) -> None:
    softwares = read_softwares()
    assert software_of("nobody knows this one", softwares).matches == ""
    write_softwares(softwares, tmp_path / "again.json")
    assert read_softwares(tmp_path / "again.json")[0].slowdowns == softwares[0].slowdowns
    assert [item.name for item in read_softwares(tmp_path / "again.json")] == [item.name for item in softwares]


def test_a_slowdown_reaches_operators_of_the_family_that_have_a_curve_of_their_own() -> None:
    """RMS norms are known apart from others on h100, and nanotron's slowdown of norms was lost there."""
    h100, nanotron = load_profile("h100"), software_of("nanotron", read_softwares())
    twice = replace(
        nanotron, slowdowns={**nanotron.slowdowns, "normalization": 2 * nanotron.slowdowns["normalization"]}
    )
    assert "rms_norm" in h100.operators
    for family in ("normalization", "rms_norm"):
        slow, slower = (
            software.on(h100).curve(family).forward.effective_work(1 << 28) for software in (nanotron, twice)
        )
        assert slower == pytest.approx(2 * slow)


@pytest.mark.parametrize("is_llama", [False, True])
def test_a_traced_graph_of_another_length_is_the_one_traced_with_it(is_llama: bool) -> None:
    kinds = {"is_gated": True, "norm": "rms", "positions": "rotary"} if is_llama else {}
    config = decoder.Config(48, 2, 64, 4, 2, 16, 128, 256, **kinds)  # type: ignore[arg-type]
    traced, wanted = (
        trace(*decoder.build(replace(config, seq_len=length), 4), mode="train") for length in (TRACED_LENGTH, 48)
    )
    assert of_length(traced, 48).fingerprint == wanted.fingerprint


def test_layers_that_are_wrapped_have_no_blocks_inside() -> None:
    config = decoder.Config(128, 2, 64, 4, 4, 16, 256, 256)
    graph = trace(*decoder.build(config, 2))
    whole = of_whole_layers(graph)
    inside = {path for path in block_paths(whole) if path.startswith("layers")}
    assert inside == {"layers.0", "layers.1"}
    assert inside < {*block_paths(graph)}
    assert [node.op for node in whole.nodes] == [node.op for node in graph.nodes]


def test_buckets_of_megatron_grow_with_ranks_and_others_are_as_emitted() -> None:
    megatron, foundry = (software_of(name, read_softwares()) for name in ("Megatron-LM", "llm-foundry"))
    assert [megatron.bucket_bytes(ranks, 1) // 4 for ranks in (1, 40, 41, 1024)] == [
        40_000_000, 40_000_000, 41_000_000, 1_024_000_000,
    ]  # fmt: skip
    assert foundry.bucket_bytes(1024, 3) == 0


def test_constants_that_are_not_named_stay() -> None:
    softwares, profiles = read_softwares(), {name: load_profile(name) for name in ("h100", "gb200")}
    constants = named_constants(["nemo.matmul+attention", "gb200.clock", "nanotron.matmul"], ["nemo"], [*profiles])
    assert [constant.owner for constant in constants] == ["nemo", "gb200"], "no row is of nanotron"
    logs = values_of(constants, softwares, profiles)
    changed, clocked = with_values(constants, logs + math.log(2), softwares, profiles, "a test")
    before, after = (software_of("NeMo", each) for each in (softwares, changed))
    assert after.slowdowns == {name: pytest.approx(2 * value, 1e-3) for name, value in before.slowdowns.items()}
    assert (after.host, after.step_ns) == (before.host, before.step_ns)
    assert software_of("nanotron", changed) == software_of("nanotron", softwares)
    assert clocked["h100"] is profiles["h100"]
    assert clocked["gb200"].facts.sustained_clock == pytest.approx(2 * profiles["gb200"].facts.sustained_clock)


@pytest.mark.parametrize("name", ["clock", "nemo.speed", "nemo.matmul+pass_ns"])
def test_a_constant_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a constant"):
        named_constants([name], ["nemo"], ["h100"])


def test_the_head_of_a_model_trained_in_float8_stays_in_16_bits() -> None:
    """Layers take what float8's table says, the head what bfloat16's does, forward and backward."""
    config = decoder.Config(2048, 1, 4096, 32, 32, 128, 16384, 32768)
    graph = trace(*decoder.build(config, 8), mode="train", compute_dtype=torch.bfloat16)
    h100 = load_profile("h100")

    def times_ns(graph: Graph, profile: Profile, name: str) -> tuple[int, int]:
        (node,) = (node for node in graph.nodes if node.scope.module.endswith(name) and "linear" in node.op)
        shapes = ([graph.tensors[value].shape for value in values] for values in (node.operands, node.results))
        return node_time_ns(node, *map(tuple, shapes), graph.tensors, profile)  # type: ignore[arg-type]

    in_float8 = with_half_head(graph), with_float8(h100)
    assert times_ns(*in_float8, "head") == times_ns(graph, h100, "head")
    for name in ("up", "down"):
        assert sum(times_ns(*in_float8, name)) < 0.8 * sum(times_ns(graph, h100, name))


# Figures ----------------------------------------


def predicted(seconds: float, measured: float | None, **fields: object) -> Predicted:
    """Of one run of a cell; zero: of its plan, fits: what is said of it."""
    row = Row(
        "1", "grid", "nanotron", "H100-SXM5-80GB", 8, 8, "1B", None, "bf16", 4096, 1, 256, 8, 1, 1, measured_s=measured,
        zero=fields.pop("zero", 1), memory_bytes=1e9, cell="1B, 1 nodes",  # type: ignore[arg-type]
    )  # fmt: skip
    return Predicted(row, seconds, **fields)  # type: ignore[arg-type]


def test_figures_of_a_few_runs() -> None:
    runs = [predicted(1.1, 1.0), predicted(1.8, 2.0), predicted(9.0, 2.5), predicted(0.1, None)]
    assert len(fast_runs(runs)) == 2  # the third reaches less than half of the best, the last did not finish
    figures = summary(fast_runs(runs))
    assert figures["mape"] == pytest.approx(0.1)
    assert figures["worst"] == pytest.approx(0.1)
    assert figures["spearman"] == 1.0


def test_regret_is_of_plans_that_are_not_said_to_be_tight() -> None:
    runs = [predicted(1.0, 3.0), predicted(2.0, 2.0), predicted(0.5, 9.0, is_tight=True), predicted(0.1, 1.0, zero=0)]
    assert regret(runs) == pytest.approx(0.5)  # the first is taken; of the last, ZeRO-0 is not asked


def test_of_plans_that_cannot_be_told_apart_the_one_with_the_fewest_turns_is_taken() -> None:
    first, second = predicted(1.0, 3.0), predicted(1.04, 1.0)
    first = replace(first, row=replace(first.row, pp=2, dp=first.row.dp // 2))
    assert first.row.turns > second.row.turns
    assert regret([first, second]) == pytest.approx(0.0)
    assert regret([first, second], 0.0) == pytest.approx(2.0), "of the one that is predicted fastest"
    assert regret([first, predicted(1.2, 1.0)]) == pytest.approx(2.0), "which the profile can tell from it"


def test_what_may_hold_a_plan_up_counts_where_one_is_taken() -> None:
    runs = [predicted(1.0, 3.0, held_s=2.0), predicted(1.5, 1.0, held_s=0.1)]
    assert regret(runs) == pytest.approx(0.0)
    assert regret(runs, 0.0) == pytest.approx(2.0), "of the one that is predicted fastest"


@pytest.mark.parametrize(("tp", "pp", "each"), [(8, 1, 0), (8, 2, 1), (1, 4, 2), (16, 1, 2), (16, 2, 2)])
def test_ranks_wait_for_messages_between_stages_and_nodes(tp: int, pp: int, each: int) -> None:
    row = Row("1", "s", "nanotron", "H100-SXM5-80GB", 512, 8, "1B", None, "bf16", 4096, 1, 256, 512 // tp // pp, tp, pp)
    assert row.waits == row.microbatches * each


def test_more_nodes_hold_up_more_and_one_none() -> None:
    nanotron, nemo = (software_of(name, read_softwares()) for name in ("nanotron", "NeMo"))
    held = [nanotron.held_s(nodes, 4) for nodes in (1, 2, 8, 64, 4096)]
    assert held[0] == 0 and held == sorted(set(held))
    assert held[-1] == pytest.approx(4 * nanotron.held_ns / 1e9)
    assert nemo.held_s(64, 4) == 0


def test_a_grid_of_few_runs_has_figures_where_there_are_any() -> None:
    figures = of_grid([predicted(1.1, 1.0), predicted(0.1, None, fits=False)])
    assert figures["cells"] == 1
    assert math.isnan(figures["worst mape"])  # of cells of ten runs or more there is none
    assert figures["said to fit of these"] == 0


def test_a_run_is_excused_by_one_that_needs_as_much() -> None:
    sizes = Sizes(16, 2048, 32, 32, 64, 8192, True, 131072, True)
    ran = Row("1", "s", "nanotron", "H100-SXM5-80GB", 16, 8, "1B", sizes, "bf16", 4096, 2, 256, 4, 2, 2, zero=1)
    assert all(needs_no_more(replace(ran, **change), ran) for change in ({}, {"micro_batch": 1}, {"tp": 4}, {"dp": 8}))
    for change in ({"micro_batch": 4}, {"tp": 1}, {"dp": 2}, {"zero": 0}, {"pp": 1}, {"model": "3B"}):
        assert not needs_no_more(replace(ran, **change), ran), change
    assert not needs_no_more(ran, replace(ran, global_batch=8)), "two microbatches in flight where one was"


def test_ties_share_their_rank() -> None:
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman([1], [1]))


# Kernels of the decoder ----------------------------------------


def test_gated_is_swiglu_with_its_gradient() -> None:
    torch.manual_seed(0)
    made = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    plain = made.detach().clone().requires_grad_()
    decoder.gated(made).square().sum().backward()
    (F.silu(plain[..., 0]) * plain[..., 1]).square().sum().backward()
    torch.testing.assert_close(made.grad, plain.grad)


def test_squared_relu_has_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    decoder.squared_relu(x).square().sum().backward()
    F.relu(plain).square().square().sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


def test_rotation_turns_back() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True), torch.rand(3, 4, dtype=torch.float64)
    turned = decoder.rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    turned.sum().backward()
    torch.testing.assert_close(
        decoder.rotate(x.grad, angles.cos(), angles.sin()), torch.ones_like(x)  # type: ignore[arg-type]
    )  # fmt: skip


def test_each_token_passes_its_likeliest_experts_and_the_shared_one() -> None:
    torch.manual_seed(0)
    config = decoder.Config(
        seq_len=8, num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, head_size=8, mlp_size=32, vocab_size=64,
        is_gated=True, num_experts=4, chosen_experts=2, expert_size=16, shared_size=24, dense_layers=(0,),
    )  # fmt: skip
    first, second = decoder.Decoder(config).layers
    assert isinstance(first.mlp, decoder.MLP) and isinstance(second.mlp, decoder.Experts)
    experts, x = second.mlp, torch.randn(2, 8, 16)
    for weight in (experts.routed.up, experts.routed.down):
        torch.nn.init.normal_(weight, std=0.2)
    tokens = x.flatten(0, 1)
    shares, chosen = experts.routed.router(tokens).softmax(-1).topk(2)
    expected = experts.shared(x).flatten(0, 1)
    for token, (numbers, weights) in enumerate(zip(chosen, shares, strict=True)):
        for number, weight in zip(numbers, weights, strict=True):
            made = experts.routed.up[number] @ tokens[token]
            expected[token] = expected[token] + weight * (
                experts.routed.down[number] @ (F.silu(made[::2]) * made[1::2])
            )
    torch.testing.assert_close(experts(x).flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_racks_devices_are_near_as_many_as_make_equal_parts() -> None:
    row = Row("1", "s", "NeMo", "GB200", 64, 4, "tiny", None, "bf16", 128, 1, 64, 64, 1, 1)
    counts = {64: 64, 128: 64, 96: 48, 72: 72, 4: 4, 2304: 72}
    assert {gpus: near_devices(replace(row, gpus=gpus)) for gpus in counts} == counts
    assert near_devices(replace(row, gpu="H100-SXM5-80GB", per_node=8)) == 8


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("A100-SXM-40GB", "a100-40gb"), ("B300-SXM6-270GB", "b300"),
        ("GB300 NVL72", "gb300"), ("gh200", "gh200"), ("GH200-96GB", "gh200"), ("H200", "h200"), ("L40S-48GB", "l40s"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_kind_whatever_its_form(gpu: str, name: str) -> None:
    assert profile_name(gpu) == name


@pytest.mark.parametrize("gpu", ["A100-PCIe-80GB", "H100 NVL", "MI300X", "", "80GB"])
def test_a_gpu_of_another_kind_has_no_profile(gpu: str) -> None:
    with pytest.raises(ValueError, match="no profile is shipped"):
        profile_name(gpu)


def test_experts_may_be_in_every_other_layer() -> None:
    sizes = Sizes(4, 64, 4, 4, 16, 128, True, 128, True, 8, dense_layers=2)
    assert dense_layers(sizes) == (0, 1)
    assert dense_layers(replace(sizes, notes="every other layer is MoE (1 routed)")) == (0, 2)
    assert dense_layers(replace(sizes, num_experts=0)) == ()
