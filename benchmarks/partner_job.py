"""Steps of a rank with own state of some size: `partner_job OUT STEPS BYTES [alone]`.

With `alone` the ranks exchange no own state with their partners. OUT/RANK.json has the durations
of the steps in seconds, without the first ten.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast.transport.partner_memory import Slots
from outlast.worker.phases.partner_copies import PartnerCopies

WARM = 10
out, steps, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if "alone" in sys.argv:
    connect = PartnerCopies.connect

    def connect_nobody(
        self: PartnerCopies, generation: int, seats: tuple[int, ...], n: int, carried: Slots
    ) -> None:
        del seats
        connect(self, generation, (), n, carried)

    PartnerCopies.connect = connect_nobody
session = outlast.init()
torch.set_num_threads(1)
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.protect(model=model, optimizer=optimizer)
states = [random.Random(2 * session.rank + which).randbytes(size) for which in (0, 1)]
own = states[0]
batch = torch.ones(4, 64)


def train_step(step: int) -> int:
    global own
    own = states[step % 2]
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    return step


times: list[float] = []
for step in session.batches(list(range(steps)), until=steps):
    began = time.monotonic()
    session.run(train_step, step)
    times.append(time.monotonic() - began)
out.mkdir(exist_ok=True)
(out / f"{session.rank}.json").write_text(json.dumps(times[WARM:]))
