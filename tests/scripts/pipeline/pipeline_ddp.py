"""1F1B on a 2x2 mesh whose stages are DDP modules: torch reduces with the last micro-batch."""
# ranks: 4

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
index = mesh.get_local_rank("stage")
torch.manual_seed(index)
inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
group = mesh.get_group("replica")
model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=0.0005)
stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + mesh.get_local_rank("replica"))
session.protect(schedule=schedule, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    given, target = torch.randn(8, 8), torch.randn(8, 8)
    losses = []
    if stage.is_first:
        schedule.step(given)
    else:
        schedule.step(target=target, losses=losses)
        session.report(loss=sum(loss.item() for loss in losses))
    optimizer.step()


for number in session.batches(None, until=10):
    session.run(train_step, number)
write_digests(session, model=model, optimizer=optimizer)
