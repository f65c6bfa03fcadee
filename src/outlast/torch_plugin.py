"""The backend "outlast" in every process that imports torch (entry points, torch-versions.md).

Each `import torch` runs `offer_backend`, so that nothing is imported here that torch has not.
"""

from __future__ import annotations

from typing import Any


def offer_backend() -> None:
    """Register the backend of processes without a seat; `outlast.init()` replaces it."""
    from torch import distributed as dist

    import outlast

    if dist.is_available() and "outlast" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "outlast", _open_group, extended_api=True, devices=["cpu", "cuda"]
        )
    outlast.meet_torch()


def _open_group(options: Any, _: Any) -> Any:
    from outlast.worker.groups.backend_registration import open_group

    return open_group(options)
