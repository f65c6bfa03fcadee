"""The plain script with asynchronous checkpoints of torch.distributed.checkpoint, as its recipes
advise: the state in one Stateful, one save at a time, a directory for each."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_parts import BATCH, Record, Words, arguments, loss_of, transformer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
dist.init_process_group("gloo")
savers = dist.new_group(backend="gloo")  # a save runs beside the reductions of the next steps
model = DistributedDataParallel(transformer(args))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Words(args)
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler)
record = Record(args)


class Progress(Stateful):
    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    def load_state_dict(self, state_dict):
        global step
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        step = state_dict["step"]


def train_step(words):
    optimizer.zero_grad()
    loss = loss_of(model, words)
    loss.backward()
    optimizer.step()
    return loss


step, saving = 0, None
complete = sorted(int(path.parent.name) for path in args.folder.glob("checkpoints/*/.metadata"))
if complete:
    dcp.load({"app": Progress()}, checkpoint_id=args.folder / f"checkpoints/{complete[-1]}")
begun = step
for epoch in range(begun // args.steps, args.epochs):
    sampler.set_epoch(epoch)
    for batch, words in enumerate(loader, start=1):
        if epoch * args.steps + batch <= begun:
            continue
        loss = train_step(words)
        step += 1
        record.step(dist.get_rank(), step, words, loss)
        if step % args.save_every == 0:
            if saving is not None:
                saving.result()
            saving = dcp.async_save(
                {"app": Progress()},
                checkpoint_id=args.folder / f"checkpoints/{step}",
                process_group=savers,
            )

if saving is not None:
    saving.result()
record.end(dist.get_rank(), model)
dist.destroy_process_group()
