"""examples/plain_gpt.py, ported to Outlast by nine added lines and an indentation.

outlast run --nproc-per-node 2 --spares 1 examples/ported_gpt.py
"""

import argparse
import hashlib
import math
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.nn.parallel import DistributedDataParallel

import outlast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-iters", type=int, default=120)
parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
args = parser.parse_args()
max_iters, eval_interval, eval_iters, log_interval = args.max_iters, 20, 4, 10
block_size, batch_size, gradient_accumulation_steps = 32, 4, 2
learning_rate, warmup_iters, grad_clip, dropout = 2e-3, 10, 1.0, 0.1

session = outlast.init()
ddp = int(os.environ.get("RANK", -1)) != -1  # a run of several ranks
if ddp:
    dist.init_process_group(backend="gloo")
rank = int(os.environ["RANK"]) if ddp else 0
master_process = rank == 0
torch.manual_seed(1337 + rank)
ctx = nullcontext()  # torch.amp.autocast("cuda", torch.bfloat16) on a GPU
modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
text = np.frombuffer(b"".join(module.read_bytes() for module in modules), dtype=np.uint8)
splits = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split):
    data = splits[split]
    places = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack(
        [torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in places]
    )
    return x[:, :-1], x[:, 1:]


class GPT(nn.Module):
    def __init__(self, width=48, heads=4):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x, y):
        mask = torch.ones(2 * x.shape[1:]).triu(1).bool()
        hidden = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        logits = self.head(self.block(hidden, src_mask=mask, is_causal=True)).flatten(0, 1)
        return logits, F.cross_entropy(logits, y.flatten())


model = GPT()
scaler = torch.amp.GradScaler("cuda", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * ratio)))


X, Y = get_batch("train")
iter_num, best_val_loss = 0, 1e9
raw_model = model.module if ddp else model
session.protect(model=model, optimizer=optimizer, scaler=scaler)
for _ in session.batches(None, until=max_iters + 1):
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                args.out.mkdir(parents=True, exist_ok=True)
                state = {"model": raw_model.state_dict(), "iter_num": iter_num}
                torch.save(state, args.out / "ckpt.pt")

    def train_step():
        global X, Y
        for micro_step in range(gradient_accumulation_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            with ctx:
                _, loss = model(X, Y)
                loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")  # the next batch, while the model computes
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    loss = session.run(train_step)
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}", flush=True)
    iter_num += 1
    if iter_num > max_iters:
        break

if master_process:
    digest = hashlib.sha256()
    for parameter in raw_model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"best {best_val_loss:.6f}, parameters sha256 {digest.hexdigest()}", flush=True)
if ddp:
    dist.destroy_process_group()
