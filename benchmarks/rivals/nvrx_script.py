"""The plain script under NVRx's in-process restart, as its advanced example: model and optimizer
outside of the function that is called again, its state from a checkpoint. A third process waits
in reserve."""

import os
from datetime import timedelta
from typing import Optional

os.environ["TORCH_CPP_LOG_LEVEL"] = "error"  # as its guide advises
import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from job_parts import BATCH, Record, Words, arguments, loss_of, transformer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
replica = transformer(args)
optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3)
data = Words(args)
checkpoint = args.folder / "checkpoint"
port = int(os.environ["MASTER_PORT"])
often = timedelta(milliseconds=50)
tuned = {
    "monitor_thread_interval": often,
    "monitor_process_interval": often,
    "heartbeat_interval": often,
    "progress_watchdog_interval": often,
    "last_call_wait": often,
    "heartbeat_timeout": timedelta(seconds=2),
    "soft_timeout": timedelta(seconds=3),
    "hard_timeout": timedelta(seconds=4),
    "termination_grace_time": timedelta(seconds=0),
}


@inprocess.Wrapper(
    store_kwargs={"port": port + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(args.ranks),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    monitor_process_logfile=str(args.folder / "monitor-{rank}.log"),
    **(tuned if args.tuned else {}),
)
def main(call_wrapper: Optional[inprocess.CallWrapper] = None):  # noqa: UP045 - it looks for this
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        port + 2 + call_wrapper.iteration,
        ranks,
        is_master=rank == 0,
        multi_tenant=True,
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=10)
    )
    model = DistributedDataParallel(replica)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    record = Record(args)

    def train_step(words):
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        return loss

    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        replica.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    begun = step
    for epoch in range(begun // args.steps, args.epochs):
        sampler.set_epoch(epoch)
        for batch, words in enumerate(loader, start=1):
            if epoch * args.steps + batch <= begun:
                continue
            loss = train_step(words)
            step += 1
            record.step(rank, step, words, loss)
            if step % args.save_every == 0:
                dist.barrier()
                if rank == 0:
                    state = {
                        "model": replica.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    }
                    with call_wrapper.atomic():
                        torch.save(state, checkpoint.with_suffix(".new"))
                        checkpoint.with_suffix(".new").replace(checkpoint)

    record.end(rank, model)
    dist.destroy_process_group()


main()
