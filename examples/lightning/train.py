"""PyTorch Lightning's Trainer with a callback that protects it: a small network with dropout, a schedule and evaluations.

    ttprun --nproc-per-node 2 examples/lightning/train.py

Lines that end with `# TTP` are all that differs from the program without TTP.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from ttp.adopt.lightning_callback import TTPLightning  # TTP


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.norm(dim=1) > 2.7).long())


class Classifier(LightningModule):
    """Prints every step's loss and learning rate, and every evaluation's loss, to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(32, 2),
        )
        self.validation = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        accumulated = self.trainer.fit_loop._should_accumulate()
        if self.trainer.is_global_zero and not accumulated:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            print(f"step {self.trainer.global_step}: loss {outputs['loss'].item().hex()} next rate {rate}", flush=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"].item().hex()
            print(f"after step {self.trainer.global_step}: validation {loss}", flush=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--save-dir", default="output/lightning")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=6,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[TTPLightning(save_dirs=[args.save_dir])],  # TTP
    )
    model = Classifier()
    trainer.fit(
        model, DataLoader(samples(256, 1), batch_size=8, shuffle=True), DataLoader(samples(64, 2), batch_size=16)
    )
    if trainer.is_global_zero:
        weights = torch.cat([value.double().view(-1) for value in model.parameters()])
        print(f"final weights: {weights.norm().item().hex()}", flush=True)


if __name__ == "__main__":
    main()
