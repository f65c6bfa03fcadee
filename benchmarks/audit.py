"""Cost of audits: a part of the state every 100 steps, all of it once an incident.

One process, one thread, no collectives: a step under DDP is longer, and the share smaller.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from harness import median, table, verdict
from torch import Tensor, nn
from workload import BATCH, CONTEXT, WORDS, Transformer, loss_of

from outlast.launch.torchrun_arguments import AUDIT_EVERY
from outlast.transport import channel, messages
from outlast.worker.auditor import PARTS
from outlast.worker.state.audited_state import (
    WHOLE,
    AuditedPart,
    collect,
    digest_kinds,
    digest_names,
    replica_set,
)
from outlast.worker.state.protected_state import ProtectedState

SHARE_MAX = 0.002  # of a step
SMALL = 400  # layers of the model of many small tensors


class Cost(NamedTuple):
    """Medians in seconds; `share`: of a step, at the default interval."""

    name: str
    tensors: int
    size_bytes: int
    step_s: float
    part_s: float
    whole_s: float

    @property
    def share(self) -> float:
        return self.part_s / (AUDIT_EVERY * self.step_s)


def many_small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(SMALL)))


def measured(name: str, model: nn.Module, loss: Callable[[], Tensor], repeats: int) -> Cost:
    """Train the model for some steps, then audit it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    steps_s = [timed(step) for _ in range(repeats + 2)][2:]
    held = ProtectedState({"model": model, "optimizer": optimizer}, {})
    report(held, WHOLE)
    parts = [AuditedPart(turn % PARTS, PARTS) for turn in range(4 * PARTS)]
    parts_s = [timed(partial(report, held, part)) for part in parts]
    whole_s = [timed(lambda: report(held, WHOLE)) for _ in range(5)]
    tensors = [
        leaf for kind in collect(held).values() for leaf in kind.values() if torch.is_tensor(leaf)
    ]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Cost(name, len(tensors), size_bytes, median(steps_s), median(parts_s), median(whole_s))


def report(held: ProtectedState, part: AuditedPart) -> bytes:
    """All that an audit costs on the step path: digests, and the frame."""
    names = digest_names(collect(held), part)
    body = messages.Audited(
        generation=1, n=1, step=1, replica_set=replica_set(held) if part == WHOLE else b"",
        kinds=digest_kinds(names), part=part.number, parts=part.parts,
    )  # fmt: skip
    envelope = messages.MessageEnvelope(
        run="r", term=1, agent="a", incarnation=1, worker="w", seq=1, body=body
    )
    return channel.encode_frame(envelope, b"k" * 32)


def timed(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = torch.randint(0, WORDS, (BATCH, CONTEXT + 1))
    gpt, small, rows = Transformer(), many_small(), torch.randn(64, 32)
    costs = [
        measured("transformer", gpt, lambda: loss_of(gpt, words), args.repeats),
        measured("many small tensors", small, lambda: small(rows).square().mean(), args.repeats),
    ]
    table(
        ("model", "tensors", "MB", "step ms", "part ms", "all ms", f"share, every {AUDIT_EVERY}"),
        [
            (
                cost.name, str(cost.tensors), f"{cost.size_bytes / 1e6:.0f}",
                f"{cost.step_s * 1e3:.1f}", f"{cost.part_s * 1e3:.2f}",
                f"{cost.whole_s * 1e3:.1f}", f"{100 * cost.share:.4f} %",
            )
            for cost in costs
        ],
    )  # fmt: skip
    figures = {cost.name: {**cost._asdict(), "share": cost.share} for cost in costs}
    bars = {f"audits, share of a step, {cost.name}": (cost.share, SHARE_MAX) for cost in costs}
    return verdict("audit", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
