"""The GPT of train_gpt.py under torchft, as train_ddp.py of torchft has it: a replica group a rank.

`outlast bench --strategy torchft` starts it: a `torchft_lighthouse`, and a `torchrun` for each
replica group. Model, text and step are those of train_gpt.py. BENCH_FOLDER gets a log and the
loader's position of each group.
"""

import hashlib
import importlib
import json
import math
import os
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.optim import AdamW
from torch.utils.data import Subset
from torchdata.stateful_dataloader import StatefulDataLoader

torchft: Any = importlib.import_module("torchft")
transports: Any = importlib.import_module("torchft.checkpointing.pg_transport")

# Arguments, model and text of train_gpt.py: what stands above its init().
shared: dict[str, Any] = {"__name__": "train_gpt", "__doc__": __doc__}
source = Path(__file__).with_name("train_gpt.py")
exec(compile(source.read_text().partition("\nsession = ")[0], str(source), "exec"), shared)
args = shared["args"]

folder = Path(os.environ["BENCH_FOLDER"])
group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
position = folder / f"{group}.position"
log = (folder / f"{group}.jsonl").open("a")
print(json.dumps({"pid": os.getpid(), "t_ns": time.time_ns()}), file=log, flush=True)

torch.manual_seed(args.seed)
gpt = shared["GPT"](args.width, args.layers, args.heads, args.context)


def load_state_dict(state: dict[str, Any]) -> None:
    gpt.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def state_dict() -> dict[str, Any]:
    return {"model": gpt.state_dict(), "optim": optimizer.state_dict()}


gloo = torchft.ProcessGroupGloo(timeout=timedelta(seconds=5))
manager = torchft.Manager(
    pg=gloo,
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"train_gpt_{group}",
    timeout=timedelta(seconds=30),
    checkpoint_transport=transports.PGTransport(gloo, timedelta(seconds=10), torch.device("cpu")),
)
model = torchft.DistributedDataParallel(manager, gpt)
optimizer = torchft.Optimizer(manager, AdamW(gpt.parameters(), lr=args.lr))
lessons = Subset(shared["lessons"], range(args.steps * groups * args.batch))
sampler = torchft.DistributedSampler(
    lessons,
    replica_rank=group,
    num_replica_groups=groups,
    group_rank=0,
    num_replicas=1,
    shuffle=True,
    seed=args.seed,
)
loader = StatefulDataLoader(lessons, batch_size=args.batch, sampler=sampler, drop_last=True)
if position.exists():
    loader.load_state_dict(torch.load(position, weights_only=True))
torch.manual_seed(args.seed + 1 + group)


def train_step(windows: torch.Tensor) -> None:
    begun = manager.current_step()
    for settings in optimizer.param_groups:
        settings["lr"] = args.lr * (1 + math.cos(math.pi * min(1.0, begun / args.steps))) / 2
    optimizer.zero_grad()  # a quorum is formed
    logits = model(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(gpt.parameters(), max_norm=1.0)
    counts = manager.is_participating()  # not while its state comes from another group
    optimizer.step()
    if manager.current_step() > begun and counts:
        line = {
            "step": manager.current_step(),
            "batch": zlib.crc32(windows.numpy().tobytes()),
            "loss": loss.item(),
            "t_ns": time.time_ns(),
        }
        print(json.dumps(line), file=log, flush=True)
        torch.save(loader.state_dict(), folder / f"{group}.new")
        (folder / f"{group}.new").replace(position)


while manager.current_step() < args.steps:
    for batch in loader:
        train_step(batch)
        if manager.current_step() >= args.steps:
            break

digest = hashlib.sha256()
for parameter in gpt.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
print(json.dumps({"digest": digest.hexdigest(), "t_ns": time.time_ns()}), file=log, flush=True)
