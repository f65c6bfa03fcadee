"""An image classifier: convolutions with BatchNorm, and loader processes that augment.

outlast run --nproc-per-node 2 --spares 1 examples/train_images.py
python examples/train_images.py                        # the same training on one rank

The images are synthetic: bright stripes at one of eight angles, with noise.
"""

import argparse
import hashlib
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import outlast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--images", type=int, default=1024, help="images an epoch, all ranks together")
parser.add_argument("--batch", type=int, default=16, help="images a rank and step")
parser.add_argument("--workers", type=int, default=2, help="loader processes a rank")
args = parser.parse_args()

ANGLES, SIDE = 8, 32


def stripes(angle: int, phase: float) -> Tensor:
    """Return a 1 x SIDE x SIDE image of stripes."""
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    turn = math.pi * angle / ANGLES
    return torch.sin(9 * (x * math.cos(turn) + y * math.sin(turn)) + phase)[None]


class Stripes(Dataset[tuple[Tensor, int]]):
    """Images whose label is the angle of their stripes.

    Phase and noise are drawn when an image is loaded, in the loader's process.
    """

    def __init__(self, images: int, *, augment: bool) -> None:
        self.images = images
        self.augment = augment

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        angle = index % ANGLES
        if not self.augment:
            return stripes(angle, phase=index), angle
        phase = torch.rand(()).item() * 2 * math.pi
        return stripes(angle, phase) + 0.8 * torch.randn(1, SIDE, SIDE), angle


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


# Spares execute what stands above init() while they wait.
training, test = Stripes(args.images, augment=True), Stripes(64, augment=False)

session = outlast.init()

torch.manual_seed(0)
network = nn.Sequential(
    convolution(1, 16),
    convolution(16, 32),
    convolution(32, 64),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(64, ANGLES),
).to(session.device)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
sampler = DistributedSampler(training, session.world_size, session.rank)
loader = DataLoader(training, args.batch, sampler=sampler, num_workers=args.workers)
torch.manual_seed(1 + session.rank)  # each rank draws its own noise and dropout masks

session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


def train_step(batch: tuple[Tensor, Tensor]) -> float:
    images, angles = (tensor.to(session.device) for tensor in batch)
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), angles)
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate() -> float:
    """Return the accuracy on the test images, of which each rank classifies its share."""
    model.eval()
    mine = [test[index] for index in range(session.rank, len(test), session.world_size)]
    images = torch.stack([image for image, _ in mine]).to(session.device)
    angles = torch.tensor([angle for _, angle in mine], device=session.device)
    correct = (network(images).argmax(dim=1) == angles).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


for batch in session.batches(loader, epochs=args.epochs):
    loss = session.run(train_step, batch)
    if session.step_index % len(loader) == 0:
        scheduler.step()
        accuracy = session.run(evaluate)
        if session.rank == 0:
            epoch = session.step_index // len(loader)
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.1%}", flush=True)

if session.rank == 0:
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():  # BatchNorm's running statistics included
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print(f"parameters sha256 {digest.hexdigest()}", flush=True)
