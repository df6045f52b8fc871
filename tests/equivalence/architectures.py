"""Architectures of the transformers library in tiny sizes, with random weights and the loss that each is trained with.

The list is fixed: what fails stays in it. Names are those of the library's configurations.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.equivalence import batches
from tests.equivalence.batches import IMAGE, LABELS, VOCABULARY, Batch

WIDTH, HEADS = 32, 4

#: set where a configuration has it; what drops at random is off, since masks of one device are no plan's affair
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "embedding_size": WIDTH,
    "dim": WIDTH, "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "n_inner": 64, "hidden_dim": 64,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": HEADS, "n_head": HEADS,
    "n_heads": HEADS, "num_heads": HEADS, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "num_labels": LABELS, "image_size": IMAGE,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "dropout": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "summary_first_dropout": 0.0, "classifier_dropout": 0.0, "layerdrop": 0.0, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "dropout_rate": 0.0,
    "drop_path_rate": 0.0,
    "classifier_dropout_prob": 0.0, "embed_dropout": 0.0, "mlp_dropout": 0.0, "resid_dropout": 0.0,
    "residual_dropout": 0.0, "embedding_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0,
    "pooler_dropout": 0.0, "attention_dropout_prob": 0.0, "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
    "classifier_proj_size": 16, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "forced_eos_token_id": None, "summary_last_dropout": 0.0,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """kind: what its batch is like; head: the model's class, after the name; own: of its configuration.

    batch: in the place of the kind's, by the name of a function of `batches`. is_double: in float64, since in float32
    three steps of the model itself differ by more than is compared where the last bits of its parameters do.
    without: what of COMMON the configuration does not take.
    """

    kind: str
    name: str
    head: str
    own: dict[str, Any] = field(default_factory=dict)
    batch: str = ""
    config_name: str = ""
    is_double: bool = False
    without: tuple[str, ...] = ()

    def build(self, is_double: bool = False) -> tuple[nn.Module, Batch]:
        """The model, in training mode, and its batch; in float64 where it is, or is asked for."""
        is_double |= self.is_double
        torch.manual_seed(0)
        model = getattr(transformers, self.name + self.head)(self.config())
        torch.manual_seed(1)
        batch: Batch = getattr(batches, self.batch or self.kind.replace("-", "_"))()
        if is_double:
            batch = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in batch.items()}
        return (model.double() if is_double else model).train(), batch

    def config(self) -> Any:
        """The library's configuration, with what is common set where it has it."""
        made = getattr(transformers, (self.config_name or self.name) + "Config")
        known = inspect.signature(made.__init__).parameters.keys() | made.attribute_map.keys() | set(dir(made))
        common = {key: value for key, value in COMMON.items() if key in known - {*self.without}}
        return made(**{key: x for key, x in common.items() if made.attribute_map.get(key) not in self.own} | self.own)


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4,
            "output_router_logits": True, **GROUPED}  # fmt: skip
WAVES = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 8,
          "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}  # fmt: skip
