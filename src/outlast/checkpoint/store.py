"""Checkpoints on disk: complete and durable, or not there at all.

    ROOT/step-<step:09d>-n<n>/model           written by seat 0
                              seat-<rank>     by each rank
                              manifest.json   last: what must be there, with sizes and digests
    ROOT/.draft-...                           not yet complete; of no meaning to a reader
    ROOT/.trash-...                           being deleted

This module does not import torch until a part is written or loaded: the launcher looks for the
newest checkpoint without it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from outlast.errors import CorruptionError, StorageError

FORMAT = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{9,})-n(\d+)")
_PART_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_CHUNK_BYTES = 8 << 20
_DIGEST_BYTES = 16


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint. `digest`: xxh3_128 in hex over all but its last 16 bytes."""

    name: str
    size_bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a complete checkpoint holds. `digest` is over the manifest with an empty digest."""

    format: int
    n: int
    step: int
    job: str
    world: int
    parts: tuple[Part, ...]
    digest: str = ""


class Checkpoint:
    """A complete checkpoint: `path`, and from its manifest `n`, `step`, `job`, `world`, `parts`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.n = manifest.n
        self.step = manifest.step
        self.job = manifest.job
        self.world = manifest.world
        self.parts = {part.name: part for part in manifest.parts}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the manifest and check that every part has its size (digests: see `verify`).

        Raises CorruptionError when the checkpoint is damaged, StorageError when it is unreadable.
        """
        try:
            checkpoint = cls(path, _read_manifest(path / _MANIFEST))
            for part in checkpoint.parts.values():
                found = (path / part.name).stat().st_size
                if found != part.size_bytes:
                    raise CorruptionError(
                        f"{path / part.name}: {found} bytes where the manifest has"
                        f" {part.size_bytes}; an older checkpoint must be used"
                    )
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{error.filename}: is missing; an older checkpoint must be used"
            ) from error
        except OSError as error:
            raise _unreadable(path, error) from error
        return checkpoint

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts.values())

    def verify(self) -> None:
        """Read every byte of every part. Raises CorruptionError or StorageError."""
        for part in self.parts.values():
            self._check(part, self._digest(part))

    def load(self, name: str) -> Any:
        """The value of a part, verified; tensors are on the CPU.

        Raises CorruptionError naming the file, StorageError when it cannot be read, KeyError when
        the checkpoint has no such part.
        """
        from outlast.checkpoint import part as parts

        part = self.parts[name]
        try:
            value, digest = parts.read(self.path / name)
        except OSError as error:
            raise _unreadable(self.path / name, error) from error
        self._check(part, digest)
        return value

    def _digest(self, part: Part) -> str:
        state, left = xxhash.xxh3_128(), part.size_bytes - _DIGEST_BYTES
        try:
            with (self.path / part.name).open("rb") as file:
                while left > 0 and (data := file.read(min(left, _CHUNK_BYTES))):
                    state.update(data)
                    left -= len(data)
                return state.hexdigest() if file.read() == state.digest() else "damaged"
        except OSError as error:
            raise _unreadable(self.path / part.name, error) from error

    def _check(self, part: Part, digest: str) -> None:
        if digest != part.digest:
            raise CorruptionError(
                f"{self.path / part.name}: its bytes do not match the digest in the manifest;"
                f" nothing was taken over; remove {self.path} and resume from the checkpoint"
                " before it"
            )


class Draft:
    """A checkpoint in the making, shared by the ranks of one generation, each in its process.

    Every rank writes its parts; seat 0 gathers what `write` returned and calls `complete`.
    Until then nothing but drafts has changed: a failure costs no older checkpoint.
    """

    def __init__(self, root: Path, n: int, step: int, generation: int) -> None:
        self.root, self.n, self.step = root, n, step
        self.path = root / f".draft-step-{step:09d}-n{n}-g{generation}"
        self.final = root / f"step-{step:09d}-n{n}"

    def write(
        self, name: str, value: Any, progress: Callable[[int], None] = lambda _: None
    ) -> Part:
        """Write one part, durable when this returns. `progress` is told the bytes so far.

        Raises CodecError when `value` cannot be written without pickle, StorageError when the
        disk refuses; what was written of this part is then gone.
        """
        from outlast.checkpoint import part as parts

        if not _PART_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a part")
        file = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            size, digest = parts.write(file, value, progress)
        except OSError as error:
            self._forget(file)
            raise self._failed(file, error) from error
        return Part(name=name, size_bytes=size, digest=digest)

    def complete(self, parts: Iterable[Part], job: str, world: int) -> Checkpoint:
        """Make the draft a checkpoint: manifest, fsync, rename, fsync. Called once, by seat 0.

        A complete checkpoint of the same n with the same parts is kept as it is (a phase that is
        redone writes it twice). Raises StorageError when the disk refuses, CorruptionError when a
        part is not what its writer said; the draft is then as it was.
        """
        manifest = Manifest(
            format=FORMAT, n=self.n, step=self.step, job=job, world=world,
            parts=tuple(sorted(parts, key=lambda part: part.name)),
        )  # fmt: skip
        if (known := self._known(manifest)) is not None:
            self.discard()
            return known
        try:
            with (self.path / _MANIFEST).open("wb") as file:
                file.write(_manifest_bytes(manifest))
                file.flush()
                os.fsync(file.fileno())
            Checkpoint.open(self.path)
            _sync_directory(self.path)
            _trash(self.final)
            self.path.rename(self.final)
            _sync_directory(self.root)
            _sync_directory(self.root.parent)
        except OSError as error:
            raise self._failed(self.path, error) from error
        return Checkpoint(self.final, manifest)

    def discard(self) -> None:
        """Remove the draft, as far as the disk allows; `clean` removes what remains."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _known(self, manifest: Manifest) -> Checkpoint | None:
        try:
            known = Checkpoint.open(self.final)
            known.verify()
        except (CorruptionError, StorageError):
            return None
        same = known.job == manifest.job and tuple(known.parts.values()) == manifest.parts
        return known if same else None

    @staticmethod
    def _forget(file: Path) -> None:
        try:
            file.unlink(missing_ok=True)
        except OSError:
            return  # the first error is the one to report; `clean` removes the draft

    def _failed(self, path: Path, error: OSError) -> StorageError:
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to it"
        return StorageError(
            f"the checkpoint of step {self.step} could not be written to {path}:"
            f" {error.strerror or error}; older checkpoints are untouched; {advice}, the next"
            " checkpoint tries again"
        )


