"""One script for Lightning, run in one process as it is and on ranks with our strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autopar.adapters.lightning import PlannedStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 16), nn.Dropout(0.0), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


class Classifier(lightning.LightningModule):
    """Logs its loss, a number, and what it makes of batches; what it evaluates depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 4)
        self.returned = list[float]()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Samples are kept as whole numbers."""
        return batch[0].float() / 8, batch[1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        x, y = batch
        z = self(x)
        loss = nn.functional.cross_entropy(z, y)
        self.log("val_loss", loss)
        self.log_dict({"accuracy": (z.argmax(1) == y).float().mean(), "one": 1.0})
        return {"loss": loss, "of": ["a", z]}

    def on_validation_batch_end(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        self.returned.append(outputs["of"][1].sum().item())

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x) * (1 + dataloader_idx), y))

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self(batch[0]).softmax(-1)

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
    samples = torch.randint(-12, 12, (count, 6), generator=generator, dtype=torch.int32)
    return TensorDataset(samples, torch.randint(4, (count,), generator=generator))


def loader(count: int, seed: int) -> DataLoader[Any]:
    return DataLoader(data(count, seed), batch_size=8)


def trainer_of(folder: Path, plan: Any, **changed: Any) -> lightning.Trainer:
    strategy: Any = "auto" if plan is None else PlannedStrategy(plan=plan, options={"check": False})
    usual: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "strategy": strategy, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "default_root_dir": str(folder), "max_epochs": 2,
    }  # fmt: skip
    return lightning.Trainer(**{**usual, **changed})


def run(
    folder: Path, plan: Any = None, epochs: int = 2, resume: str | None = None, evaluated: bool = False
) -> dict[str, Any]:
    """Losses of all steps, what was logged last, what steps returned, and the weights of the checkpoint at the end."""
    torch.manual_seed(5)
    kept = Kept()
    saving = ModelCheckpoint(folder / "saved", "{epoch}", monitor="val_loss", save_top_k=1, save_last=True)
    trainer = trainer_of(
        folder, plan, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.3,
        callbacks=[kept, saving, EarlyStopping("val_loss", patience=5)], enable_checkpointing=True,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module, DataLoader(data(20, 0), batch_size=8, shuffle=True), loader(12, 1), ckpt_path=resume)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found = {"losses": kept.losses, "returned": list(module.returned), "best": saving.best_model_score.item()}
    trainer.save_checkpoint(folder / f"epochs{epochs}.ckpt")
    saved = torch.load(folder / f"epochs{epochs}.ckpt", weights_only=False)["state_dict"]
    if evaluated:
        logged |= trainer.validate(module, loader(12, 1), verbose=False)[0]
        for one in trainer.test(module, [loader(8, 2), loader(5, 3)], verbose=False):
            logged |= one
        found["predicted"] = torch.cat(trainer.predict(module, loader(11, 4)))
    return {**found, "logged": logged, "weights": saved}


def apart(folder: Path, plan: Any, saved: str) -> dict[str, Any]:
    """What a module that was never trained here makes of a checkpoint's weights."""
    torch.manual_seed(6)
    trainer, module = trainer_of(folder, plan), Classifier()
    (logged,) = trainer.test(module, loader(12, 2), ckpt_path=saved, verbose=False)
    predicted = trainer.predict(module, loader(11, 4), ckpt_path=saved)
    return {"logged": logged, "predicted": torch.cat(predicted)}


def job(rank: int, world: int, *args: Any) -> Any:
    """`run` on a rank of the pool."""
    return run(*args)


def apart_job(rank: int, world: int, *args: Any) -> Any:
    """`apart` on a rank of the pool."""
    return apart(*args)
