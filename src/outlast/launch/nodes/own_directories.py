"""Run directories of a run's nodes: one that all nodes share, or one of each host.

The controller's node writes a random number, the proof, into its run directory and into each
directory of durable storage. A node sends what it finds there.

| the node finds the proof in | the run directory is                                             |
|-----------------------------|------------------------------------------------------------------|
| both                        | the one of all nodes                                             |
| durable storage only        | its host's own: `home`, the first directory of durable storage,  |
|                             | has what all nodes need                                          |
| the run directory only      | refused: `--durable` is a directory of one host                  |
| none                        | refused                                                          |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.atomic_files import replace_file
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.errors import RunDirError
from outlast.launch import run_directory, torchrun_arguments
from outlast.launch.nodes.node_facts import NodePlaces
from outlast.launch.run_directory import RunDir
from outlast.launch.terms.run_identity import CHECKPOINTS, FILE, VERSION, RunningJob
from outlast.launch.torchrun_arguments import RunPlan
from outlast.transport.node_link import NodeAccepted, NodeHello

PROOF = "meeting"  # file with the proof
RECORD = "run-of-hosts.json"  # file of `home` with the job: for hosts that come later
SHARED = "the one of the controller's node"


class OwnDirectories(NamedTuple):
    """`home`: the shared directory that a run needs whose hosts have run directories of their own.
    `why_not`: why hosts cannot have their own; "" if they can."""

    home: Path | None = None
    why_not: str = "that needs --durable DIRECTORY, on a file system of all nodes"


def own_directories(plan: RunPlan, durable: Sequence[DurableTarget]) -> OwnDirectories:
    """Return whether hosts of a run can have run directories of their own."""
    first = durable[0] if durable else None
    if first is None:
        return OwnDirectories()
    if not isinstance(first.store, Folder):
        return OwnDirectories(
            None, f"the first --durable would have to be a directory, and is {first.store.where}"
        )
    home = first.store.root.absolute()
    refused = {
        "--fault (what was injected is noted there)": bool(plan.faults),
        "--copies and --snapshot-every (keepers find each other there)": plan.keeps_copies,
        f"every= and rate= of --durable {home} (all checkpoints are there)": bool(
            first.rule.every or first.rule.rate_bytes_per_s
        ),
        f"--run-dir within --durable {home}": home.resolve()
        in (path := Path(plan.run_dir).resolve(), *path.parents),
    }
    needs = [name for name, is_given in refused.items() if is_given]
    why_not = f"a run directory that all nodes share is needed for {', '.join(needs)}"
    return OwnDirectories(home, why_not if needs else "")


def folders_of(durable: Iterable[DurableTarget]) -> list[Path]:
    """Return the directories of durable storage. A bucket is the same one for all nodes."""
    return [target.store.root for target in durable if isinstance(target.store, Folder)]


# --- what a node finds ------------------------------------------------------------------------


def look_at(host: str, run_dir: Path, folders: Sequence[Path]) -> NodePlaces:
    """Return what a host finds in its directories."""
    job = read_job(run_dir / FILE)
    return NodePlaces(
        directory=read_proof(run_dir),
        folders=tuple(map(read_proof, folders)),
        run=job.run if job and (job.home or _has_journal(run_dir)) else "",
        neighbours=tuple(path.name for path in (run_dir / "hosts").glob("*") if path.name != host),
    )


def read_proof(directory: Path) -> str:
    """Return the proof in a directory; "" if it cannot be read."""
    try:
        return (directory / PROOF).read_text(errors="replace")[:64]
    except OSError:
        return ""


def read_job(path: Path) -> RunningJob | None:
    """Return the job in a file; None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningJob)
    except (OSError, msgspec.DecodeError):
        return None


def known_job(run_dir: Path, home: Path | None) -> RunningJob | None:
    """Return the job that a run in this directory may belong to. A host that is new in a run whose
    hosts have their own directories learns it from `home`."""
    here = read_job(run_dir / FILE)
    if home and (here is None or here.home or not _has_journal(run_dir)):
        return read_job(home / RECORD) or here
    return here


def _has_journal(run_dir: Path) -> bool:
    """Return whether a controller has used a directory. A start that came to nothing has not."""
    return any((run_dir / "journal").glob("*"))


# --- what the controller's node decides -------------------------------------------------------


