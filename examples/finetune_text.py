"""Trains a small Llama on the bytes of a folder's files with Hugging Face's Trainer, evaluates it and saves it.

    python examples/finetune_text.py --output_dir /tmp/out --max_steps 20
    torchrun --nproc-per-node 4 examples/finetune_text.py --output_dir /tmp/out --max_steps 20 --plan dp=2,tp=2

The three lines that a plan needs are marked; all else is as a script for one process has it.
"""

import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from autopar.adapters.transformers import Trainer  # 1. instead of transformers' own


@dataclass
class Options:
    """What the script takes beside TrainingArguments."""

    text: str = field(default=sysconfig.get_path("stdlib"), metadata={"help": "a folder, of whose *.py bytes are read"})
    model: str | None = field(default=None, metadata={"help": "a folder of save_pretrained's; else a new small Llama"})
    length: int = field(default=32, metadata={"help": "tokens of a sample"})
    samples: int = field(default=60, metadata={"help": "to train on; a tenth as many are held out"})
    plan: str | None = field(default=None, metadata={"help": "dp=2,tp=2 or the name of a plan's file"})


class Bytes(Dataset):
    """Samples of so many bytes, one after the other."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.rows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def read(folder: str, count: int) -> torch.Tensor:
    text = b"".join(file.read_bytes() for file in sorted(Path(folder).glob("*.py"))[:40])
    return torch.tensor(list(text[:count]), dtype=torch.int64)


def main() -> None:
    args, options = HfArgumentParser((TrainingArguments, Options)).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=options.length,
    )  # fmt: skip
    saved = AutoModelForCausalLM.from_pretrained(options.model) if options.model else None
    model = saved or AutoModelForCausalLM.from_config(config)
    held_out = options.samples // 10
    tokens = read(options.text, (options.samples + held_out) * options.length)
    at = options.samples * options.length
    trainer = Trainer(
        plan=template_of(options.plan),  # 2. how ranks share the work
        model=model,
        args=args,
        train_dataset=Bytes(tokens[:at], options.length),
        eval_dataset=Bytes(tokens[at:], options.length),
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.save_state()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # 3. as every script under torchrun


def template_of(text: str | None) -> dict[str, int] | str | None:
    """dp=2,tp=2 as arguments of a template; anything else is a file's name."""
    if text is None or "=" not in text:
        return text
    return {key: int(value) for key, value in (item.split("=") for item in text.split(","))}


if __name__ == "__main__":
    main()