def newest(root: Path, on_damage: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as it was written, or None.

    Each one that is passed over is told to `on_damage`. Reads all parts of the one it returns.
    Raises StorageError when `root` cannot be listed.
    """
    for path in _paths(root):
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.verify()
        except (CorruptionError, StorageError) as error:
            on_damage(f"checkpoint {path.name} is passed over: {error}")
            continue
        return checkpoint
    return None


def prune(root: Path, keep: int) -> list[Path]:
    """Remove what is older than the newest `keep` checkpoints that look whole; what was removed.

    One that is damaged is not counted, so that it never pushes a good one out. What the disk
    refuses to remove stays. Raises StorageError when `root` cannot be listed.
    """
    assert keep >= 1, "a run without a checkpoint cannot be resumed"
    kept, removed = 0, []
    for path in _paths(root):
        if kept >= keep:
            try:
                _trash(path)
            except OSError:
                continue  # it is only old, not wrong; the next prune tries again
            removed.append(path)
            continue
        try:
            Checkpoint.open(path)
        except (CorruptionError, StorageError):
            continue  # not counted; `newest` says so if it ever gets there
        kept += 1
    return removed


def clean(root: Path) -> None:
    """Remove drafts and trash. Only where nobody writes: before the first worker starts."""
    for pattern in (".draft-*", ".trash-*"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _paths(root: Path) -> list[Path]:
    """The directories of checkpoints, newest first."""
    try:
        names = [entry.name for entry in root.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(root, error) from error
    found = [(int(match[1]), int(match[2]), match[0]) for match in map(_NAME.fullmatch, names)
             if match]  # fmt: skip
    return [root / name for _, _, name in sorted(found, reverse=True)]


def _manifest_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON, its digest filled in."""
    empty = msgspec.json.encode(msgspec.structs.replace(manifest, digest=""))
    sealed = msgspec.structs.replace(manifest, digest=xxhash.xxh3_128_hexdigest(empty))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n"


def _read_manifest(path: Path) -> Manifest:
    data = path.read_bytes()
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError(f"{path}: {error}; an older checkpoint must be used") from error
    if manifest.format != FORMAT:
        raise CorruptionError(
            f"{path}: format {manifest.format} where this Outlast reads {FORMAT}; use the Outlast"
            " that wrote it"
        )
    if _manifest_bytes(manifest) != data:
        raise CorruptionError(
            f"{path}: its bytes do not match its digest; an older checkpoint must be used"
        )
    return manifest


def _trash(path: Path) -> None:
    """Take a checkpoint away at once, then delete it. No half of it is ever seen."""
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be read: {error.strerror or error}; nothing was changed; check the disk"
        " and the rights"
    )
