"""Configurations of other frameworks become typed jobs, and every key of theirs is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.auditing.frameworks import read_file, read_text
from autopar.auditing.job import JobFile
from autopar.errors import PlanError
from benchmarks.audit.cases import CASES, CONFIGS, MODELS

READ = {
    "torchtitan_llama3_8b.toml": {
        "replicate": 1,
        "shard": None,
        "zero": 3,
        "tp": 1,
        "micro_batch": 1,
        "seq": 8192,
        "recompute": "selective",
    },
    "torchtitan_llama3_70b.toml": {
        "tp": 8,
        "sequence_parallel": True,
        "micro_batch": 8,
        "recompute": "full",
        "precision": "bf16",
    },
    "torchtitan_llama3_405b.toml": {"tp": 8, "micro_batch": 2, "compiles": True, "recompute": "full"},
    "torchtitan_llama3_debug.toml": {"recompute": "full", "recompute_every": 2, "micro_batch": 8},
    "torchtitan_llama3_70b_8xb200.toml": {"shard": 8, "precision": "bf16 alone", "compiles": True},
    "megatron_gpt3_175b.sh": {
        "nodes": 1,
        "per_node": 8,
        "tp": 8,
        "pp": 16,
        "global_batch": 1536,
        "zero": 0,
        "overlaps_sums": False,
    },
    "megatron_llama3_8b_fp8.sh": {
        "tp": 1,
        "sequence_parallel": False,
        "zero": 1,
        "global_batch": 128,
        "seq": 8192,
        "precision": "bf16",
    },
    "megatron_mixtral.sh": {"nodes": 1, "per_node": 2, "ep": 2, "zero": 1, "precision": "fp32", "micro_batch": 1},
    "megatron_gpt_config.yaml": {"nodes": None, "tp": 1, "micro_batch": 2, "global_batch": 128, "precision": "bf16"},
    "nanotron_tiny_llama.yaml": {
        "data": 2,
        "tp": 2,
        "pp": 2,
        "schedule": "1f1b",
        "sequence_parallel": True,
        "accumulation": 1,
    },
    "nanotron_llama3_2_3b.yaml": {"data": 2, "tp": 2, "sequence_parallel": False, "accumulation": 4, "micro_batch": 2},
    "nanotron_qwen.yaml": {"data": 1, "tp": 2, "sequence_parallel": True, "recompute": "none"},
    "nanotron_doremi_2_8b.yaml": {"data": 8, "tp": 2, "micro_batch": 64, "seq": 1024},
    "accelerate_fsdp.yaml": {"nodes": 1, "per_node": 2, "zero": 3, "precision": "bf16", "recompute": "none"},
    "accelerate_multi_node.yaml": {"nodes": 2, "per_node": 4, "zero": 0, "precision": "fp32"},
    "accelerate_tp_hsdp.yaml": {"replicate": 2, "shard": 2, "tp": 2, "zero": 3, "cp": 1},
    "accelerate_cp.yaml": {"cp": 8, "shard": 1, "recompute": "full"},
    "accelerate_nd.yaml": {"cp": 4, "shard": 2, "recompute": "none"},
    "deepspeed_hf_zero3.json": {"zero": 3, "precision": "bf16", "overlaps_sums": True, "micro_batch": None},
    "deepspeed_hf_zero2_bf16.json": {"zero": 2, "precision": "bf16", "global_batch": None},
    "deepspeed_megatron_zero3.json": {"zero": 3, "micro_batch": 8, "accumulation": 1},
    "deepspeed_onebit_adam.json": {"zero": 0, "micro_batch": 16, "global_batch": 4096, "optimizer": "adamw"},
    "deepspeed_autotuned_zero2.json": {"zero": 2, "micro_batch": None},
    "torchtitan_qwen3_32b.toml": {"shard": None, "zero": 3, "micro_batch": 2, "recompute": "full", "precision": "bf16"},
    "torchtitan_qwen3_30b_a3b_offload.toml": {"ep": 8, "zero": 3, "seq": 2048, "recompute": "full"},
    "torchtitan_deepseek_16b.toml": {"model": None, "shard": 8, "precision": "bf16 alone", "micro_batch": 12},
    "torchtitan_llama4_scout.toml": {"model": None, "tp": 8, "sequence_parallel": True, "recompute": "full"},
    "deepspeed_zero_infinity.json": {"zero": 3, "micro_batch": 4, "accumulation": 1, "precision": "bf16"},
    "accelerate_fsdp2.yaml": {"nodes": 1, "per_node": 2, "zero": 3, "precision": "fp32"},
    "accelerate_slurm_fsdp.yaml": {"nodes": None, "zero": 3, "recompute": "none"},
    "accelerate_fp8.yaml": {"zero": 0, "precision": "bf16"},
    "accelerate_deepspeed.yaml": {"nodes": 1, "per_node": 2, "zero": 0},
    "nanotron_qwen_moe.yaml": {"data": 4, "tp": 2, "accumulation": 8, "micro_batch": 3, "ep": 1},
    "nanotron_llama_1m_ctx.yaml": {"data": 4, "tp": 2, "zero": 1, "seq": 102400},
}
REFUSED = {
    "megatron_qwen3_30b.yaml": r"tensor-model-parallel-size as a whole number .* found '\$\{TP\}' .* line 7; put"
}
SIZES = {
    "torchtitan_llama3_8b.toml": 8.03, "torchtitan_llama3_70b.toml": 70.6, "torchtitan_llama3_405b.toml": 405.8,
    "megatron_gpt3_175b.sh": 174.6, "megatron_llama3_8b_fp8.sh": 8.03, "nanotron_llama3_2_3b.yaml": 3.21,
}  # fmt: skip
NOT_CARRIED = {
    ("torchtitan_llama3_405b.toml", "model.converters"): "no equivalent",
    ("torchtitan_llama3_70b_8xb200.toml", "optimizer.early_step_in_backward"): "no equivalent",
    ("torchtitan_llama3_8b.toml", "training.steps"): "does not matter",
    ("megatron_gpt3_175b.sh", "rampup-batch-size"): "no equivalent",
    ("megatron_gpt3_175b.sh", "tokenizer-type"): "assumed",
    ("megatron_llama3_8b_fp8.sh", "fp8-format"): "no equivalent",
    ("megatron_gpt_config.yaml", "cpu-offloading"): "does not matter",
    ("nanotron_qwen.yaml", "model.model_config.sliding_window_size"): "no equivalent",
    ("deepspeed_hf_zero3.json", "zero_optimization.offload_param.device"): "no equivalent",
    ("deepspeed_onebit_adam.json", "optimizer.type"): "no equivalent",
    ("deepspeed_megatron_zero3.json", "zero_optimization.stage3_param_persitence_threshold"): "unknown",
    ("deepspeed_zero_infinity.json", "zero_optimization.offload_optimizer.device"): "no equivalent",
    ("torchtitan_qwen3_30b_a3b_offload.toml", "training.enable_cpu_offload"): "no equivalent",
    ("torchtitan_qwen3_30b_a3b_offload.toml", "training.aggressive_memory_mode"): "unknown",
    ("torchtitan_llama4_scout.toml", "parallelism.expert_tensor_parallel_degree"): "no equivalent",
    ("torchtitan_deepseek_16b.toml", "model.flavor"): "unknown",
    ("accelerate_fp8.yaml", "mixed_precision"): "no equivalent",
    ("accelerate_deepspeed.yaml", "deepspeed_config.deepspeed_config_file"): "unknown",
}


def job_file(name: str) -> JobFile:
    return read_file(CONFIGS / name)[0]


@pytest.mark.parametrize("name", READ)
def test_a_configuration_is_read_as_it_says(name: str) -> None:
    job = job_file(name).job
    assert {key: getattr(job, key) for key in READ[name]} == READ[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_running_a_script_tells_is_asked_for(name: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[name]):
        job_file(name)


def test_every_configuration_has_a_case_and_every_case_its_source() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {*READ, *REFUSED} == {case.file for case in CASES}
    assert all(len(case.source.split()) == 3 for case in CASES)


@pytest.mark.parametrize("name", SIZES)
def test_models_have_their_published_numbers_of_parameters(name: str) -> None:
    model = job_file(name).job.model
    assert model is not None
    assert model.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.01)


@pytest.mark.parametrize(("name", "key"), NOT_CARRIED)
def test_what_is_not_carried_is_named_with_its_reason(name: str, key: str) -> None:
    found = [item for item in job_file(name).left if item.key == key]
    assert [item.kind for item in found] == [NOT_CARRIED[name, key]]
    lines = (CONFIGS / name).read_text().splitlines()
    last = key.rpartition(".")[2]
    assert not found[0].line or last.replace("-", "_") in lines[found[0].line - 1].replace("-", "_")


@pytest.mark.parametrize("text", [
    "[parallelism]\ntensor_parallel_degre = 8\n", "[parallelism]\nfoo = 1\n[training]\nlocal_batchsize = 3\n",
])  # fmt: skip
def test_a_key_that_is_misspelt_is_unknown(text: str) -> None:
    found = read_text("job.toml", text)[0]
    assert len(found.of_kind("unknown")) == text.count(" = ")


@pytest.mark.parametrize(("name", "text", "match"), [
    ("a.toml", "[parallelism]\ntensor_parallel_degree = 'x'\n", "tensor_parallel_degree as a whole number.*line 2"),
    ("a.toml", "[parallelism\n", "TOML"),
    ("a.toml", "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Mine'\n", "one of 1F1B"),
    ("a.json", "[1]", "JSON object"),
    ("a.json", '{"zero_optimization": {"stage": true}}', "stage as a whole number"),
    ("a.yaml", "parallelism: {dp: !!python/object/apply:os.system ['false']}\n", "YAML"),
    ("a.yaml", "a: 1\n", "keys of Accelerate"),
    ("a.sh", "echo 3\n", "Megatron's arguments"),
    ("a.txt", "3", "name its --framework"),
])  # fmt: skip
def test_what_is_malformed_is_refused_with_its_place(name: str, text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        read_text(name, text)


def test_sizes_of_hugging_face_models() -> None:
    from autopar.auditing.flavors import read_config

    sizes = {path.stem: read_config(path)[0] for path in MODELS.iterdir()}
    assert {name: round(one.parameters / 1e9, 2) for name, one in sizes.items()} == {
        "llama3_8b": 8.03, "gpt2_xl": 1.56, "qwen3_0_6b": 0.6}  # fmt: skip
    assert sizes["gpt2_xl"].positions == "learned" and sizes["gpt2_xl"].is_tied


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from autopar.auditing.flavors import read_config

    path = tmp_path / "config.json"
    path.write_text(
        '{"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "kv_lora_rank": 4}'
    )
    with pytest.raises(PlanError, match="multi-latent"):
        read_config(path)


EVALUATED = """N=`python3 -c "import torch"`
MOE="--num-experts 8 --moe-router-topk 2 $GROUPED"
command="torchrun --nproc_per_node $N pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 $MOE \\
  --expert-model-parallel-size ${EP:-8} --use-distributed-optimizer"
command="$command 2>&1 | tee $LOG"
eval ${command}
"""


def test_a_command_that_is_evaluated_ends_at_its_pipe_and_variables_are_no_values() -> None:
    found = read_text("a.sh", EVALUATED)[0]
    job = found.job
    assert (job.zero, job.ep, job.per_node) == (1, 8, None)
    assert job.model is not None and (job.model.experts, job.model.chosen_experts) == (8, 2)
    assert {item.key for item in found.of_kind("unknown")} >= {"a variable"}
