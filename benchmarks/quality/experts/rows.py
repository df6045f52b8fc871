"""The rows: models of public sizes on the devices and with the batches that people trained them on.

Batches: Llama-3-405B 2,048 sequences of 8,192 (Meta, 2024, table 4: 16 M tokens on 8,192 and 16,384 H100); Llama-3-70B
and 8B 4 sequences a device on 64 and more, 16 a device on 8 (Megatron-Bridge's recipes: 128 on 8, 256 on 64); GPT-39B
1,024 of 1,024 (Alpa, OSDI'22); GPT-175B 1,536 of 2,048 (Megatron-LM, SC'21); MPT-30B 504 of 2,048 on 8 (llm-foundry).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import autopar
from autopar.ir.graph import Graph
from autopar.trace import trace
from models import gpt, llama

LLAMA_405B = replace(
    llama.llama3_70b(), num_layers=126, hidden_size=16_384, num_heads=128, num_kv_heads=8, mlp_size=53_248
)
GPT_175B = gpt.Config(51_200, 2048, num_layers=96, hidden_size=12_288, num_heads=96, tie_head=True)
MPT_30B = gpt.Config(50_432, 2048, num_layers=48, hidden_size=7168, num_heads=56, tie_head=True)


@dataclass(frozen=True)
class Row:
    """A request: a model's sizes, the sequences of a global batch, and devices in nodes of eight."""

    name: str
    config: Any
    sequences: int
    kind: str
    devices: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def mesh(self) -> autopar.Mesh:
        return autopar.Mesh(self.kind, nodes=self.devices // 8, devices_per_node=8)

    def graph(self) -> Graph:
        """The model's, traced on the meta device."""
        built = gpt if isinstance(self.config, gpt.Config) else llama
        with torch.device("meta"):
            model = built.build(self.config).to(self.dtype)
        tokens = torch.empty((self.sequences, self.config.seq_len), dtype=torch.long, device="meta")
        return trace(model, {"tokens": tokens, "labels": tokens})


ROWS = {
    row.name: row
    for row in (
        Row("llama3-8b, 8 h100", llama.llama3_8b(), 128, "h100", 8),
        Row("llama3-8b, 64 h100", llama.llama3_8b(), 256, "h100", 64),
        Row("mpt-30b, 8 h100", MPT_30B, 504, "h100", 8),
        Row("llama3-70b, 64 h100", llama.llama3_70b(), 256, "h100", 64),
        Row("llama3-70b, 256 h100", llama.llama3_70b(), 1024, "h100", 256),
        Row("gpt-39b, 64 v100", gpt.gpt_39b(), 1024, "v100", 64, torch.float16),
        Row("gpt-175b, 512 a100", GPT_175B, 1536, "a100", 512),
        Row("llama3-405b, 8192 h100", LLAMA_405B, 2048, "h100", 8192),
        Row("llama3-405b, 16384 h100", LLAMA_405B, 2048, "h100", 16_384),
    )
}
"""From small to large."""
