"""A script with Hugging Face's Trainer. `--plain` is under torchrun."""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--die", nargs="*", default=[])  # RANK:PLACE:STEP
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)


def die(place: str, step: int) -> None:
    mark = f"{args.process_index}:{place}:{step}"
    if mark in options.die:
        try:
            (options.out / mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Data(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict:
        return {"x": self.x[index], "labels": self.x[index].sum(dim=0, keepdim=True)}


class Model(nn.Module):
    """A small regression with dropout, and a count that no one protects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.calls = 0

    def forward(self, x, labels=None) -> dict:
        if self.training:
            self.calls += 1
            die("forward", trainer.state.global_step)
            die(f"batch{self.calls % 6}", trainer.state.global_step)
        elif trainer.state.global_step:
            die("evaluation", trainer.state.global_step)
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class History(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.errors, self.rates, self.substeps = [], [], [], 0

    def on_step_begin(self, args, state, control, lr_scheduler, **kwargs) -> None:
        self.rates.append(lr_scheduler.get_last_lr())
        die("step_begin", state.global_step)

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        self.substeps += 1
        die(f"substep{self.substeps % 6}", state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        die("backward", state.global_step)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.steps.append([state.global_step, round(state.epoch, 6)])
        die("step_end", state.global_step)

    def on_evaluate(self, args, state, control, metrics, **kwargs) -> None:
        self.errors.append(metrics["eval_error"])
        die("evaluated", state.global_step)

    def on_save(self, args, state, control, **kwargs) -> None:
        die("saved", state.global_step)

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        die("epoch_begin", state.global_step)


def compute_metrics(predictions) -> dict:
    return {"error": float(np.abs(predictions.predictions - predictions.label_ids).mean())}


args = TrainingArguments(
    output_dir=str(options.out / "ckpt"),
    use_cpu=True,
    num_train_epochs=3,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=options.accumulate,
    per_device_eval_batch_size=8,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=4,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="error",
    greater_is_better=False,
    report_to=[],
    disable_tqdm=True,
)
if options.plain:
    Kind = Trainer
else:
    from outlast.integrations.hugging_face_trainer import OutlastTrainer as Kind
set_seed(7)
model, history = Model(), History()
trainer = Kind(
    model=model,
    args=args,
    train_dataset=Data(),
    eval_dataset=Data(),
    compute_metrics=compute_metrics,
    callbacks=[history, EarlyStoppingCallback(3)],
)
output = trainer.train()
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
timed = ("runtime", "per_second")
(options.out / f"{args.process_index}.json").write_text(
    json.dumps(
        {
            "weights": digest.hexdigest(),
            "loss": output.training_loss,
            "calls": model.calls,
            "steps": history.steps,
            "substeps": history.substeps,
            "errors": history.errors,
            "rates": history.rates,
            "best": [trainer.state.best_metric, trainer.state.best_global_step],
            "log": [
                {name: x for name, x in each.items() if not name.endswith(timed)}
                for each in trainer.state.log_history
            ],
            "files": sorted(path.name for path in (options.out / "ckpt").iterdir()),
        }
    )
)
