"""The plain script under Outlast. `--tuned` asks for a hot spare."""

import torch
import torch.distributed as dist
from job_parts import BATCH, Record, Words, arguments, loss_of, transformer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import outlast

args = arguments()
session = outlast.init(hot_spares=args.tuned)
dist.init_process_group("gloo")
model = DistributedDataParallel(transformer(args))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Words(args)
sampler = DistributedSampler(data)
loader = DataLoader(data, BATCH, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)
record = Record(args)


def train_step(words):
    optimizer.zero_grad()
    loss = loss_of(model, words)
    loss.backward()
    optimizer.step()
    return loss


step = 0
for epoch in session.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for words in session.batches(loader):
        loss = session.run(train_step, words)
        step += 1
        record.step(dist.get_rank(), step, words, loss)

record.end(dist.get_rank(), model)
dist.destroy_process_group()