_STEPS = {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4}
_BUCKETS = {"d_kv": 8, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
_SIZES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
LM, IMAGES = "ForCausalLM", "ForImageClassification"


def many(kind: str, head: str, own: dict[str, Any], *names: str) -> list[Architecture]:
    return [Architecture(kind, name, head, own) for name in names]


ARCHITECTURES = (
    *many("decoder", LM, GROUPED, "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "StableLm",
           "Olmo", "Olmo2", "Cohere", "Granite", "Starcoder2", "Glm", "Glm4", "SmolLM3", "Helium", "Nemotron"),
    Architecture("decoder", "Gemma3", LM, GROUPED | {"sliding_window": 8}, config_name="Gemma3Text"),
    *many("decoder", LM, {}, "Phi", "GPTNeoX", "OPT", "Falcon", "Persimmon", "BioGpt", "XGLM"),
    Architecture("decoder", "GPT2", "LMHeadModel"),
    Architecture("decoder", "GPTJ", LM, {"rotary_dim": 4}),
    Architecture("decoder", "CodeGen", LM, {"rotary_dim": 4}),
    Architecture("decoder", "GPTNeo", LM, {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
    Architecture("decoder", "GPTBigCode", LM),
    Architecture("decoder", "Bloom", LM),
    Architecture("decoder", "Mpt", LM),
    *many("decoder", LM, EXPERTS, "Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss"),
    Architecture("decoder", "DeepseekV3", LM, {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": HEADS}),
    *many("encoder", "ForMaskedLM", {}, "Bert", "Roberta", "DistilBert", "Albert", "Electra", "XLMRoberta",
           "Camembert", "MPNet", "RoFormer", "FNet", "ConvBert", "Nystromformer"),
    Architecture("encoder", "DebertaV2", "ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Architecture("encoder", "Deberta", "ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    Architecture("encoder", "ModernBert", "ForMaskedLM", {"local_attention": 8, "classifier_dropout": 0.0}),
    Architecture("encoder-decoder", "T5", "ForConditionalGeneration", _BUCKETS | {"decoder_start_token_id": 0}),
    *many("encoder-decoder", "ForConditionalGeneration", _BUCKETS, "MT5", "UMT5"),
    *many("encoder-decoder", "ForConditionalGeneration", {}, "Bart", "MBart", "Pegasus", "Blenderbot", "M2M100"),
    Architecture("encoder-decoder", "Marian", "MTModel"),
    Architecture("encoder-decoder", "LED", "ForConditionalGeneration", {"attention_window": 4}),
    *many("vision", IMAGES, {"patch_size": 8}, "ViT", "DeiT", "Dinov2", "ViTMSN"),
    Architecture("vision", "Beit", IMAGES, {"patch_size": 8, "vocab_size": 64}),
    *many("vision", IMAGES, _STEPS | {"patch_size": 4}, "Swin", "Swinv2"),
    *many("vision", IMAGES, _SIZES | {"num_stages": 2}, "ConvNext", "ConvNextV2"),
    *many("vision", IMAGES, _SIZES | {"embedding_size": 16, "groups_width": 8}, "ResNet", "RegNet"),
    Architecture("vision", "PoolFormer", IMAGES, {
        "hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
        "padding": [2, 1]}),
    Architecture("vision", "Segformer", "ForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}, "pixels"),
    Architecture("vision", "MobileNetV2", IMAGES, {"depth_multiplier": 0.25, "min_depth": 4}, is_double=True),
    Architecture("vision", "CLIP", "Model", {
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 2},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "image_size": IMAGE, "patch_size": 8}, "projection_dim": 16}, "image_and_text"),
    *many("audio", "ForSequenceClassification", WAVES, "Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "Data2VecAudio"),
    Architecture("audio", "SEW", "ForSequenceClassification", WAVES | {"squeeze_factor": 2}),
    Architecture("audio", "AST", "ForAudioClassification", {
        "num_mel_bins": 16, "max_length": 32, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}, "spectrum"),
    Architecture("audio", "Whisper", "ForConditionalGeneration", {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}, "speech"),
    Architecture("audio", "Speech2Text", "ForConditionalGeneration", {
        "input_feat_per_channel": 8, "num_conv_layers": 1, "conv_kernel_sizes": (3,), "conv_channels": 16,
        "max_source_positions": 64, "max_target_positions": 64}, "frames"),
    *many("recurrent", LM, {"state_size": 8, "time_step_rank": 4}, "Mamba", "FalconMamba"),
    Architecture("recurrent", "Mamba2", LM, {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
                                              "chunk_size": 4}),
    Architecture("recurrent", "Rwkv", LM, {"attention_hidden_size": WIDTH, "context_length": 64}),
    Architecture("recurrent", "RecurrentGemma", LM, {"num_hidden_layers": 3, "lru_width": 32,
                                                      "attention_window_size": 8, **GROUPED}),
    Architecture("recurrent", "Jamba", LM, {**GROUPED, "num_hidden_layers": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}),
    Architecture("recurrent", "Bamba", LM, {**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_chunk_size": 4, "attn_layer_indices": [1]}),
    Architecture("recurrent", "Lfm2", LM, {**GROUPED, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
)  # fmt: skip
