"""The unrolled layers of models.lstm compute what torch's own LSTM computes."""

from __future__ import annotations

import torch

from models import lstm


def test_unrolled_layers_equal_those_of_torch() -> None:
    """Torch stacks the gates write, forget, memory, read; here they are write, forget, read, memory."""
    torch.manual_seed(0)
    unrolled = lstm.build(lstm.Config())
    fused = lstm.build(lstm.Config(fused=True))
    fused.embedding, fused.head = unrolled.embedding, unrolled.head
    order = [0, 1, 3, 2]
    with torch.no_grad():
        for index, layer in enumerate(unrolled.layers):
            for name, value in (
                ("weight_ih", layer.input), ("weight_hh", layer.recurrent), ("bias_ih", layer.bias),
            ):  # fmt: skip
                getattr(fused.layers, f"{name}_l{index}").copy_(value[order].flatten(0, 1))
            getattr(fused.layers, f"bias_hh_l{index}").zero_()
    batch = lstm.example_inputs(lstm.Config())
    torch.testing.assert_close(unrolled(**batch), fused(**batch))
