"""Training script for ckpt-chaos (make judge), which kills writers and compares results.

python tests/soak/judged_training.py ROOT          # trains to step 6, from the newest checkpoint on
python tests/soak/judged_training.py --show ROOT   # what the newest checkpoint holds
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from outlast.checkpoint import Checkpointer

STEPS = 6


def main() -> int:
    show, root = sys.argv[1] == "--show", Path(sys.argv[-1])
    # The judge follows one process, and no child of it: here that is to be the keeper.
    os.environ.pop("CKPT_CHAOS_ARMED", None)
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(root, on_failure="warn" if show else "raise") as saves:
        restored = saves.load(state)
        begun = restored.step if restored else 0
        if show:
            weight = model.weight.detach().double()
            print(begun, weight.sum().item().hex(), weight.norm().item().hex())
            return 0
        print(f"resumed from step {begun}")
        for step in range(begun, STEPS):
            model(torch.randn(8, 200)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                saves.save(step + 1, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
