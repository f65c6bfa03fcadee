"""Sample states for DCP, and their comparison bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def state(seed: int) -> dict[str, Any]:
    """Return a state of everything that DCP accepts: nested, many types, objects among tensors."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.randn(5, 3).bfloat16().t(),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn),
        "wide": torch.randn(3, dtype=torch.complex128),
        "truth": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(seed),
        "step": seed,
        "words": {"name": f"run {seed}", "list": [1, {"x": 2.5}]},
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}").items()}
    return {name: value}


def bits(value: Any) -> Any:
    """Return a comparable value: of a tensor its type, shape and bytes."""
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.contiguous().view(-1)
    return value.dtype, value.shape, flat.view(torch.uint8).numpy().tobytes()


def same(one: Any, two: Any) -> bool:
    one, two = ({name: bits(v) for name, v in flat(each).items()} for each in (one, two))
    return one == two
