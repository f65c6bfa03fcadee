"""The systems of the comparison: the commands that start each of them, and its script."""

from __future__ import annotations

import difflib
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RANKS = 2
PLAIN = "torchrun, nothing saved"
# Without it torchrun's restarted workers may read the addresses of the dead ones.
_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_LIGHTHOUSE = ("--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000")
_LIGHTHOUSE_TUNED = (
    "--min_replicas=1",
    "--quorum_tick_ms=20",
    "--join_timeout_ms=500",
    "--heartbeat_timeout_ms=1000",
)


class Command(NamedTuple):
    """One process that a user starts. `trains`: the job has ended when all of these have."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    trains: bool = True


class System(NamedTuple):
    """A way to keep a job alive. `start`: the commands for a folder and the script's flags."""

    name: str
    package: str
    script: str
    start: Callable[[Path, tuple[str, ...]], list[Command]]
    tuned: bool = False

    def commands(self, folder: Path, flags: tuple[str, ...]) -> list[Command]:
        """Return what a user starts for a job in `folder`."""
        words = (str(HERE / self.script), str(folder), *flags)
        return self.start(folder, (*words, "--tuned") if self.tuned else words)

    def version(self) -> str:
        """Return the package's version, as it is installed."""
        return f"{self.package} {metadata.version(self.package)}"

    def lines_changed(self) -> tuple[int, int]:
        """Return how many lines were added to the plain script, and how many removed."""
        plain, ported = (_code(HERE / name) for name in ("plain_script.py", self.script))
        changes = [line[0] for line in difflib.ndiff(plain, ported)]
        return changes.count("+"), changes.count("-")


def _code(path: Path) -> list[str]:
    """Return the lines of a script that are not empty, without its docstring."""
    _, _, code = path.read_text().partition('"""')[2].partition('"""')
    return [line for line in code.splitlines() if line.strip()]


def _torchrun(_folder: Path, words: tuple[str, ...]) -> list[Command]:
    flags = ("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=20")
    return [Command((*_TORCHRUN, *flags, *words), _FRESH_STORE)]


def _outlast(folder: Path, words: tuple[str, ...]) -> list[Command]:
    flags = [f"--nproc-per-node={RANKS}", "--spares=1", "--plain", f"--run-dir={folder}/run"]
    if "--tuned" in words:
        flags.append("--limit=hang_floor_s=2")
    return [Command((sys.executable, "-m", "outlast", "run", *flags, *words), {})]


def _torchft(_folder: Path, words: tuple[str, ...]) -> list[Command]:
    port = free_port()
    lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
    flags = _LIGHTHOUSE_TUNED if "--tuned" in words else _LIGHTHOUSE
    commands = [Command((lighthouse, *flags, f"--bind=127.0.0.1:{port}"), {}, trains=False)]
    for group in range(RANKS):
        own = {
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(RANKS),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        torchrun = ("--nnodes=1", "--nproc_per_node=1", "--max_restarts=20")
        argv = (*_TORCHRUN, f"--master_port={free_port()}", *torchrun, *words)
        commands.append(Command(argv, own))
    return commands


def _nvrx(_folder: Path, words: tuple[str, ...]) -> list[Command]:
    """Start each rank and the reserve by itself: torchrun would end all of them with one."""
    port, size = free_port(), RANKS + 1
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [Command((sys.executable, *words), common | {"RANK": str(rank)}) for rank in range(size)]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SYSTEMS = (
    System(PLAIN, "torch", "plain_script.py", _torchrun),
    System("torchrun and DCP", "torch", "dcp_script.py", _torchrun),
    System("torchft", "torchft-nightly", "torchft_script.py", _torchft),
    System("torchft, tuned", "torchft-nightly", "torchft_script.py", _torchft, tuned=True),
    System("NVRx in-process", "nvidia-resiliency-ext", "nvrx_script.py", _nvrx),
    System("NVRx, tuned", "nvidia-resiliency-ext", "nvrx_script.py", _nvrx, tuned=True),
    System("Outlast", "outlast", "outlast_script.py", _outlast),
    System("Outlast, tuned", "outlast", "outlast_script.py", _outlast, tuned=True),
)
