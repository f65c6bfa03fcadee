"""Writer of forensic bundles (bundle_format.py).

A run writes one when it stops in failure, with deadlines and limits: the end of a run neither waits
for long nor fills a disk for it. Nothing of the run directory is changed.
"""

from __future__ import annotations

import contextlib
import io
import platform
import shutil
import socket
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from outlast import __version__
from outlast.atomic_files import open_draft
from outlast.checkpoint.stores.catalog import newest_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import child_environment
from outlast.controller.audit.audit_records import is_barred
from outlast.controller.inputs import SharedValueStored
from outlast.errors import OutlastError, RunDirError
from outlast.events import AnyEvent, AttemptRefused, Metrics, PhaseDone, RunEnded, encoder
from outlast.launch.bundles.bundle_format import (
    BYTES_MAX,
    FOLDER,
    MANIFEST,
    SCRIPT,
    SUFFIX,
    VERSION,
    BundledCheckpoint,
    BundleManifest,
)
from outlast.launch.bundles.secret_redaction import SecretRedaction, is_secret_name
from outlast.launch.run_directory import FREE_BYTES_MIN
from outlast.launch.run_journal import ORIGIN, bars_of, read_journal
from outlast.launch.terms.run_identity import RunningJob, checkpoints_of
from outlast.launch.torchrun_arguments import read_plan
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.incident_explanation import explain, finding_lines
from outlast.telemetry.run_summary import summarise
from outlast.telemetry.segment_files import SegmentDamage, SegmentWriter

