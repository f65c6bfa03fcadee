"""Forward-forward: each layer has its own loss, phase and DDP; the layers are protected alone."""

import torch
from digests import write_digests
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)

layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
ranked = [DistributedDataParallel(layer) for layer in layers]
optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
torch.manual_seed(50 + session.rank)

session.protect(
    lower=layers[0], upper=layers[1], first=optimizers[0], second=optimizers[1]
)  # and not the DDP modules around them
threshold = 2.0
goodness = []


def layer_step(number, good, bad):
    optimizers[number].zero_grad()
    up = ranked[number](good).relu().square().sum(1)
    down = ranked[number](bad).relu().square().sum(1)
    loss = (functional.softplus(threshold - up) + functional.softplus(down - threshold)).mean()
    loss.backward()
    goodness.append(loss.item())
    optimizers[number].step()


for _index in session.batches(None, until=10):
    good, bad = torch.randn(4, 6) + 1, torch.randn(4, 6)
    for number, layer in enumerate(layers):
        session.run(layer_step, number, good, bad)
        with torch.no_grad():
            good, bad = layer(good).relu(), layer(bad).relu()
    threshold = 0.9 * threshold + 0.1 * goodness[-1]
write_digests(session, model=layers, a=optimizers[0], threshold=threshold, goodness=goodness)
