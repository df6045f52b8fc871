"""More architectures of the transformers library, beside those of the benchmark (`architectures`), and other heads.

`python -m tests.equivalence.sweep` runs them. What is built by parts (text and vision, encoder and decoder) is here as
a part that is trained, or whole.
"""

from __future__ import annotations

from typing import Any

from tests.equivalence.architectures import (
    EXPERTS,
    GROUPED,
    HEADS,
    IMAGES,
    LM,
    WAVES,
    WIDTH,
    Architecture,
    many,
)
from tests.equivalence.batches import IMAGE, LENGTH, VOCABULARY

_TEXT_PART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_IMAGE_PART: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "image_size": IMAGE, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_PARTS = {"text_config": _TEXT_PART, "vision_config": _IMAGE_PART, "projection_dim": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_PATCH = {"patch_size": 8}
_SEQ, _TOKEN, _QA, _CHOICE = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
)  # fmt: skip


def _heads(names: tuple[str, ...], head: str, batch: str, own: dict[str, Any]) -> list[Architecture]:
    return [Architecture("head", name, head, own, batch) for name in names]


FAMILIES = (
    *many("decoder", LM, GROUPED, "Arcee", "Apertus", "Ministral", "SeedOss", "HunYuanDenseV1", "Ernie4_5",
           "Cohere2", "Olmo3", "DiffLlama", "BitNet", "Doge", "NanoChat", "VaultGemma", "Jais2", "Exaone4", "Cwm"),
    *many("decoder", LM, {}, "GPTNeoXJapanese", "MegatronBert"),
    Architecture("decoder", "BertGeneration", "Decoder", {"is_decoder": True}),
    Architecture("decoder", "ModernBertDecoder", LM, {"local_attention": 8}),
    Architecture("decoder", "OpenAIGPT", "LMHeadModel"),
    Architecture("decoder", "CTRL", "LMHeadModel", {"dff": 64}),
    Architecture("decoder", "XLNet", "LMHeadModel", {"d_inner": 64, "mem_len": None},
                 without=("max_position_embeddings",)),
    Architecture("decoder", "TrOCR", LM, {"cross_attention_hidden_size": WIDTH}),
    *many("experts", LM, EXPERTS, "GraniteMoe", "GraniteMoeShared", "Ernie4_5_Moe", "HunYuanMoEV1",
           "FlexOlmo", "MiniMax"),
    Architecture("experts", "Phimoe", LM, EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    *many("experts", LM, {**GROUPED, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
                          "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1},
          "Dots1", "Glm4Moe"),
    Architecture("experts", "JetMoe", LM, {"kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4,
                                            "num_experts_per_tok": 2}),
    Architecture("experts", "Lfm2Moe", LM, {**EXPERTS, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
                                             "num_dense_layers": 1}),
    Architecture("experts", "DeepseekV2", LM, {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": HEADS}),
    Architecture("experts", "Qwen3Next", LM, {**EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16}),
    Architecture("experts", "SwitchTransformers", "ForConditionalGeneration", {
        "d_kv": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4,
        "expert_capacity": 6, "router_jitter_noise": 0.0, "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8}, "encoder_decoder"),
    Architecture("experts", "NllbMoe", "ForConditionalGeneration", {
        "num_experts": 4, "expert_capacity": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "moe_token_dropout": 0.0}, "encoder_decoder"),
    Architecture("recurrent", "GraniteMoeHybrid", LM, {**EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"]}),
    Architecture("recurrent", "FalconH1", LM, {**GROUPED, **_MAMBA, "mamba_d_ssm": 64}),
    Architecture("recurrent", "Zamba2", LM, {**GROUPED, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4,
        "mamba_headdim": 16, "mamba_expand": 2, "chunk_size": 4, "num_hidden_layers": 3, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba"], "use_mamba_kernels": False}),
    Architecture("recurrent", "NemotronH", LM, {**GROUPED, "layers_block_type": ["mamba", "attention", "mlp"],
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4,
        "use_mamba_kernels": False, "num_hidden_layers": 3}),
    Architecture("recurrent", "xLSTM", LM, {"num_blocks": 2, "mode": "train", "chunk_size": 4,
        "autocast_kernel_dtype": "float32", "ffn_round_up_to_multiple_of": 8}),
    *many("encoder", "ForMaskedLM", {}, "Ernie", "Esm", "IBert", "RemBert",
           "RobertaPreLayerNorm", "SqueezeBert", "XLMRobertaXL", "Data2VecText", "MegatronBert", "EuroBert",
           "LayoutLM", "Mra", "Yoso"),
    Architecture("encoder", "MobileBert", "ForMaskedLM", {"embedding_size": 16}),
    Architecture("encoder", "RoCBert", "ForMaskedLM", {"shape_vocab_size": VOCABULARY,
                                                       "pronunciation_vocab_size": VOCABULARY}),
    Architecture("encoder", "Xmod", "ForMaskedLM", {"languages": ["en_XX"], "default_language": "en_XX"}),
    Architecture("encoder", "BigBird", "ForMaskedLM", {"attention_type": "original_full"}),
    Architecture("encoder", "BigBird", _SEQ, {"block_size": 2, "num_random_blocks": 1}, "long_classes"),
    Architecture("encoder", "Longformer", "ForMaskedLM", {"attention_window": 4}),
    Architecture("encoder", "Funnel", "ForMaskedLM", {"block_sizes": [1, 1], "d_head": 8, "d_inner": 64,
                                                      "num_decoder_layers": 1}, without=("num_hidden_layers",)),
    Architecture("encoder", "XLM", "WithLMHeadModel", {"emb_dim": WIDTH}),
    Architecture("encoder", "Flaubert", "WithLMHeadModel", {"emb_dim": WIDTH}),
    Architecture("encoder", "Reformer", "ForMaskedLM", {
        "attn_layers": ["local", "local"], "attention_head_size": 8, "feed_forward_size": 64, "axial_pos_embds": False,
        "local_attn_chunk_length": 4, "is_decoder": False, "local_attention_probs_dropout_prob": 0.0}),
    Architecture("encoder", "Perceiver", "ForMaskedLM", {
        "num_latents": 6, "d_latents": 16, "num_self_attends_per_block": 2, "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2, "max_position_embeddings": LENGTH}),
    Architecture("encoder", "Tapas", "ForMaskedLM", {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 10]}),
    Architecture("encoder", "LayoutLMv3", _TOKEN, {
        "coordinate_size": 6, "shape_size": 4, "rel_pos_bins": 8, "rel_2d_pos_bins": 8, "visual_embed": False,
        "max_2d_position_embeddings": 64}, "boxes_tags"),
    Architecture("encoder", "Lilt", _TOKEN, {
        "max_2d_position_embeddings": 64, "channel_shrink_ratio": 2, "hidden_size": 24}, "boxes_tags"),
    Architecture("encoder", "Bros", _TOKEN, {"hidden_size": 128}, "boxes_tags"),
    Architecture("encoder", "Luke", "ForMaskedLM", {"entity_vocab_size": 16, "entity_emb_size": 8}),
    Architecture("encoder", "Splinter", _QA, {}, "spans"),
    *_heads(("Bert", "Electra", "DistilBert", "Albert", "DebertaV2"), _SEQ, "classes", {}),
    *_heads(("Llama", "OPT", "Falcon", "Bloom", "GPT2", "Phi"), _SEQ, "classes", {}),
    *_heads(("Mistral", "Qwen3", "Gemma"), _SEQ, "classes", GROUPED),
    Architecture("head", "Roberta", _SEQ, {"problem_type": "multi_label_classification"}, "scores"),
    Architecture("head", "T5", _SEQ, {
        "d_kv": 8, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0}, "ended"),
    Architecture("head", "Bart", _SEQ, {}, "ended"),
    *_heads(("Bert", "Roberta", "GPT2", "Bloom"), _TOKEN, "tags", {}),
    *_heads(("Bert", "DistilBert", "GPT2", "Bart", "MPNet", "XLMRoberta"), _QA, "spans", {"num_labels": 2}),
    *_heads(("Bert", "Roberta", "Electra"), _CHOICE, "choices", {}),
    Architecture("head", "Bert", "ForPreTraining", {}, "pretraining"),
    Architecture("head", "Electra", "ForPreTraining", {}, "detection"),
    Architecture("encoder-decoder", "BlenderbotSmall", "ForConditionalGeneration"),
    Architecture("encoder-decoder", "PLBart", "ForConditionalGeneration"),
    Architecture("encoder-decoder", "Mvp", "ForConditionalGeneration"),
    Architecture("encoder-decoder", "PegasusX", "ForConditionalGeneration", {"num_global_tokens": 3, "block_size": 4}),
    Architecture("encoder-decoder", "BigBirdPegasus", "ForConditionalGeneration", {"attention_type": "original_full"}),
    Architecture("encoder-decoder", "LongT5", "ForConditionalGeneration", {
        "d_kv": 8, "local_radius": 3, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}),
    Architecture("encoder-decoder", "LongT5", "ForConditionalGeneration", {
        "d_kv": 8, "local_radius": 3, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
        "encoder_attention_type": "transient-global",
        "global_block_size": 4}),
    Architecture("encoder-decoder", "FSMT", "ForConditionalGeneration", {
        "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}),
    *many("vision", IMAGES, _PATCH, "Dinov2WithRegisters", "IJepa"),
    *many("vision", IMAGES, {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "num_groups": 4,
                               "layer_type": "bottleneck"}, "Bit"),
    Architecture("vision", "Cvt", IMAGES, {
        "patch_sizes": [7, 3, 3], "patch_stride": [4, 2, 2], "patch_padding": [2, 1, 1], "embed_dim": [16, 32, 32],
        "num_heads": [2, 4, 4], "depth": [1, 2, 3], "mlp_ratio": [2.0, 2.0, 2.0], "drop_path_rate": [0.0, 0.0, 0.0]},
        is_double=True),
    Architecture("vision", "FocalNet", IMAGES, {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32],
                                                 "focal_levels": [2, 2], "focal_windows": [3, 3]}),
    Architecture("vision", "Levit", IMAGES, {"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1], "key_dim": [8, 8, 8], "image_size": 64, "drop_path_rate": 0},
        "large_image", is_double=True),
    Architecture("vision", "MobileViT", IMAGES, {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24,
        24, 32], "num_attention_heads": 2, "conv_kernel_size": 3}, "large_image", is_double=True),
    Architecture("vision", "MobileViTV2", IMAGES, {"width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1],
        "base_attn_unit_dims": [32, 32, 32]}, "large_image", is_double=True),
    Architecture("vision", "MobileNetV1", IMAGES, {"depth_multiplier": 0.25, "min_depth": 4}, is_double=True),
    Architecture("vision", "EfficientNet", IMAGES, {"width_coefficient": 0.25, "depth_coefficient": 0.3,
        "drop_connect_rate": 0.0, "hidden_dim": 320, "depth_divisor": 4}, "large_image", is_double=True),
    Architecture("vision", "Pvt", IMAGES, {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2], "sequence_reduction_ratios": [4, 2, 1, 1], "mlp_ratios": [2, 2, 2, 2]}),
    Architecture("vision", "PvtV2", IMAGES, {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]}),
    Architecture("vision", "SwiftFormer", IMAGES, {"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16],
        "mlp_ratio": 2}, is_double=True),
    Architecture("vision", "Hiera", IMAGES, {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 2],
        "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "image_size": [32, 32],
        "masked_unit_size": [4, 4], "num_query_pool": 2, "masked_unit_attention": [True, True, False]}),
    Architecture("vision", "HGNetV2", IMAGES, {"stem_channels": [3, 8, 8], "stage_in_channels": [8, 16],
        "stage_mid_channels": [8, 8], "stage_out_channels": [16, 32], "stage_num_blocks": [1, 1],
        "stage_downsample": [False, True], "stage_downsample_strides": [2, 2], "stage_light_block": [False, True],
        "stage_kernel_size": [3, 5], "stage_numb_of_layers": [2, 2], "depths": [1, 1], "hidden_sizes": [16, 32],
        "embedding_size": 8}, is_double=True),
    Architecture("vision", "Siglip", IMAGES, {"vision_config": _IMAGE_PART}),
    Architecture("vision", "ViTMAE", "ForPreTraining", {**_PATCH, "decoder_num_attention_heads": 2,
        "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32,
        "mask_ratio": 0.5}, "noised"),
    Architecture("vision", "ViT", "ForMaskedImageModeling", {**_PATCH, "encoder_stride": 8}, "patches_hidden"),
    Architecture("vision", "Swin", "ForMaskedImageModeling", {
        "patch_size": 4, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4,
        "encoder_stride": 8}, "many_patches_hidden"),
    Architecture("vision", "VideoMAE", "ForVideoClassification", {**_PATCH, "num_frames": 4, "tubelet_size": 2},
                 "video"),
    Architecture("vision", "Vivit", "ForVideoClassification", {"num_frames": 4, "tubelet_size": [2, 8, 8]}, "video"),
    Architecture("vision", "Timesformer", "ForVideoClassification", {
        **_PATCH, "num_frames": 4, "drop_path_rate": 0}, "video"),
    Architecture("vision", "ImageGPT", IMAGES, {"n_positions": 16, "vocab_size": VOCABULARY}, "classes"),
    Architecture("vision", "GLPN", "ForDepthEstimation", {
        "num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "sr_ratios": [2, 2, 1, 1], "hidden_sizes": [8, 8, 16, 16],
        "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2], "decoder_hidden_size": 8}, "depth",
        is_double=True),
    Architecture("vision", "DPT", "ForSemanticSegmentation", {
        **_PATCH, "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 8, "semantic_classifier_dropout": 0.0, "backbone_featmap_shape": None}, "segments",
        is_double=True),
    Architecture("vision", "Beit", "ForSemanticSegmentation", {
        **_PATCH, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]}, "segments",
        is_double=True),
    Architecture("image-and-text", "Siglip", "Model", _PARTS, "image_and_text"),
    Architecture("image-and-text", "ChineseCLIP", "Model", _PARTS, "image_and_text"),
    Architecture("image-and-text", "AltCLIP", "Model", {**_PARTS, "text_config": {**_TEXT_PART, "project_dim": 16}},
                 "image_and_text"),
    Architecture("image-and-text", "OwlViT", "Model", _PARTS, "image_and_text"),
    Architecture("image-and-text", "GroupViT", "Model", {"text_config": _TEXT_PART, "vision_config": {
        **_IMAGE_PART, "depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 4]},
        "projection_dim": 16, "projection_intermediate_dim": 32}, "image_and_text"),
    Architecture("image-and-text", "Blip", "Model", {**_PARTS, "text_config": {
        **_TEXT_PART, "encoder_hidden_size": WIDTH, "projection_dim": 16}}, "image_and_text"),
    Architecture("image-and-text", "Blip", "ForConditionalGeneration", {**_PARTS, "text_config": {
        **_TEXT_PART, "encoder_hidden_size": WIDTH, "projection_dim": 16, "is_decoder": True}}, "caption"),
    Architecture("image-and-text", "Vilt", _QA, {"patch_size": 8}, "answers"),
    Architecture("image-and-text", "VisualBert", "ForPreTraining", {"visual_embedding_dim": 24}, "regions"),
    Architecture("image-and-text", "Git", LM, {"vision_config": _IMAGE_PART}, "caption"),
    Architecture("image-and-text", "Llava", "ForConditionalGeneration", {
        "vision_config": {**_IMAGE_PART, "model_type": "clip_vision_model"}, "text_config": {
            **_TEXT_PART, "model_type": "llama", "num_key_value_heads": 2}, "image_token_index": 63,
        "vision_feature_layer": -1, "image_seq_length": 16}, "image_in_text"),
    Architecture("image-and-text", "PaliGemma", "ForConditionalGeneration", {
        "vision_config": {**_IMAGE_PART, "model_type": "siglip_vision_model", "projection_dim": WIDTH,
                          "vision_use_head": False}, "text_config": {
            **_TEXT_PART, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8}, "image_token_index": 63,
        "projection_dim": WIDTH}, "image_in_text_typed"),
    *[Architecture("audio", name, "ForCTC", {**WAVES, "vocab_size": 32, "ctc_zero_infinity": True}, "transcripts")
      for name in ("Wav2Vec2", "Hubert", "WavLM", "UniSpeechSat")],
    Architecture("audio", "Wav2Vec2Conformer", "ForSequenceClassification", {
        **WAVES, "conformer_conv_dropout": 0.0, "conv_depthwise_kernel_size": 5}, "audio"),
    Architecture("audio", "Wav2Vec2Bert", "ForSequenceClassification", {
        "feature_projection_input_dim": 16, "conformer_conv_dropout": 0.0, "conv_depthwise_kernel_size": 5,
        "apply_spec_augment": False}, "features"),
    Architecture("audio", "SEWD", "ForSequenceClassification", {**WAVES, "squeeze_factor": 2}, "audio"),
    Architecture("series", "PatchTST", "ForPrediction", {
        "num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8},
        "series", is_double=True),
    Architecture("series", "PatchTSMixer", "ForPrediction", {
        "num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "prediction_length": 8,
        "head_dropout": 0.0}, "series"),
    *[Architecture("series", name, "ForPrediction", {
        "prediction_length": 6, "context_length": 13, "num_time_features": 2, "lags_sequence": [1, 2, 3, 7],
        **more}, "forecast") for name, more in (("TimeSeriesTransformer", {}), ("Autoformer", {
            "moving_average": 3, "label_length": 6}), ("Informer", {"attention_type": "full", "distil": False}))],
)  # fmt: skip
