"""Trains a small module to guess the next byte of Python's library with Lightning.

    python examples/lightning_bytes.py
    torchrun --nproc-per-node 4 examples/lightning_bytes.py --plan dp=2,tp=2

The lines that a plan needs are marked; all else is as a script for one process has it.
"""

import argparse
import sysconfig
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.adapters.lightning import PlannedStrategy  # 1.

CONTEXT = 16


class NextByte(lightning.LightningModule):
    """A perceptron over the bytes before."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.up, self.head = nn.Linear(8 * CONTEXT, width), nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.up(self.embedding(context).flatten(1))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        context, following = batch
        loss = nn.functional.cross_entropy(self(context), following)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        context, following = batch
        scores = self(context)
        self.log("val_loss", nn.functional.cross_entropy(scores, following), prog_bar=True)
        self.log("accuracy", (scores.argmax(1) == following).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(skip: int, count: int) -> TensorDataset:
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[skip : skip + count + CONTEXT]
    windows = torch.tensor(list(text)).unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="arguments of template_plan, such as dp=2,tp=2; default: one process")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", help="a folder for checkpoints; default: the current one")
    options = parser.parse_args()
    lightning.seed_everything(0)
    plan = {key: int(n) for key, n in (item.split("=") for item in options.plan.split(","))} if options.plan else {}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PlannedStrategy(plan),  # 2. how ranks share the work
        max_epochs=options.epochs,
        default_root_dir=options.output,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loaders = DataLoader(samples(0, 500), batch_size=64, shuffle=True), DataLoader(samples(5000, 200), batch_size=64)
    trainer.fit(NextByte(), *loaders)
    if trainer.is_global_zero:
        print({name: round(value.item(), 5) for name, value in trainer.callback_metrics.items()}, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
