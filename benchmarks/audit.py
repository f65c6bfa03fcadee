"""Cost of the checks that watch replicas and weights, as shares of a step.

Each vote digests windows of parameters, optimizer state and gradients; every 100 steps the rest is
digested, and all once an incident. Each attempt also digests one window of a parameter twice, to
find writes through `.data` before the vote. One
process, one thread, no collectives: a step under DDP is longer, and the shares smaller. The
alternative to each sample is all of it, in turn with the sample; the limit is one pass of the same
digest over as many bytes. Shares are of processor time. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import xxhash
from harness import Clock, Spread, clocked, load, median, spread, table, verdict
from torch import Tensor, nn
from workload import CONTEXT, WORDS, Transformer, loss_of

from outlast.launch.outlast_flags import AUDIT_EVERY
from outlast.transport import channel, messages
from outlast.worker.phases.phase_attempt import WINDOW_BYTES, WrittenWeights
from outlast.worker.state.audited_state import (
    REST,
    WHOLE,
    AuditedPart,
    collect,
    digest_kinds,
    digest_names,
    replica_set,
)
from outlast.worker.state.compared_windows import ComparedPiece, ComparedWindows
from outlast.worker.state.protected_state import ProtectedState

SHARE_MAX = 0.005  # of a step: half of what all sentinels may cost
SMALL = 400  # layers of the model of many small tensors
SEQUENCES = 8  # of a step, as examples/train_gpt.py has
SHAPES = {"1e6": (128, 4), "1e7": (384, 5), "1e8": (1024, 8)}  # width and layers by parameters
STEPS = {"1e8": 7}  # fewer of the largest, whose steps take seconds
PIECE_BYTES = 1 << 26


class Turn(NamedTuple):
    """One step, and one of each check right behind it."""

    step: Clock
    vote: Clock  # the windows that a vote compares
    rest: Clock
    whole: Clock
    window: Clock
    windows: Clock  # all weights and moments
    limit: Clock  # one pass over as many bytes as a vote compares, and two windows


class Cost(NamedTuple):
    """Medians of one model; shares of a step with their intervals."""

    name: str
    parameters: int
    tensors: int
    size_bytes: int
    vote_bytes: int
    turns: list[Turn]
    load: float

    def median_ms(self, field: str) -> float:
        return 1e3 * median([getattr(turn, field).cpu_s for turn in self.turns])

    def audit(self) -> Spread:
        return spread(
            [(t.vote.cpu_s + t.rest.cpu_s / AUDIT_EVERY) / t.step.cpu_s for t in self.turns]
        )

    def window(self) -> Spread:
        return spread([turn.window.cpu_s / turn.step.cpu_s for turn in self.turns])

    def wall(self) -> Spread:
        """Return the share of both by the clock on the wall."""
        return spread(
            [
                (t.vote.wall_s + t.rest.wall_s / AUDIT_EVERY + t.window.wall_s) / t.step.wall_s
                for t in self.turns
            ]
        )

    def limit(self) -> Spread:
        """Return the share that one pass over the same bytes would have."""
        return spread([turn.limit.cpu_s / turn.step.cpu_s for turn in self.turns])

    def sampled(self) -> tuple[Spread, Spread]:
        """Return the cost of a sample over that of all: of an audit, and of weights."""
        audits = spread([turn.vote.cpu_s / turn.whole.cpu_s for turn in self.turns])
        return audits, spread([turn.window.cpu_s / turn.windows.cpu_s for turn in self.turns])


def many_small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(SMALL)))


def measured(name: str, model: nn.Module, loss: Callable[[], Tensor], repeats: int) -> Cost:
    """Train the model for some steps, with each check behind each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = load()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    held = ProtectedState({"model": model, "optimizer": optimizer}, {})
    step()
    step()
    report(held, WHOLE)
    state = [leaf for k in collect(held).values() for leaf in k.values() if torch.is_tensor(leaf)]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state)
    windows = ComparedWindows(held, AUDIT_EVERY)
    vote_bytes = sum(map(compared_bytes, windows.take(0).pieces))
    data = bytes(min(PIECE_BYTES, vote_bytes + 2 * WINDOW_BYTES))
    turns = [
        Turn(
            step=clocked(step),
            vote=clocked(partial(share, windows, turn)),
            rest=clocked(partial(report, held, REST)),
            whole=clocked(partial(report, held, WHOLE)),
            window=clocked(partial(look_for_writes, held, turn, everything=False)),
            windows=clocked(partial(look_for_writes, held, turn, everything=True)),
            limit=clocked(partial(one_pass, data, vote_bytes + 2 * WINDOW_BYTES)),
        )
        for turn in range(repeats)
    ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(name, parameters, len(state), size_bytes, vote_bytes, turns, max(before, load()))


def share(windows: ComparedWindows, step: int) -> int:
    """All that a vote's comparison costs."""
    return windows.take(step).digest


def compared_bytes(piece: ComparedPiece) -> int:
    """Return how many bytes of a leaf are compared."""
    tensor = piece.leaf.tensor()
    return 0 if tensor is None else (piece.end - piece.start) * tensor.element_size()


def report(held: ProtectedState, part: AuditedPart) -> bytes:
    """All that an audit costs on the step path: digests, and the frame."""
    names = digest_names(collect(held, part))
    body = messages.Audited(
        generation=1, n=1, step=1, replica_set=replica_set(held) if part == WHOLE else b"",
        kinds=digest_kinds(names), part=part.number, parts=part.parts,
    )  # fmt: skip
    envelope = messages.MessageEnvelope(
        run="r", term=1, agent="a", incarnation=1, worker="w", seq=1, body=body
    )
    return channel.encode_frame(envelope, b"k" * 32)


def look_for_writes(held: ProtectedState, turn: int, *, everything: bool) -> None:
    """Digest what an attempt digests, at its start and before its vote."""
    if changed := WrittenWeights(held, everything=everything, turn=turn).changed():
        raise SystemExit(f"{changed} changed while nothing wrote to it")


def one_pass(data: bytes, size_bytes: int) -> None:
    """Digest as many bytes that lie together."""
    for start in range(0, size_bytes, len(data)):
        xxhash.xxh3_64_digest(memoryview(data)[: size_bytes - start])


def show(costs: list[Cost]) -> None:
    table(
        ("model", "parameters", "tensors", "MB", "MB a vote", "step ms", "vote ms", "all ms",
         "window ms", "all windows ms", "load"),
        [
            (
                cost.name, f"{cost.parameters:.2e}", str(cost.tensors),
                f"{cost.size_bytes / 1e6:.0f}", f"{cost.vote_bytes / 1e6:.2f}",
                *(f"{cost.median_ms(f):.3f}" for f in ("step", "vote", "whole", "window",
                                                       "windows")),
                f"{cost.load:.1f}",
            )
            for cost in costs
        ],
    )  # fmt: skip
    print()
    table(
        ("model", "votes and audits", "windows", "both, wall", "limit of both",
         "vote / all", "window / all"),
        [
            (
                cost.name, *(percent(s) for s in (cost.audit(), cost.window(), cost.wall(),
                                                  cost.limit())),
                *(percent(s) for s in cost.sampled()),
            )
            for cost in costs
        ],
    )  # fmt: skip


def percent(share: Spread) -> str:
    return f"{100 * share.median:.3f} % ({100 * share.low:.3f} to {100 * share.high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25, help="turns of each model")
    parser.add_argument("--only", choices=[*SHAPES, "small"], help="one model alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = torch.randint(0, WORDS, (SEQUENCES, CONTEXT + 1))
    costs: list[Cost] = []
    for name, (width, layers) in SHAPES.items():
        if args.only in (None, name):
            gpt = Transformer(width, layers)
            repeats = min(args.repeats, STEPS.get(name, args.repeats))
            costs.append(measured(name, gpt, partial(loss_of, gpt, words), repeats))
    if args.only in (None, "small"):
        small, rows = many_small(), torch.randn(64, 32)
        costs.append(measured("many small", small, lambda: small(rows).square().mean(),
                              args.repeats))  # fmt: skip
    show(costs)
    figures = {
        cost.name: {
            "parameters": cost.parameters, "tensors": cost.tensors, "size_bytes": cost.size_bytes,
            "step_ms": cost.median_ms("step"), "audits": cost.audit(), "windows": cost.window(),
            "both_wall": cost.wall(), "limit": cost.limit(), "load": cost.load,
        }
        for cost in costs
    }  # fmt: skip
    bars = {}
    for cost in costs:
        bars[f"audits, share of a step, {cost.name}"] = (cost.audit().median, SHARE_MAX)
        bars[f"windows, share of a step, {cost.name}"] = (cost.window().median, SHARE_MAX)
    return verdict("audit", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
