"""What is particular to models.wide_resnet: shapes of blocks, and batch norm's running statistics."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models import wide_resnet

CONFIG = wide_resnet.Config()


@pytest.mark.parametrize("bottleneck", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_block_gives_the_channels_it_says_and_shrinks_by_its_stride(bottleneck: bool, stride: int) -> None:
    config = dataclasses.replace(CONFIG, bottleneck=bottleneck)
    block, channels_out = wide_resnet.block(config, channels_in=6, channels=4, stride=stride)
    assert block(torch.randn(2, 6, 8, 8)).shape == (2, channels_out, 8 // stride, 8 // stride)


def test_large_images_shrink_four_times_in_the_stem() -> None:
    stem = wide_resnet.Stem(dataclasses.replace(CONFIG, large_images=True))
    assert stem(torch.randn(2, 3, 32, 32)).shape == (2, CONFIG.base_channels, 8, 8)


def test_training_forward_updates_running_statistics_and_evaluation_does_not() -> None:
    model, inputs = wide_resnet.build(CONFIG), wide_resnet.example_inputs(CONFIG)
    before = model.stem.convolution.norm.running_mean.clone()
    model.eval()
    model(**inputs)
    assert torch.equal(model.stem.convolution.norm.running_mean, before)
    model.train()
    model(**inputs)
    assert not torch.equal(model.stem.convolution.norm.running_mean, before)
