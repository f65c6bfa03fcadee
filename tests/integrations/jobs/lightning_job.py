"""A Lightning script: metrics, validation, a scheduler, callbacks. `--plain` is under torchrun."""

import argparse
import hashlib
import json
import os
import signal
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--die", nargs="*", default=[])  # RANK:PLACE:STEP
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)


def die(place: str, trainer: Trainer) -> None:
    mark = f"{trainer.global_rank}:{place}:{trainer.global_step}"
    if mark in options.die and trainer.world_size > 1:
        try:
            (options.out / mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class History(Callback):
    """Keeps what it sees, and dies where it is told to."""

    def __init__(self) -> None:
        self.batches, self.losses, self.epochs, self.rates = 0, [], [], []

    def on_train_epoch_start(self, trainer, module) -> None:
        die("epoch_start", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        die("batch_start", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.batches += 1
        die(f"end{batch_idx}", trainer)
        self.losses.append([batch_idx, float(outputs["loss"])])
        die("batch_end", trainer)

    def on_validation_batch_start(
        self, trainer, module, batch, batch_idx, dataloader_idx=0
    ) -> None:
        if batch_idx == 1 and not trainer.sanity_checking:
            die("validation", trainer)

    def on_validation_end(self, trainer, module) -> None:
        die("validation_end", trainer)

    def on_train_epoch_end(self, trainer, module) -> None:
        metrics = trainer.callback_metrics.items()
        self.epochs.append({name: float(value) for name, value in metrics})
        die("epoch_end", trainer)


class Model(LightningModule):
    """A small regression with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not options.manual
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
        )
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()
        self.steps, self.val_losses, self.means = 0, [], []

    def prepare_data(self) -> None:
        (options.out / "prepared").touch()

    def training_step(self, batch, batch_idx):
        x, y = batch
        found = self.net(x)
        loss = nn.functional.mse_loss(found, y)
        self.steps += 1
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.train_error(found, y)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        die("forward", self.trainer)
        die(f"batch{batch_idx}", self.trainer)
        if options.manual:
            optimizer = self.optimizers()
            if options.accumulate > 1:
                if batch_idx % options.accumulate == 0:
                    optimizer.zero_grad()
                self.manual_backward(loss / options.accumulate)
                is_last = batch_idx + 1 == self.trainer.num_training_batches
                if (batch_idx + 1) % options.accumulate == 0 or is_last:
                    optimizer.step()
                return loss
            for part in range(2):
                optimizer.zero_grad()
                self.manual_backward(loss if part == 0 else (self.net(x) - y).abs().mean())
                optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer) -> None:
        die("backward", self.trainer)

    def validation_step(self, batch, batch_idx) -> None:
        x, y = batch
        found = self.net(x)
        loss = nn.functional.mse_loss(found, y)
        self.val_losses.append(float(loss))
        self.val_error(found, y)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_error", self.val_error)

    def on_validation_epoch_end(self) -> None:
        self.means.append(sum(self.val_losses) / max(1, len(self.val_losses)))
        self.val_losses.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def digest(module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


seed_everything(7, verbose=False)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
if options.plain:
    strategy = "ddp"
else:
    from outlast.integrations.lightning_strategy import OutlastStrategy

    strategy = OutlastStrategy(batches_per_step=options.accumulate if options.manual else 1)
history = History()
stopping = EarlyStopping("val_loss", patience=2)
saving = ModelCheckpoint(options.out / "ckpt", monitor="val_loss", save_top_k=2, save_last=True)
trainer = Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=2,
    max_epochs=options.epochs,
    log_every_n_steps=2,
    num_sanity_val_steps=2 if options.accumulate == 1 else 0,
    gradient_clip_val=None if options.manual else 1.0,
    accumulate_grad_batches=options.accumulate if not options.manual else 1,
    val_check_interval=3 if options.accumulate == 1 else options.accumulate,
    callbacks=[history, stopping, saving, LearningRateMonitor()],
    logger=CSVLogger(options.out / "csv", version=0, flush_logs_every_n_steps=1),
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
(options.out / f"{trainer.global_rank}.json").write_text(
    json.dumps(
        {
            "weights": digest(model),
            "steps": [trainer.global_step, model.steps, history.batches, trainer.current_epoch],
            "losses": history.losses,
            "epochs": history.epochs,
            "rates": history.rates,
            "means": model.means,
            "stopping": [stopping.wait_count, float(stopping.best_score)],
            "best": [Path(saving.best_model_path).name, float(saving.best_model_score)],
            "files": sorted(path.name for path in (options.out / "ckpt").iterdir()),
        }
    )
)
