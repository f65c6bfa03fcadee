"""An image classifier in the style of public trainers: meters, a validation, the best checkpoint.

torchrun --standalone --nproc-per-node 2 examples/plain_classifier.py
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--out", type=Path, default=Path("runs/classifier"))
best_acc1 = 0.0


class Stripes(Dataset):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed  # noisy stripes, whose direction is the class

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 100_000 + index)
        target = index % 8
        x, y = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        angle = torch.tensor(target * torch.pi / 8)
        image = torch.sin(x * angle.cos() + y * angle.sin())
        return image + torch.randn(3, 16, 16, generator=generator), target


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    main_worker(dist.get_rank(), args)


def main_worker(rank, args):
    global best_acc1
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 8)),
    )
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    train_dataset, val_dataset = Stripes(640, seed=1), Stripes(160, seed=2)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, 16, sampler=train_sampler, num_workers=1)
    val_loader = DataLoader(val_dataset, 16, sampler=val_sampler)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if rank == 0 and is_best:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save({"epoch": epoch + 1, "model": model.state_dict()}, args.out / "best.pth")

    if rank == 0:
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        print(f"best {best_acc1:.2f}, parameters sha256 {digest.hexdigest()}", flush=True)


def train(train_loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter("loss", ".4f"), AverageMeter("acc@1", ".2f")
    model.train()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        acc1, _ = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if i % 4 == 0:
            print(f"epoch {epoch} [{i + 1}/{len(train_loader)}] {losses} {top1}", flush=True)


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("loss", ".4f"), AverageMeter("acc@1", ".2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0], images.size(0))
    losses.all_reduce()
    top1.all_reduce()
    print(f"* {top1} {losses}", flush=True)
    return top1.avg


class AverageMeter:
    def __init__(self, name, fmt):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total)
        self.avg = (total[0] / total[1]).item()

    def __str__(self):
        return f"{self.name} {self.val:{self.fmt}} ({self.avg:{self.fmt}})"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, prediction = output.topk(max(topk), 1)
        correct = prediction.t().eq(target)
        return [correct[:k].float().sum(0).sum(0, keepdim=True) * 100 / len(target) for k in topk]


if __name__ == "__main__":
    main()