def is_own(proof: str, hello: NodeHello) -> bool:
    """Return whether a node's run directory is another one than that of the proof."""
    return hello.directory != proof


def why_elsewhere(
    proof: str,
    hello: NodeHello,
    folders: Sequence[Path],
    own: OwnDirectories,
    hosts: Iterable[str],
) -> str:
    """Return why a node's directories do not fit those of a run of these hosts; "" if they do."""
    for number, folder in enumerate(folders):
        if hello.folders[number : number + 1] != (proof,):
            return (
                f"its --durable {folder} is not the directory of the controller's node, but one of"
                " this host alone; name a directory that all nodes share, or a bucket"
            )
    if not is_own(proof, hello):
        return ""
    if own.why_not:
        return f"its run directory is not {SHARED}, but one of this host alone: {own.why_not}"
    if common := sorted({*hosts} & {*hello.neighbours}):
        return (
            f"its run directory is not {SHARED}, but that of {', '.join(common)} as well; let all"
            " nodes share one, or none"
        )
    return ""


def why_mixed(hello: NodeHello, other: NodeHello, proof: str) -> str:
    """Return why a node does not fit another one that is there; "" if it does."""
    if is_own(proof, hello) == is_own(proof, other):
        return ""
    words = {True: "one of this host alone", False: SHARED}
    return (
        f"its run directory is {words[is_own(proof, hello)]}, and that of {other.host} is"
        f" {words[is_own(proof, other)]}; let all nodes share one, or none"
    )


def settle(run_dir: RunDir, home: Path | None, runs: Iterable[tuple[str, str]]) -> list[str]:
    """Record on the controller's node whether run directories are shared (`home` None) or each
    host's own; return notes. `runs`: hosts, and the runs of their directories.

    Raises RunDirError if this directory, or one of the others, is of another kind or run.
    """
    job, path = run_dir.job, run_dir.path
    if home is None:
        if job.home:
            raise RunDirError(
                f"run directory {path} is of a run whose hosts had their own directories, with its"
                f" checkpoints in {job.home}; all nodes share this one; nothing was started; give"
                f" each host its own again, or a fresh one with --durable {job.home}"
            )
        return []
    rooms = (run_dir.room("journal"), run_dir.room(CHECKPOINTS))
    if job.home != str(home) and (job.home or any(any(room.iterdir()) for room in rooms)):
        raise RunDirError(
            f"run directory {path} is of a run with its checkpoints in"
            f" {job.home or run_dir.checkpoints}, and each host has its own run directory now, with"
            f" checkpoints in {home}; nothing was started; choose another --run-dir"
        )
    for host, run in runs:
        if run not in ("", job.run):
            raise RunDirError(why_another_run(run, job.run, f"the run directory of {host}"))
    run_dir.adopt(job.run, job.term, str(home))
    return [
        f"each host has its own run directory; checkpoints, terms and the journal's copy are in"
        f" {home}; events and logs of a host are in its own"
    ]


def why_another_run(run: str, ours: str, whose: str = "its run directory") -> str:
    """Return the reason to refuse a directory of another run."""
    return f"{whose} is of run {run}, and this is run {ours}; give that host a fresh --run-dir"


def publish(run_dir: RunDir) -> None:
    """Write the job into `home`, for hosts that come later. Raises RunDirError."""
    if not run_dir.job.home:
        return
    path = Path(run_dir.job.home) / RECORD
    try:
        replace_file(path, msgspec.json.encode(run_dir.job))
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror}") from error


# --- on the other nodes -----------------------------------------------------------------------


def place_of(plan: RunPlan, place: NodeAccepted, lock_fd: int) -> RunDir:
    """Return the run directory of a node that does not hold the controller; make what a host's own
    one lacks. Raises RunDirError."""
    path = Path(plan.run_dir)
    if not place.home:
        return run_directory.of_node(path, place.run, place.term, lock_fd)
    before = read_job(path / FILE)
    job = RunningJob(
        version=VERSION,
        run=place.run,
        script=plan.script,
        args=plan.args,
        world=plan.world,
        created_ns=before.created_ns if before else 0,
        term=place.term,
        home=place.home,
    )
    run_dir = run_directory.of_own_host(path, job, lock_fd)
    torchrun_arguments.store_plan(run_dir, plan)
    return run_dir
