"""Log of a rank, whole lines of its newest worker, to its end or followed."""

from __future__ import annotations

from pathlib import Path

from outlast.errors import CorruptionError

TAIL_BYTES = 64 << 10
STREAMS = ("stdout", "stderr")


class RankLog:
    """Log of a rank in a run directory. Each reading begins behind the one before."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._root = (run_dir / "logs").resolve()
        self._rank = rank
        self._read_to: dict[Path, int] = {}
        self._newest: Path | None = None

    def read_on(self) -> str:
        """Return what the newest worker of the rank has written, at most its last 64 kB a stream.

        A line names worker and stream where another one begins. Raises CorruptionError where a file
        leads out of the run directory, and OSError where it cannot be read.
        """
        return "".join(self._of(stream) for stream in STREAMS)

    def _of(self, stream: str) -> str:
        paths = self._root.glob(f"{self._rank}/*/{stream}.log")
        newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return ""
        path = newest.resolve()
        if not path.is_relative_to(self._root):
            raise CorruptionError(f"{newest} leads out of the run directory; it is not shown")
        with path.open("rb") as file:
            size = path.stat().st_size
            begin = self._read_to.get(path, 0)
            begin = 0 if begin > size else begin  # a file that was truncated begins anew
            begin = max(begin, size - TAIL_BYTES)
            file.seek(begin)
            data = file.read(TAIL_BYTES)
        self._read_to[path] = begin + len(data)
        if not data:
            return ""
        is_other, self._newest = path != self._newest, path
        head = f"{newest.parent.name} {stream}:\n" if is_other else ""
        return head + data.decode(errors="replace")
