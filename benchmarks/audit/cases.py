"""The configurations in tests/auditing/configs: where each comes from, on which devices it is audited, and what is
expected of it by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CONFIGS, MODELS = ROOT / "tests/auditing/configs", ROOT / "tests/auditing/models"
_TITAN, _MEGATRON, _NANOTRON = "pytorch/torchtitan", "NVIDIA/Megatron-LM", "huggingface/nanotron"
_ACCELERATE, _DEEPSPEED, _TRANSFORMERS = (
    "huggingface/accelerate",
    "microsoft/DeepSpeedExamples",
    "huggingface/transformers",
)
_RECIPES = "torchtitan/models/llama3/train_configs"


class AuditCase(NamedTuple):
    """source: repository, path and first digits of the commit. model: of tests/auditing/models; given: what the file
    leaves to a script. expected: the verdict, without a search (refused: with what has to be said beside it), and
    by_hand how it was arrived at: bytes a device in the terms 18 bytes a parameter (weights of 4, gradient 4, Adam 8,
    bf16 copy 2) over the ranks that share them, and activations of 34 bytes × hidden × tokens a layer, 2 where it is
    computed again."""

    file: str
    source: str
    mesh: str
    expected: str
    by_hand: str
    model: str = ""
    given: dict[str, Any] = {}  # noqa: RUF012  (of a NamedTuple, never changed)

    @property
    def path(self) -> Path:
        return CONFIGS / self.file

    @property
    def model_path(self) -> Path | None:
        return MODELS / f"{self.model}.json" if self.model else None


_SEQ_4K = {"seq_len": 4096}

CASES = (
    AuditCase("torchtitan_llama3_8b.toml", f"{_TITAN} {_RECIPES}/llama3_8b.toml 01424cb2", "a100:8x8", "fits",
              "8 G × 18 / 64 = 2 GB; 32 layers × 8,192 × 4,096 × ~20 = 21 GB; logits of 4.2 GB, a few times"),
    AuditCase("torchtitan_llama3_70b.toml", f"{_TITAN} {_RECIPES}/llama3_70b.toml 038d5fd1", "a100:8x8", "fits",
              "70.6 G × 18 / 64 = 20 GB; 80 × 65,536 tokens × 8,192 × 2 / 8 = 11 GB; logits / 8: 4.2 GB, twice"),
    AuditCase("torchtitan_llama3_405b.toml", f"{_TITAN} {_RECIPES}/llama3_405b.toml 01424cb2", "h100:16x8", "fits",
              "406 G × 18 / 128 = 57 GB; 126 × 16,384 × 16,384 × 2 / 8 = 8.5 GB; two gathered layers 1.6 GB: 67 of 80"),
    AuditCase("torchtitan_llama3_debug.toml", f"{_TITAN} {_RECIPES}/debug_model.toml 026cb7ea", "h100:8", "fits",
              "6 layers of 256: less than 1 GB"),
    AuditCase("torchtitan_llama3_70b_8xb200.toml", f"{_TITAN} configs/llama3_70b-8xb200-8k.toml 25079f11", "b200:8",
              "fits", "all in bf16: 70.6 G × 8 / 8 = 71 GB; 80 × 49,152 × 8,192 × 2 = 64 GB; logits of 49,152 × "
              "128,256 × 4 = 25 GB, and a copy or two: 160 to 190 of 192 GB, so the recipe takes 6 and not 8"),
    AuditCase("megatron_gpt3_175b.sh", f"{_MEGATRON} examples/gpt3/train_gpt3_175b_distributed.sh 157006d6", "a100:1x8",
              "illegal", "tp 8 × pp 16 = 128 ranks; the script says one node of 8"),
    AuditCase("megatron_gpt3_175b.sh", f"{_MEGATRON} examples/gpt3/train_gpt3_175b_distributed.sh 157006d6",
        "a100:128x8",
              "fits", "175 G × 18 / 128 = 25 GB; 6 layers × 16 in flight × 2,048 × 12,288 × (10 + 24 / 8) = 31 GB"),
    AuditCase("megatron_llama3_8b_fp8.sh", f"{_MEGATRON} examples/llama/train_llama3_8b_h100_fp8.sh 157006d6", "h100:8",
              "does not fit",
              "8 G × (6 + 12 / 8) = 60 GB; 32 × 8,192 × 4,096 × 34 = 36 GB in bf16: 96 of 80 GB (in fp8, "
              "which no plan carries, activations and weights are smaller)"),
    AuditCase("megatron_mixtral.sh", f"{_MEGATRON} examples/mixtral/train_mixtral_8x7b_distributed.sh 0a40979e",
        "h100:2",
              "fits", "two layers of 256 with two experts"),
    AuditCase("megatron_gpt_config.yaml", f"{_MEGATRON} examples/gpt3/gpt_config.yaml 07659f9f", "h100:8", "fits",
              "0.4 G × 18 = 7 GB; 24 × 8,192 × 1,024 × 34 = 7 GB; logits of 8,192 × 32,000 × 10 = 2.6 GB"),
    AuditCase("nanotron_tiny_llama.yaml", f"{_NANOTRON} examples/config_tiny_llama.yaml 09fd0ece", "h100:8", "fits",
              "two layers of 16; dp 2 × pp 2 × tp 2 = 8"),
    AuditCase("nanotron_llama3_2_3b.yaml", f"{_NANOTRON} examples/config_llama3.2-3B.yaml 1e31cb96", "h100:4",
              "does not fit", "3.2 G × 18 / 2 = 29 GB; 28 × 16,384 × 3,072 × (10 + 24 / 2) = 31 GB; logits of 16,384 × "
              "64,128 × 10 = 11 GB, and gathered ones: 71 GB and more, beside the allocator's and NCCL's: about 80"),
    AuditCase("nanotron_qwen.yaml", f"{_NANOTRON} examples/config_qwen.yaml 00708b80", "h100:2", "fits",
              "12 layers of 256; logits of 24,576 × 24,576 × 10 = 6 GB"),
    AuditCase("nanotron_doremi_2_8b.yaml", f"{_NANOTRON} examples/doremi/configs/config_2.8b_llama.yaml 37f35dd6",
              "h100:2x8", "does not fit",
              "2.4 G × 18 / 2 = 22 GB; 6 layers × 65,536 tokens × 4,096 × 34 / 2 = 27 GB and "
              "65,536 × 24,576 × 8 / 2 = 6 GB a layer for the wide MLP; logits of 65,536 × 24,576 × 10 = 16 GB"),
    AuditCase("accelerate_fsdp.yaml", f"{_ACCELERATE} examples/config_yaml_templates/fsdp.yaml 1a6af0bd", "h100:2",
              "does not fit", "8 G × 18 / 2 = 72 GB of states, and 32 × 4,096 × 4,096 × 34 = 18 GB", "llama3_8b",
              _SEQ_4K),
    AuditCase("accelerate_multi_node.yaml", f"{_ACCELERATE} examples/config_yaml_templates/multi_node.yaml 1a6af0bd",
              "h100:2x4", "fits",
              "0.6 G × 16 = 10 GB (fp32, DDP); 28 × 4,096 × 1,024 × 68 = 8 GB; logits 2.5 GB, twice",
              "qwen3_0_6b", _SEQ_4K),
    AuditCase("accelerate_tp_hsdp.yaml",
        f"{_ACCELERATE} examples/torch_native_parallelism/configs/tp_hsdp.yaml 571ca020",
              "h100:8", "fits", "8 G × 18 / (2 × 2) = 36 GB; 32 × 4,096 × 4,096 × (10 + 24 / 2) = 12 GB; logits",
              "llama3_8b", _SEQ_4K),
    AuditCase("accelerate_cp.yaml", f"{_ACCELERATE} examples/torch_native_parallelism/configs/cp.yaml 1d57b830",
        "h100:8",
              "fits", "8 G × 18 / 8 = 18 GB (sharded over cp); 32 × 4,096 × 4,096 × 2 = 1 GB of layers",
              "llama3_8b", {"seq_len": 32768}),
    AuditCase("accelerate_nd.yaml", f"{_ACCELERATE} examples/torch_native_parallelism/configs/nd.yaml 26db67d5",
        "h100:8",
              "illegal", "4,100 tokens over cp 4 in 2 × 4 parts", "llama3_8b", {"seq_len": 4100}),
    AuditCase("deepspeed_hf_zero3.json", f"{_TRANSFORMERS} tests/deepspeed/ds_config_zero3.json 61c7ec94", "a100:8",
        "fits",
              "8 G × 18 / 8 = 18 GB, also without offloading; 32 × 4,096 × 4,096 × 34 = 18 GB; logits 2 GB, some times",
              "llama3_8b", _SEQ_4K),
    AuditCase("deepspeed_hf_zero2_bf16.json", f"{_TRANSFORMERS} tests/deepspeed/ds_config_zero2_bf16.json a9c1721f",
              "v100:8", "does not fit", "without offloading 8 G × (2 + 16 / 8) = 32 GB of 16, before any activation",
              "llama3_8b", _SEQ_4K),
    AuditCase("deepspeed_megatron_zero3.json",
              f"{_DEEPSPEED} Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_3_config.json 44be774a", "v100:2x8",
              "does not fit",
              "1.6 G × 18 / 16 = 2 GB, but 48 × 8,192 × 1,600 × 34 = 21 GB and logits of 8,192 × 50,257 × 10 "
              "= 4 GB, and as much again for gradients: about 30 of 16", "gpt2_xl", {"seq_len": 1024}),
    AuditCase("deepspeed_onebit_adam.json",
              f"{_DEEPSPEED} bing_bert/1-bit_adam/nccl/deepspeed_bsz4k_onebitadam_config_seq128_nccl.json 9904a5d8",
              "a100-40gb:8x8", "fits",
              "0.6 G × 18 = 11 GB; 28 × 2,048 × 1,024 × 34 = 2 GB; logits of 2,048 × 151,936 × 10 = 3 GB",
              "qwen3_0_6b", {"seq_len": 128}),
    AuditCase("deepspeed_autotuned_zero2.json", f"{_DEEPSPEED} autotuning/hf/dsconfigs/ds_config_fp16_z2.json f9dc4de2",
              "v100:8", "fits", "1.6 G × (2 + 16 / 8) = 6 GB; 48 × 1,024 × 1,600 × 34 = 3 GB", "gpt2_xl",
              {"seq_len": 1024}),
    AuditCase("torchtitan_qwen3_32b.toml", f"{_TITAN} torchtitan/models/qwen3/train_configs/qwen3_32b.toml a48b651c",
              "h100:8", "does not fit", "32.8 G × 18 / 8 = 74 GB; 64 × 8,192 × 5,120 × 2 = 5 GB; logits of 8,192 × "
              "151,936 × 10 = 12 GB: 91 of 80 (the recipe is for H100 of 96 GiB)"),
    AuditCase("torchtitan_qwen3_30b_a3b_offload.toml", f"{_TITAN} qwen3_30b_a3b_memory_test.toml 40714548", "h100:2x8",
              "fits", "without offloading 30.5 G × 18 / 16 = 34 GB; logits of 2,048 × 151,936 × 10 = 3 GB"),
    AuditCase("deepspeed_zero_infinity.json",
              f"{_DEEPSPEED} Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json 7d936b35", "a100:8",
              "fits", "without offloading 8 G × 18 / 8 = 18 GB; 32 × 4,096 × 4,096 × 34 = 18 GB; logits of 4,096 × "
              "128,256 × 10 = 5 GB", "llama3_8b", {"seq_len": 1024}),
    AuditCase("accelerate_fsdp2.yaml", f"{_ACCELERATE} tests/distributed/accelerate_configs/fsdp2.yaml b0e48dcb",
              "h100:2", "fits", "0.6 G × 16 / 2 = 5 GB (fp32); 28 × 4,096 × 1,024 × 68 = 8 GB; logits 2.5 GB, twice",
              "qwen3_0_6b", _SEQ_4K),
    AuditCase("accelerate_slurm_fsdp.yaml", f"{_ACCELERATE} examples/slurm/fsdp_config.yaml 6a0677cc", "a100:8", "fits",
              "8 G × 16 / 8 = 16 GB (fp32); 32 × 4,096 × 4,096 × 68 = 36 GB; logits of 4,096 × 128,256 × 12 = 6 GB",
              "llama3_8b", _SEQ_4K),
    AuditCase("accelerate_fp8.yaml", f"{_ACCELERATE} examples/config_yaml_templates/fp8.yaml 1d57b830", "h100:1",
              "fits",
              "in bf16 0.6 G × 18 = 11 GB; 28 × 4,096 × 1,024 × 34 = 4 GB; logits of 4,096 × 151,936 × 10 = 6 GB",
              "qwen3_0_6b", _SEQ_4K),
    AuditCase("accelerate_deepspeed.yaml", f"{_ACCELERATE} examples/config_yaml_templates/deepspeed.yaml 1d57b830",
              "h100:2", "fits", "the stage is in another file, which the audit names: 0.6 G × 16 = 10 GB (fp32, DDP); "
              "8 GB; logits 2.5 GB, twice", "qwen3_0_6b", _SEQ_4K),
    AuditCase("nanotron_qwen_moe.yaml", f"{_NANOTRON} examples/config_qwen_moe.yaml 596eb36d", "h100:8", "fits",
              "36 layers of 64 with four experts; logits of 12,288 × 64,128 × 10 = 8 GB"),
    AuditCase("nanotron_llama_1m_ctx.yaml", f"{_NANOTRON} examples/config_280m_llama_1m_ctx.yaml 3282c9d8", "h100:8",
              "fits", "0.3 G × 18 / 2 = 2 GB; 10 × 102,400 × (1,024 × 34 + 4,096 × 8) / 2 = 35 GB; logits of 102,400 × "
              "24,576 × 10 = 25 GB: 62 of 80"),
    AuditCase("torchtitan_deepseek_16b.toml", f"{_TITAN} configs/deepseek_16b-8xb200-8k.toml 25079f11", "b200:8",
              "refused", "attention over a latent: no decoder of the table; a module has to be given"),
    AuditCase("torchtitan_llama4_scout.toml",
              f"{_TITAN} torchtitan/models/llama4/train_configs/llama4_17bx16e.toml 48f0e6b0", "h100:8x8", "refused",
              "experts in the table of no flavor; a module has to be given"),
    AuditCase("megatron_qwen3_30b.yaml",
              "yanring/Megatron-MoE-ModelZoo model_configs/benchmarking/Qwen3-30B-A3B.yaml 17070963", "h100:4x8",
              "refused", "degrees are variables of the script that fills the file in"),
)  # fmt: skip
