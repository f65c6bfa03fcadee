"""A small GPT that learns bytes from the source code of Python's own standard library.

outlast run --nproc-per-node 4 --spares 1 examples/train_gpt.py    # kill, stop, break its ranks
python examples/train_gpt.py                                       # the same training, alone
"""

import argparse
import hashlib
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import outlast

parser = argparse.ArgumentParser(description=__doc__)
for name, default in {"steps": 200, "seed": 0, "width": 128, "layers": 4, "heads": 4}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--evaluate-every", type=int, default=50, help="steps")
parser.add_argument("--hot-spares", action="store_true", help="spares build the model in advance")
parser.add_argument("--bench", action="store_true", help="one epoch of --steps, with checksums")
args = parser.parse_args()


class Block(nn.Module):
    """Attention, then a perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


class Windows(Dataset[Tensor]):
    """A text, cut into windows of `context` bytes and the one that follows."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        window = self.text[index * self.context :][: self.context + 1]
        return torch.frombuffer(bytearray(window), dtype=torch.uint8).long()


# What stands above init() a spare has done in advance.
modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))  # its top-level modules
text = b"".join(module.read_bytes() for module in modules)
cut = len(text) * 95 // 100
lessons, exam = Windows(text[:cut], args.context), Windows(text[cut:], args.context)

session = outlast.init(hot_spares=args.hot_spares)  # a seat is taken, the process group is ready

torch.manual_seed(args.seed)
gpt = GPT(args.width, args.layers, args.heads, args.context).to(session.device)
model = DistributedDataParallel(gpt)
optimizer = AdamW(model.parameters(), lr=args.lr)
if args.bench:  # where ranks leave, it takes more steps
    lessons = Subset(lessons, range(args.steps * session.world_size * args.batch))
scheduler = CosineAnnealingLR(optimizer, T_max=args.steps)
sampler = DistributedSampler(lessons, session.world_size, session.rank, seed=args.seed)
loader = DataLoader(lessons, args.batch, sampler=sampler, drop_last=True)
torch.manual_seed(args.seed + 1 + session.rank)  # every rank drops out other neurons

session.protect(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)


def loss_of(windows: Tensor) -> Tensor:
    windows = windows.to(session.device)
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train_step(windows: Tensor) -> float:
    model.train()
    optimizer.zero_grad()
    loss = loss_of(windows)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    session.report(loss=loss.item())  # here it is kept even if this very rank dies while it steps
    if args.bench and not session.is_idle:
        session.report(batch=zlib.crc32(windows.numpy().tobytes()))
    optimizer.step()  # the gate: nothing has changed before all ranks have come this far
    scheduler.step()
    return loss.item()


@torch.no_grad()
def evaluate() -> float:
    model.eval()
    mine = range(session.rank * 32, session.rank * 32 + 32)
    loss = loss_of(torch.stack([exam[index] for index in mine]))
    dist.all_reduce(loss)
    return loss.item() / session.world_size


ends = {"epochs": 1} if args.bench else {"until": args.steps}
for batch in session.batches(loader, **ends):
    loss = session.run(train_step, batch)  # redone until the whole job has it; returns once
    if session.step_index % args.evaluate_every == 0:
        exam_loss = session.run(evaluate)
        session.report(exam_loss=exam_loss)
        if session.rank == 0:
            print(f"step {session.step_index}: loss {loss:.4f}, exam {exam_loss:.4f}", flush=True)

if session.rank == 0:
    digest = hashlib.sha256()
    for parameter in gpt.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(f"parameters sha256 {digest.hexdigest()}", flush=True)
