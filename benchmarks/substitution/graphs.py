"""The models whose graphs are rewritten, in the sizes that TASO (SOSP'19) and Tensat (MLSys'21) measure.

As theirs, a batch is one sequence or one image. BERT, the NAS cell, ResNeXt, Inception, SqueezeNet and VGG are their
models; ours are a Llama layer with adapters, on the output of each product (as peft writes them) and on its weight (as
parametrizations do), and GPT-2 as transformers writes it (query, key and value in one product).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models import bert, inception, llama_lora, nas_rnn, squeezenet, vgg, wide_resnet

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]


def _own(module: Any, config: Any) -> Callable[[], Made]:
    return lambda: (module.build(config), module.example_inputs(config))


def _gpt2() -> Made:
    import transformers

    config = transformers.GPT2Config(n_positions=128, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, use_cache=False)
    tokens = torch.randint(0, config.vocab_size, (1, 128))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


GRAPHS: dict[str, Callable[[], Made]] = {
    "bert": _own(bert, bert.bert_taso()),
    "nas_rnn": _own(nas_rnn, nas_rnn.nas_rnn_taso()),
    "resnext50": _own(wide_resnet, wide_resnet.resnext50(batch_size=1)),
    "inception_v3": _own(inception, inception.inception_v3(batch_size=1)),
    "squeezenet": _own(squeezenet, squeezenet.squeezenet1_0()),
    "vgg19": _own(vgg, vgg.vgg19()),
    "llama_lora": _own(llama_lora, llama_lora.llama_block()),
    "llama_lora_weight": _own(llama_lora, llama_lora.llama_block(adapts="weight")),
    "hf_gpt2": _gpt2,
}
SIZES = {
    "bert": "8 layers, hidden 1,024, 16 heads, 64 tokens, vocabulary 512",
    "nas_rnn": "5 steps, hidden 512",
    "resnext50": "32 groups × 4 channels, 224 × 224",
    "inception_v3": "299 × 299, one head",
    "squeezenet": "1.0, 224 × 224",
    "vgg19": "224 × 224",
    "llama_lora": "1 layer, hidden 2,048, MLP 8,192, 8 of 32 heads for keys, rank 16, 256 tokens, vocabulary 512",
    "llama_lora_weight": "the same with adapters on the weight",
    "hf_gpt2": "12 layers, hidden 768, 128 tokens, vocabulary 50,257",
}


def build(name: str, mode: str) -> Made:
    """A model of GRAPHS with random weights, in training or evaluation, and its batch; equal for equal names."""
    torch.manual_seed(0)
    model, batch = GRAPHS[name]()
    return model.train(mode == "train"), batch
