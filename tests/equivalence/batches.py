"""Small batches for architectures of the transformers library, by what they are trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH, SAMPLES, LABELS, IMAGE = 64, 12, 4, 8, 32
Batch = dict[str, Any]


def tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, LENGTH))


def decoder() -> Batch:
    labels = tokens()
    labels[0, :5] = -100
    return {"input_ids": tokens(), "labels": labels}


encoder = experts = recurrent = decoder


def encoder_decoder() -> Batch:
    mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    mask[1, 9:] = 0
    return {**decoder(), "attention_mask": mask}


def vision() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "labels": torch.randint(LABELS, (SAMPLES,))}


def image_and_text() -> Batch:
    pixels = torch.randn(SAMPLES, 3, IMAGE, IMAGE)
    return {"input_ids": tokens(), "pixel_values": pixels, "return_loss": True}


def pixels() -> Batch:
    labels = torch.randint(LABELS, (SAMPLES, IMAGE // 4, IMAGE // 4))
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "labels": labels}


def audio() -> Batch:
    return {"input_values": torch.randn(SAMPLES, 400), "labels": torch.randint(LABELS, (SAMPLES,))}


def spectrum() -> Batch:
    return {"input_values": torch.randn(SAMPLES, 32, 16), "labels": torch.randint(LABELS, (SAMPLES,))}


def speech() -> Batch:
    return {"input_features": torch.randn(SAMPLES, 8, 32), "labels": tokens()}


def frames() -> Batch:
    return {"input_features": torch.randn(SAMPLES, 32, 8), "labels": tokens()}


def classes() -> Batch:
    return {"input_ids": padded(), "labels": torch.randint(LABELS, (SAMPLES,))}


def padded() -> Tensor:
    """Sequences of unequal lengths."""
    ids = tokens()
    ids[1, 9:] = 0
    ids[3, 5:] = 0
    return ids


def masked() -> Batch:
    ids = padded()
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": tokens()}


def scores() -> Batch:
    """Several labels each."""
    return {"input_ids": tokens(), "labels": torch.randint(2, (SAMPLES, LABELS)).float()}


def tags() -> Batch:
    labels = torch.randint(LABELS, (SAMPLES, LENGTH))
    labels[0, :5] = -100
    return {"input_ids": tokens(), "labels": labels}


def spans() -> Batch:
    return {
        "input_ids": tokens(),
        "start_positions": torch.tensor([1, 3, 20, 0]),  # one beyond the text, which is ignored
        "end_positions": torch.tensor([2, 7, 21, 5]),
    }


def choices() -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (SAMPLES, 3, LENGTH)), "labels": torch.randint(3, (SAMPLES,))}


def pretraining() -> Batch:
    return {**decoder(), "next_sentence_label": torch.randint(2, (SAMPLES,))}


def detection() -> Batch:
    return {
        "input_ids": tokens(),
        "attention_mask": (padded() != 0).long(),
        "labels": torch.randint(2, (SAMPLES, LENGTH)),
    }


def boxes() -> Batch:
    corner = torch.randint(0, 20, (SAMPLES, LENGTH, 2))
    return {**decoder(), "bbox": torch.cat([corner, corner + torch.randint(1, 20, corner.shape)], -1)}


def video() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 4, 3, IMAGE, IMAGE), "labels": torch.randint(LABELS, (SAMPLES,))}


def patches_hidden() -> Batch:
    hidden = torch.zeros(SAMPLES, 16, dtype=torch.bool)
    hidden[:, ::3] = True
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "bool_masked_pos": hidden}


def depth() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "labels": torch.rand(SAMPLES, IMAGE, IMAGE) + 0.5}


def segments() -> Batch:
    labels = torch.randint(LABELS, (SAMPLES, IMAGE, IMAGE))
    labels[0, :5] = 255
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "labels": labels}


def transcripts() -> Batch:
    labels = torch.randint(3, 32, (SAMPLES, 6))
    labels[1, 4:] = -100
    return {"input_values": torch.randn(SAMPLES, 400), "labels": labels}


def features() -> Batch:
    return {"input_features": torch.randn(SAMPLES, 24, 16), "labels": torch.randint(LABELS, (SAMPLES,))}


def series() -> Batch:
    return {"past_values": torch.randn(SAMPLES, 32, 2), "future_values": torch.randn(SAMPLES, 8, 2)}


def forecast() -> Batch:
    return {
        "past_values": torch.rand(SAMPLES, 20), "past_time_features": torch.rand(SAMPLES, 20, 2),
        "past_observed_mask": (torch.rand(SAMPLES, 20) > 0.2).float(), "future_values": torch.rand(SAMPLES, 6),
        "future_time_features": torch.rand(SAMPLES, 6, 2),
    }  # fmt: skip


def regions() -> Batch:
    return {
        "input_ids": tokens(), "attention_mask": torch.ones(SAMPLES, LENGTH),
        "labels": torch.randint(VOCABULARY, (SAMPLES, LENGTH + 5)), "visual_embeds": torch.randn(SAMPLES, 5, 24),
        "visual_attention_mask": torch.ones(SAMPLES, 5),
        "visual_token_type_ids": torch.ones(SAMPLES, 5, dtype=torch.long),
    }  # fmt: skip


def answers() -> Batch:
    """Of questions about images: how good each is."""
    return {
        "input_ids": tokens(), "pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE),
        "labels": torch.rand(SAMPLES, LABELS),
    }  # fmt: skip


def image_in_text() -> Batch:
    """The first tokens stand for the image's patches."""
    ids = tokens()
    ids[ids == 63] = 62
    ids = torch.cat([torch.full((SAMPLES, 16), 63), ids], 1)
    labels = ids.clone()
    labels[:, :16] = -100
    return {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "labels": labels}


def caption() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), **decoder()}


def long_classes() -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (SAMPLES, 24)), "labels": torch.randint(LABELS, (SAMPLES,))}


def boxes_tags() -> Batch:
    batch = boxes()
    return {**batch, "labels": torch.randint(LABELS, (SAMPLES, LENGTH))}


def ended() -> Batch:
    """As many ends in each sequence."""
    ids = tokens()
    ids[:, -1] = 2
    return {"input_ids": ids, "labels": torch.randint(LABELS, (SAMPLES,))}


def large_image() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 3, 64, 64), "labels": torch.randint(LABELS, (SAMPLES,))}


def noised() -> Batch:
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "noise": torch.rand(SAMPLES, 16)}


def many_patches_hidden() -> Batch:
    hidden = torch.zeros(SAMPLES, 64, dtype=torch.bool)
    hidden[:, ::3] = True
    return {"pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE), "bool_masked_pos": hidden}


def image_in_text_typed() -> Batch:
    batch = image_in_text()
    kinds = torch.ones_like(batch["input_ids"])
    kinds[:, :16] = 0
    return {**batch, "token_type_ids": kinds}
