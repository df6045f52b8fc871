"""One script for Lightning, run in one process as it is and on ranks with our strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.adapters.lightning import PlannedStrategy


class Classifier(lightning.LightningModule):
    """Logs its loss; what it evaluates depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.head = nn.Linear(6, 16), nn.Dropout(0.0), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(nn.functional.gelu(self.up(x))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        z = self(x)
        self.log("val_loss", nn.functional.cross_entropy(z, y))
        self.log("accuracy", (z.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Kept(lightning.Callback):
    """The losses of all steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(trainer.callback_metrics["loss"].item())


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator))


def run(
    folder: Path, plan: Any = None, epochs: int = 2, resume: str | None = None
) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:  # fmt: skip
    """Losses of all steps, what was logged last, and the weights of the checkpoint at the end."""
    torch.manual_seed(5)
    kept = Kept()
    strategy: Any = "auto" if plan is None else PlannedStrategy(plan=plan, options={"check": False})
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, accumulate_grad_batches=2,
        gradient_clip_val=0.3, callbacks=[kept], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, default_root_dir=str(folder),
    )  # fmt: skip
    loaders = DataLoader(data(20, 0), batch_size=8), DataLoader(data(12, 1), batch_size=8)
    trainer.fit(Classifier(), *loaders, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"epochs{epochs}.ckpt")
    saved = torch.load(folder / f"epochs{epochs}.ckpt", weights_only=False)["state_dict"]
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return kept.losses, logged, saved


def job(rank: int, world: int, *args: Any) -> Any:
    """`run` on a rank of the pool."""
    return run(*args)
