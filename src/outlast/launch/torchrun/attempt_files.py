"""Files of an attempt where tools of torchrun look for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from outlast.atomic_files import replace_file
from outlast.launch.host.worker_environment import ERROR_FILE_NAME, SIZE_BYTES_MAX
from outlast.launch.host.worker_pool import WorkerHandle


def link_attempt(logs: Path, attempt: int, workers: Iterable[WorkerHandle]) -> None:
    """Link the log directories of an attempt's workers as `attempt_N/LOCAL_RANK`.

    Raises OSError. Links of an earlier launcher in the same directory are replaced.
    """
    folder = logs / f"attempt_{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    for worker in workers:
        link = folder / str(worker.local_rank)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(worker.process.log_dir, folder))


def pass_on_error(log_dir: Path, exit_code: int, target: str) -> None:
    """Copy a worker's error file, with its exit code (negative for a signal), to `target`: the
    error file of this launcher, which another launcher reads. Raises OSError.

    Nothing is written if the worker has recorded nothing readable.
    """
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        path = log_dir / ERROR_FILE_NAME
        if path.stat().st_size > SIZE_BYTES_MAX:
            return
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if isinstance(message := content.get("message"), dict):
            message["errorCode"] = exit_code
        replace_file(Path(target), msgspec.json.encode(content))
