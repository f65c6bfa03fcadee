"""A script with Accelerate and a loop of its own: accumulation, metrics, a checkpoint each epoch.
`--plain` is under torchrun, with Accelerate's own loop."""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--accumulate", type=int, default=3)
parser.add_argument("--die", nargs="*", default=[])  # RANK:PLACE:STEP
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)


def die(place: str, step: int) -> None:
    mark = f"{accelerator.process_index}:{place}:{step}"
    if mark in options.die:
        try:
            (options.out / mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


set_seed(7)
if options.plain:
    Kind = Accelerator
else:
    from outlast.integrations.accelerate_loop import OutlastAccelerator as Kind
accelerator = Kind(cpu=True, gradient_accumulation_steps=options.accumulate)
inputs = torch.randn(83, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.9)
model, optimizer, loader, tests, scheduler = accelerator.prepare(
    model,
    optimizer,
    DataLoader(data, batch_size=4, shuffle=True),
    DataLoader(data, batch_size=10),
    scheduler,
)
state = {"micro": 0, "steps": 0}
losses, errors, sums = [], [], []


def train(batches) -> list:
    """Train on the batches of a step: the body is that of a plain loop over batches."""
    found = []
    for x, y in batches:
        with accelerator.accumulate(model):
            state["micro"] += 1
            die("forward", state["micro"])
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            die("backward", state["micro"])
            norm = None
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found.append([float(loss.detach()), norm, accelerator.sync_gradients])
    return found


def evaluate() -> list:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in tests:
            found, wanted = accelerator.gather_for_metrics((model(x), y))
            total += float((found - wanted).abs().sum())
            count += len(wanted)
            die("evaluation", state["steps"])
    model.train()
    return [total / count, count]


def each_batch():
    """Yield the batches one by one, as Accelerate's own loop."""
    for batch in loader:
        yield [batch]


epochs = range(3) if options.plain else accelerator.epochs(3)
for epoch in epochs:
    die("epoch", epoch)
    for batches in each_batch() if options.plain else accelerator.batches(loader):
        found = train(batches) if options.plain else accelerator.run(train, batches)
        losses += found
        state["steps"] += sum(1 for each in found if each[2])
        die("between", state["steps"])
    error = evaluate() if options.plain else accelerator.run(evaluate)
    errors.append(error)
    mean = torch.tensor([losses[-1][0]])
    sums.append(float(accelerator.reduce(mean, "mean")))
    accelerator.wait_for_everyone()
    accelerator.save_state(options.out / f"ckpt-{epoch}")
    accelerator.wait_for_everyone()  # each rank has written its own files
    die("saved", epoch)

digest = hashlib.sha256()
for name, tensor in sorted(accelerator.unwrap_model(model).state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
(options.out / f"{accelerator.process_index}.json").write_text(
    json.dumps(
        {
            "weights": digest.hexdigest(),
            "losses": losses,
            "errors": errors,
            "sums": sums,
            "state": state,
            "rate": scheduler.get_last_lr(),
            "iteration": [loader.iteration, tests.iteration],
            "files": sorted(path.name for path in (options.out / "ckpt-2").iterdir()),
        }
    )
)
