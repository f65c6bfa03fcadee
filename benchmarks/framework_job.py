"""A job of a framework, in turns with another one, for `frameworks.py`.

`--plain`: the framework's own classes. Each rank writes the processor time of each turn.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from workload import Baton, Noise, Transformer, loss_of

warnings.simplefilter("ignore")
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--framework", choices=("lightning", "transformers", "accelerate"))
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--block", type=int, required=True, help="steps of one turn")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--baton", type=Path)
args = parser.parse_args()
torch.set_num_threads(1)
WIDTH, LAYERS, BATCH, CONTEXT, RANKS = 128, 2, 2, 32, 2
samples = args.steps * args.accumulate * BATCH * RANKS
data = Subset(Noise(CONTEXT), range(samples))


class Turns:
    """Turns of this rank: `begin` and `end` stand around each step."""

    def __init__(self) -> None:
        self._baton = Baton(args.baton, 0 if args.plain else 1, RANKS)
        self._steps, self._begun_s = 0, 0.0
        self.took_s: list[float] = []

    def begin(self) -> None:
        if self._steps % args.block == 0:
            self._baton.take()
            self._begun_s = time.process_time()
        self._steps += 1

    def end(self, rank: int) -> None:
        if self._steps % args.block == 0:
            self.took_s.append((time.process_time() - self._begun_s) / args.block)
            self._baton.give(rank)


turns = Turns()


def lightning_rank() -> int:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer(WIDTH, LAYERS)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def begin(*values: Any) -> None:
        if values[-1] % args.accumulate == 0:
            turns.begin()

    def end(trainer: Trainer, *values: Any) -> None:
        if (values[-1] + 1) % args.accumulate == 0:
            turns.end(trainer.global_rank)

    strategy: Any = "ddp"
    if not args.plain:
        from outlast.integrations.lightning_strategy import OutlastStrategy

        strategy = OutlastStrategy()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=RANKS,
        max_epochs=1,
        accumulate_grad_batches=args.accumulate,
        callbacks=[LambdaCallback(on_train_batch_start=begin, on_train_batch_end=end)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(data, BATCH))
    return trainer.global_rank


def transformers_rank() -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer(WIDTH, LAYERS)

        def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net, words)}

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, arguments: TrainingArguments, *_: Any, **__: Any) -> None:
            turns.end(arguments.process_index)

    arguments = TrainingArguments(
        str(args.folder / "out"),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=args.accumulate,
        save_strategy="no",
        logging_steps=10_000,
        report_to=[],
        disable_tqdm=True,
    )
    kind: Any = Trainer
    if not args.plain:
        from outlast.integrations.hugging_face_trainer import OutlastTrainer

        kind = OutlastTrainer
    kind(
        Model(),
        arguments,
        data_collator=lambda rows: {"words": torch.stack(rows)},
        train_dataset=data,
        callbacks=[Clock()],
    ).train()
    return arguments.process_index


def accelerate_rank() -> int:
    from accelerate import Accelerator

    kind: Any = Accelerator
    if not args.plain:
        from outlast.integrations.accelerate_loop import OutlastAccelerator

        kind = OutlastAccelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=args.accumulate)
    model = Transformer(WIDTH, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))

    def train(batches: Any) -> None:
        for words in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, words))
                optimizer.step()
                optimizer.zero_grad()

    if args.plain:
        for number, words in enumerate(loader):
            if number % args.accumulate == 0:
                turns.begin()
            train([words])
            if (number + 1) % args.accumulate == 0:
                turns.end(accelerator.process_index)
    else:
        for _ in accelerator.epochs(1):
            for batches in accelerator.batches(loader):
                turns.begin()
                accelerator.run(train, batches)
                turns.end(accelerator.process_index)
    return accelerator.process_index


rank = {
    "lightning": lightning_rank,
    "transformers": transformers_rank,
    "accelerate": accelerate_rank,
}[args.framework]()
(args.folder / f"turns-{rank}.json").write_text(json.dumps(turns.took_s))
(args.folder / "ledger").touch()
