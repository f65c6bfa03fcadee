"""Element types that a checkpoint can keep, as torch has them."""

from __future__ import annotations

import torch

from outlast.checkpoint.dtypes import ITEM_BYTES

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)
}
