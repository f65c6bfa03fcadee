"""The script that is ported to each system: DDP under torchrun, which saves nothing."""

import torch
import torch.distributed as dist
from job_parts import BATCH, Record, Words, arguments, loss_of, transformer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
dist.init_process_group("gloo")
model = DistributedDataParallel(transformer(args))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = Words(args)
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
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for words in loader:
        loss = train_step(words)
        step += 1
        record.step(dist.get_rank(), step, words, loss)

record.end(dist.get_rank(), model)
dist.destroy_process_group()