KEPT = 5  # bundles of a run; older ones are removed
DEADLINE_S = 30.0
EVENTS_MAX = 100_000  # of steps; all others are few
TAIL_BYTES = 256 << 10  # of each log file
CONTEXT_BYTES = 8 << 10  # before a tail, so that it begins with no half of a secret
LOGS_MAX = 48 << 20
TRACES_MAX = 32 << 20
BATCHES_MAX = 64 << 20
CHECKPOINT_MAX = 64 << 20
SCRIPT_MAX = 4 << 20
_OF_STEPS = (PhaseDone, Metrics, AttemptRefused)
_SETTINGS = (
    *("OUTLAST_", "TORCH_", "TORCHELASTIC_", "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "GLOO_"),
    *("OMP_", "MKL_", "ATEN_", "PYTORCH_", "PYTHONHASHSEED", "SLURM_", "NVIDIA_", "UCX_", "FI_"),
)
_NEVER = ("OUTLAST_WORKER",)  # has the run's token


class _Late(Exception):  # noqa: N818 - ends the collection, and is no error
    """The deadline of the collection has passed."""


class _Content:
    """Files of a bundle under construction, in a temporary directory."""

    def __init__(self, root: Path, redaction: SecretRedaction, until_s: float) -> None:
        self._root, self._until_s = root, until_s
        self.redaction = redaction
        self.omitted: list[str] = []
        self._size = 0

    def write(self, name: str, data: bytes, *, is_needed: bool = False) -> None:
        """Add a file. Raises _Late behind the deadline, unless no bundle can be without it."""
        if time.monotonic() > self._until_s and not is_needed:
            raise _Late
        if self._size + len(data) > BYTES_MAX:
            self.omitted.append(f"{name}: the bundle has {BYTES_MAX >> 20} MiB")
            return
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._size += len(data)

    def folder(self, name: str) -> Path:
        """Return a new directory in the bundle."""
        path = self._root / name
        path.mkdir(parents=True)
        return path

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield all files, by name."""
        for path in sorted(self._root.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(self._root)), path


def write_bundle(
    run_dir: Path,
    *,
    target: Path | None = None,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Path:
    """Write a bundle of a run, to `target` or into its directory; return its path.

    Raises RunDirError if `run_dir` is no run directory, or the bundle cannot be written; whatever
    else cannot be read is named in the manifest.
    """
    job = _job(run_dir)
    environment = child_environment({}) if environment is None else environment
    target = target or run_dir / FOLDER / f"{job.term}{SUFFIX}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < FREE_BYTES_MIN + BYTES_MAX:
            raise RunDirError(
                f"no bundle was written: less than {(FREE_BYTES_MIN + BYTES_MAX) >> 20} MiB are"
                f" free under {target.parent}; make room, and write it with: outlast bundle"
                f" {run_dir}"
            )
        with (
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as folder,
            open_draft(target) as draft,
        ):
            until_s = time.monotonic() + deadline_s
            content = _Content(Path(folder), SecretRedaction(environment), until_s)
            manifest = _collect(run_dir, job, content, environment)
            _pack(content, manifest, f"bundle-{job.run}-{job.term}", draft)
    except OSError as error:
        raise RunDirError(
            f"no bundle was written to {target}: {error.strerror or error}; everything in {run_dir}"
            " is kept"
        ) from error
    if target.parent == run_dir / FOLDER:
        _prune(target.parent)
    return target


def _job(run_dir: Path) -> RunningJob:
    try:
        return msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunningJob)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(
            f"{run_dir} is no run directory, or its run.json cannot be read ({error}); give the"
            " directory that `outlast run` printed at its start"
        ) from error


def _collect(
    run_dir: Path, job: RunningJob, content: _Content, environment: Mapping[str, str]
) -> BundleManifest:
    damages: list[SegmentDamage] = []
    events = read_events(run_dir, damages.append)
    content.omitted += [str(damage) for damage in damages]
    ended = next((one for one in reversed(events) if isinstance(one, RunEnded)), None)
    checkpoint: BundledCheckpoint | None = None
    try:
        _add_texts(run_dir, events, content)
        _add_script(run_dir, content)
        _add_logs(run_dir, content)
        _add_newest(run_dir, "traces", TRACES_MAX, content)
        _add_newest(run_dir, "nonfinite", BATCHES_MAX, content)
        _add_journal(run_dir, content)
        _add_events(events, content)
        checkpoint = _add_checkpoint(run_dir, content)
    except _Late:
        content.omitted.append("what comes behind the files listed: collecting took too long")
    home = str(checkpoints_of(run_dir).absolute())
    inside = checkpoint is not None and checkpoint.is_inside
    moved = msgspec.structs.replace(job, home="" if inside else home)
    content.write(
        "run.json", msgspec.json.encode(_redacted(moved, content.redaction)), is_needed=True
    )
    cause = None if ended is None or ended.cause is None else ended.cause
    return BundleManifest(
        version=VERSION,
        run=job.run,
        term=job.term,
        outcome=ended.outcome if ended else "",
        cause=_redacted(cause, content.redaction) if cause else None,
        step=ended.step if ended else -1,
        ended_ns=events[-1].t_ns if events else job.created_ns,
        host=socket.gethostname(),
        python=platform.python_version(),
        outlast=__version__,
        versions={one.name: one.version for one in metadata.distributions() if one.name},
        settings=_settings(environment, content.redaction),
        checkpoint=checkpoint,
        omitted=content.omitted,
        redacted=content.redaction.count,
        files={},
    )


def _settings(environment: Mapping[str, str], redaction: SecretRedaction) -> dict[str, str]:
    return {
        name: redaction.text(value)
        for name, value in sorted(environment.items())
        if name.startswith(_SETTINGS) and not name.startswith(_NEVER) and not is_secret_name(name)
    }


T = TypeVar("T")


def _redacted(value: T, redaction: SecretRedaction) -> T:
    """Return a struct without secrets in its texts."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    return msgspec.convert(redaction.value(plain), type(value))


def _add_json(name: str, value: Any, content: _Content) -> None:
    plain = content.redaction.value(msgspec.to_builtins(value))
    content.write(name, msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n")


def _add_texts(run_dir: Path, events: list[AnyEvent], content: _Content) -> None:
    found = incidents(RunHistory.of(events))
    text = io.StringIO()
    explain(found, Console(file=text, width=100, no_color=True), "unknown")
    text.writelines(f"{line}\n" for line in finding_lines(found, events))
    content.write("explanation.txt", content.redaction.data(text.getvalue().encode()))
    try:
        _add_json("summary.json", summarise(run_dir), content)
    except OutlastError as error:
        content.omitted.append(f"summary.json: {error}")
    try:
        _add_json("plan.json", read_plan(run_dir), content)
    except RunDirError as error:
        content.omitted.append(f"plan.json: {error}")


def _add_script(run_dir: Path, content: _Content) -> None:
    with contextlib.suppress(RunDirError):  # named with plan.json
        script = read_plan(run_dir).plan.script
        path = Path(script)
        if script.startswith("-m "):
            content.omitted.append(f"{SCRIPT}: the run was started by {script}")
        elif not path.is_file() or path.stat().st_size > SCRIPT_MAX:
            content.omitted.append(f"{SCRIPT}: {script} is no file below {SCRIPT_MAX >> 20} MiB")
        else:
            content.write(SCRIPT, content.redaction.data(path.read_bytes()))


def _add_logs(run_dir: Path, content: _Content) -> None:
    """Add the tail of each log, the newest first."""
    paths = [*(run_dir / "logs").rglob("*.log"), *run_dir.glob("controller-error-*.log")]
    own = [path for path in paths if path.is_file() and not path.is_symlink()]
    total = beyond = 0
    for path in sorted(own, key=_modified, reverse=True):
        name = str(path.relative_to(run_dir))
        size = path.stat().st_size
        if total + min(size, TAIL_BYTES) > LOGS_MAX:
            beyond += 1
            continue
        with path.open("rb") as file:
            file.seek(max(0, size - TAIL_BYTES - CONTEXT_BYTES))
            data = content.redaction.data(file.read(TAIL_BYTES + CONTEXT_BYTES))
        if size > TAIL_BYTES:
            content.omitted.append(f"{name}: {size - TAIL_BYTES} bytes before its tail")
        data = data[-TAIL_BYTES:]
        total += len(data)
        content.write(name, data)
    if beyond:
        content.omitted.append(f"logs: {beyond} files beyond {LOGS_MAX >> 20} MiB")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _add_newest(run_dir: Path, folder: str, size_max: int, content: _Content) -> None:
    """Add the newest files of a directory, up to a size."""
    total = beyond = 0
    found = (run_dir / folder).rglob("*")
    paths = [path for path in found if path.is_file() and not path.is_symlink()]
    for path in sorted(paths, key=_modified, reverse=True):
        name, size = str(path.relative_to(run_dir)), path.stat().st_size
        if total + size > size_max:
            beyond += 1
            continue
        total += size
        data = path.read_bytes()
        content.write(name, content.redaction.data(data) if folder == "traces" else data)
    if beyond:
        content.omitted.append(f"{folder}: {beyond} files beyond {size_max >> 20} MiB")


def _add_events(events: list[AnyEvent], content: _Content) -> None:
    steps = [index for index, one in enumerate(events) if isinstance(one, _OF_STEPS)]
    dropped = set(steps[:-EVENTS_MAX])
    if dropped:
        content.omitted.append(f"events: the {len(dropped)} oldest ones of steps")
    writer = SegmentWriter(content.folder("events"), "bundle", durable=False)
    for index, one in enumerate(events):
        if index not in dropped:
            writer.append(encoder.encode(_redacted(one, content.redaction)))
    writer.close()


def _add_journal(run_dir: Path, content: _Content) -> None:
    """Add the journal's shared values, which a replay needs."""
    try:
        entries = read_journal(run_dir / "journal", content.omitted.append)
    except RunDirError as error:
        content.omitted.append(f"journal: {error}")
        return
    writer = SegmentWriter(content.folder("journal"), ORIGIN, durable=False)
    for entry in entries:
        if isinstance(entry, SharedValueStored):
            writer.append(msgspec.msgpack.encode(entry))
    writer.close()


def _add_checkpoint(run_dir: Path, content: _Content) -> BundledCheckpoint | None:
    """Add the newest checkpoint if it is small; else its place."""
    root = checkpoints_of(run_dir)
    try:
        store = Folder(root)
        bars = bars_of(run_dir)
        newest = newest_checkpoint(
            store,
            content.omitted.append,
            barred=lambda place: is_barred(bars, place.n, place.directory),
        )
    except OutlastError as error:
        content.omitted.append(f"checkpoints: {error}")
        return None
    if newest is None:
        return None
    directory = newest.place.directory
    is_inside = newest.size_bytes <= CHECKPOINT_MAX
    if is_inside:
        for name in store.files(directory):
            content.write(f"checkpoints/{directory}/{name}", (root / directory / name).read_bytes())
    else:
        content.omitted.append(
            f"checkpoints/{directory}: {newest.size_bytes} bytes; it is in {root.absolute()}"
        )
    return BundledCheckpoint(
        path=str((root / directory).absolute()),
        step=newest.place.step,
        size_bytes=newest.size_bytes,
        is_inside=is_inside,
    )


def _pack(content: _Content, manifest: BundleManifest, top: str, path: Path) -> None:
    import zstandard  # takes 10 ms, and most commands write no bundle

    files = {name: each.stat().st_size for name, each in content.files()}
    manifest = msgspec.structs.replace(manifest, files=files)
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    with (
        path.open("wb") as raw,
        zstandard.ZstdCompressor(level=6).stream_writer(raw) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        time_s = manifest.ended_ns // 10**9
        _add(archive, f"{top}/{MANIFEST}", data, time_s)
        for name, each in content.files():
            _add(archive, f"{top}/{name}", each.read_bytes(), time_s)


def _add(archive: tarfile.TarFile, name: str, data: bytes, time_s: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), 0o644, time_s
    archive.addfile(entry, io.BytesIO(data))


def _prune(folder: Path) -> None:
    """Remove all but the newest bundles of this run."""
    numbered: Iterable[tuple[int, Path]] = (
        (int(path.name.removesuffix(SUFFIX)), path)
        for path in folder.glob(f"*{SUFFIX}")
        if path.name.removesuffix(SUFFIX).isdecimal()
    )
    for _, path in sorted(numbered)[:-KEPT]:
        with contextlib.suppress(OSError):  # it stays
            path.unlink()
