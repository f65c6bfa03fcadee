"""Runs on hosts that share no run directory: each has its own, and durable storage is shared."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.cluster import JOB, Cluster, results
from tests.cluster.conftest import ON_HOSTS, Undisturbed
from tests.cluster.hosts import Hosts

from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, RunDirError
from outlast.events import AnyEvent, CheckpointSaved, Note, PhaseDone, RunStarted, WorkerSpawned
from outlast.telemetry.committed_history import check_run
from outlast.telemetry.event_store import read_events
from outlast.telemetry.run_summary import RunSummary, summarise

pytestmark = ON_HOSTS
OUTLAST = (sys.executable, "-m", "outlast")
STEPS = "80"
LEASE = "--limit=lease_s=3"


class ApartCluster(Cluster):
    """A cluster whose hosts have the run directory at the same path, each on a mount of its own.

    `own` has these directories by host; `disk` is seen by all hosts.
    """

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder, hosts)
        self.run_dir.mkdir()
        self.own = {name: folder / "own" / name for name in hosts.names}
        self.far = folder / "far"
        for name in hosts.names:
            self.mount(name)

    def mount(self, name: str) -> None:
        self.own[name].mkdir(parents=True, exist_ok=True)
        self.hosts.run(name, "mount", "--bind", str(self.own[name]), str(self.run_dir))

    def events(self) -> list[AnyEvent]:
        found: list[AnyEvent] = []
        for own in self.own.values():
            with contextlib.suppress(RunDirError):  # nothing is written yet
                found += read_events(own)
        return sorted(found, key=lambda one: one.t_ns)

    def collected(self, owner: str) -> Path:
        """Return a copy of a controller's run directory, with the events of all hosts."""
        target = self.folder / f"collected-{owner}"
        shutil.copytree(self.own[owner], target, dirs_exist_ok=True)
        for own in self.own.values():
            for path in (own / "events").glob("*"):
                shutil.copy(path, target / "events" / path.name)
        return target

    def equal_results(self, owner: str) -> list[str]:
        """Return the results of all ranks; the journal of the last controller explains them."""
        assert check_run(self.collected(owner)) == []
        return results(self.out)

    def summary_at(self, owner: str) -> RunSummary:
        return summarise(self.collected(owner))

    def worker_on(self, host: str) -> int:
        """Return the process id of the newest worker of a host."""
        found = [one for one in self.events() if isinstance(one, WorkerSpawned)]
        return [one.pid for one in found if one.host == host][-1]

    def owner_of(self, term: int) -> str:
        """Return the host that takes over in a term, when it has."""
        text = f"takes over as controller, term {term}:"

        def is_it(one: AnyEvent) -> bool:
            return isinstance(one, Note) and text in one.text

        self.wait_for_event(is_it, text)
        (note,) = [one for one in self.events() if isinstance(one, Note) and text in one.text]
        return note.text.split()[0]

    def begin(self, nodes: str, *flags: str, **other: tuple[str, ...]) -> Path:
        """Start a run that saves each 10 steps; return the file that keeps it from ending."""
        hold = self.folder / "hold"
        hold.touch()
        flags = (LEASE, "--checkpoint-every=10", f"--durable={self.far}", *flags)
        self.start(nodes, 1, *flags, job=(STEPS, "ddp", str(hold)), **other)
        return hold


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ApartCluster]:
    with Hosts(tmp_path, getattr(request, "param", 3)) as hosts:
        cluster = ApartCluster(tmp_path, hosts)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def expected(undisturbed: Undisturbed) -> list[str]:
    return undisturbed(2)


def at_step(step: int, one: AnyEvent) -> bool:
    return isinstance(one, PhaseDone) and one.step >= step


def has_saved(step: int, one: AnyEvent) -> bool:
    return isinstance(one, CheckpointSaved) and one.step >= step


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_two_hosts_with_their_own_directories_end_as_one(
    cluster: ApartCluster, expected: list[str]
) -> None:
    cluster.begin("2").unlink()
    ends = {name: cluster.end(name) for name in ("n1", "n2")}
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, ends
    assert "each host has its own run directory" in ends["n1"][1]
    assert cluster.equal_results("n1") == expected
    assert not any(cluster.run_dir.iterdir())
    for own in cluster.own.values():
        assert not list((own / "checkpoints").iterdir())
    places = checkpoint_places(Folder(cluster.far))
    assert places and all(verify(open_checkpoint(Folder(cluster.far), one)) == [] for one in places)
    listed = cluster.hosts.run("n2", *OUTLAST, "ckpt", "ls", str(cluster.run_dir))
    assert all(f" {place.n} " in listed for place in places), listed


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_killed_worker_is_replaced(cluster: ApartCluster, expected: list[str]) -> None:
    hold = cluster.begin("2")
    cluster.wait_for_event(lambda one: at_step(20, one), "step 20")
    before = cluster.generations()
    pid = cluster.worker_on("n2")
    cluster.hosts.run("n2", "kill", "-KILL", str(pid))
    cluster.wait_for_steps(before + 1)
    hold.unlink()
    assert cluster.codes() == {"n1": EXIT_DONE, "n2": EXIT_DONE}
    assert cluster.equal_results("n1") == expected
    (incident,) = cluster.summary_at("n1").incidents
    assert (incident.cause, incident.committed_steps_lost) == ("killed", 0)


def test_a_host_that_loses_power_is_replaced(cluster: ApartCluster, expected: list[str]) -> None:
    hold = cluster.begin("2:3")
    cluster.wait_for_event(lambda one: at_step(20, one), "step 20")
    before = cluster.generations()
    cluster.hosts.power_off("n2")
    cluster.wait_for_steps(before + 1)
    hold.unlink()
    assert cluster.codes() == {"n1": EXIT_DONE, "n3": EXIT_DONE}
    assert cluster.equal_results("n1") == expected
    assert sum(one.committed_steps_lost for one in cluster.summary_at("n1").incidents) == 0


@pytest.mark.parametrize("deed", ["power off", "kill the launcher"])
def test_another_node_takes_over(cluster: ApartCluster, deed: str, expected: list[str]) -> None:
    """The new controller reads the journal of a node whose disk nobody can reach."""
    hold = cluster.begin("2:3")
    cluster.wait_for_event(lambda one: at_step(20, one), "step 20")
    before = cluster.generations()
    if deed == "power off":
        cluster.hosts.power_off("n1")
    else:
        cluster.hosts.run("n1", "pkill", "-KILL", "-o", "-f", "outlast run")
    owner = cluster.owner_of(2)
    cluster.wait_for_steps(before + 1)
    hold.unlink()
    ends = {name: cluster.end(name) for name in ("n2", "n3")}
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, ends
    assert cluster.equal_results(owner) == expected
    assert sum(one.committed_steps_lost for one in cluster.summary_at(owner).incidents) == 0
    segments = sorted(path.name[:10] for path in (cluster.own[owner] / "journal").iterdir())
    assert segments == ["term000001", "term000002"]


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_both_partners_lost_roll_all_ranks_back_to_shared_storage(
    cluster: ApartCluster, expected: list[str]
) -> None:
    """No host has the parts of the other: the checkpoint is whole in durable storage."""
    hold = cluster.begin("2:4")
    cluster.wait_for_event(lambda one: has_saved(20, one), "a checkpoint of step 20")
    before = cluster.generations()
    for name in ("n1", "n2"):
        cluster.hosts.power_off(name)
    owner = cluster.owner_of(2)
    cluster.wait_for_steps(before + 1)
    hold.unlink()
    ends = {name: cluster.end(name) for name in ("n3", "n4")}
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, ends
    assert cluster.equal_results(owner) == expected


@pytest.mark.parametrize("fresh", [False, True], ids=["same directories", "fresh directories"])
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_stopped_run_resumes(cluster: ApartCluster, fresh: bool, expected: list[str]) -> None:
    hold = cluster.begin("2")
    cluster.wait_for_event(lambda one: at_step(30, one), "step 30")
    cluster.hosts.run("n2", "pkill", "-TERM", "-o", "-f", "outlast run")
    assert cluster.codes() == {"n1": EXIT_INTERRUPTED, "n2": EXIT_INTERRUPTED}
    (first,) = [one for one in cluster.events() if isinstance(one, RunStarted)]
    if fresh:
        for name, own in cluster.own.items():
            cluster.hosts.run(name, "sh", "-c", f"rm -rf {own}/*")
    hold.unlink()
    cluster.begin("2").unlink()
    ends = {name: cluster.end(name) for name in ("n1", "n2")}
    assert {code for code, _ in ends.values()} == {EXIT_DONE}, ends
    assert cluster.equal_results("n1") == expected
    second = [one for one in cluster.events() if isinstance(one, RunStarted)][-1]
    assert (second.run, second.resumed_step >= 30, second.term) == (first.run, True, 2)


@pytest.mark.parametrize("is_new", [False, True], ids=["the same host", "a fresh host"])
def test_a_node_joins_the_running_run(
    cluster: ApartCluster, is_new: bool, expected: list[str]
) -> None:
    """After a takeover as well: the endpoint does not answer, and durable storage names the run."""
    newcomer = "n3" if is_new else "n1"
    if is_new:
        cluster.hosts.power_off("n3")
    hold = cluster.begin("2" if is_new else "2:3")
    cluster.wait_for_event(lambda one: at_step(20, one), "step 20")
    before = cluster.generations()
    cluster.hosts.power_off("n1")
    owner = cluster.owner_of(2)
    if not is_new:
        cluster.wait_for_steps(before + 1)
    cluster.hosts.boot(newcomer)
    cluster.mount(newcomer)
    cluster.start_again(newcomer)
    words = f"{newcomer} joins the run as a spare node"  # new to a controller after a takeover
    cluster.wait_for_event(lambda one: isinstance(one, Note) and words in one.text, words)
    cluster.wait_for_steps(before + 1)
    hold.unlink()
    assert set(cluster.codes().values()) == {EXIT_DONE}
    assert cluster.equal_results(owner) == expected


def test_a_host_with_a_directory_of_its_own_among_sharers_is_refused(
    cluster: ApartCluster,
) -> None:
    """n1 and n2 share a directory; n3 has its own."""
    shared = str(cluster.folder / "shared")
    wait = "--limit=hello_s=15"
    cluster.begin("2:3", wait, n1=("--run-dir", shared), n2=("--run-dir", shared))
    ends = {name: cluster.end(name) for name in ("n1", "n2", "n3")}
    assert all(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code, _ in ends.values())
    texts = " ".join(output for _, output in ends.values())
    assert "let all nodes share one, or none" in texts
    assert "and that of n" in ends["n2"][1] + ends["n3"][1]


def test_two_hosts_of_one_directory_are_refused_among_others(cluster: ApartCluster) -> None:
    """n2 and n3 share a directory that is not the one of the controller's node."""
    shared = str(cluster.folder / "shared")
    wait = "--limit=hello_s=15"
    cluster.begin("2:3", wait, n2=("--run-dir", shared), n3=("--run-dir", shared))
    ends = {name: cluster.end(name) for name in ("n1", "n2", "n3")}
    assert all(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code, _ in ends.values())
    texts = ends["n2"][1] + ends["n3"][1]
    assert "but that of n2 as well" in texts or "but that of n3 as well" in texts


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize(
    ("flags", "own", "words"),
    [
        (
            ("--durable={far}",),
            True,
            "its --durable {far} is not the directory of the",
        ),
        (("--durable={far}", "--fault=kill:rank=0,step=9"), False, "is needed for --fault"),
        (("--durable={far}", "--snapshot-every=5"), False, "needed for --copies and --snapshot-"),
        (("--durable={far} every=5",), False, "is needed for every= and rate= of --durable {far}"),
        ((), False, "but one of this host alone: that needs --durable DIRECTORY"),
    ],
    ids=["two stores", "fault", "memory copies", "every", "no durable storage"],
)
def test_what_needs_a_shared_directory_is_refused_by_name(
    cluster: ApartCluster, flags: tuple[str, ...], own: bool, words: str
) -> None:
    far = str(cluster.far)
    cluster.far.mkdir()
    if own:
        cluster.hosts.run("n2", "mount", "-t", "tmpfs", "tmpfs", far)
    given = [flag.format(far=far) for flag in flags]
    cluster.start("2", 1, LEASE, "--limit=hello_s=15", *given, job=(STEPS,))
    ends = {name: cluster.end(name) for name in ("n1", "n2")}
    assert all(code not in (EXIT_DONE, EXIT_INTERRUPTED) for code, _ in ends.values()), ends
    assert words.format(far=far) in ends["n2"][1], ends["n2"][1]
    assert "n2 was refused" in ends["n1"][1]


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_directory_of_another_kind_of_run_is_refused(cluster: ApartCluster) -> None:
    """A run with one directory of all hosts does not become one of each host, nor the reverse."""
    shared, far = str(cluster.folder / "shared"), f"--durable={cluster.far}"
    quick = (LEASE, "--limit=hello_s=15", "--checkpoint-every=10", "--run-dir")
    cluster.start("2", 1, *quick, shared, far, job=("20",))
    assert cluster.codes() == {"n1": EXIT_DONE, "n2": EXIT_DONE}
    cluster.start("2", 1, *quick[:-1], far, n1=("--run-dir", shared), job=("20",))
    output = cluster.end("n1")[1]
    assert "has its own run directory now" in output and "choose another --run-dir" in output
    cluster.end("n2")
    other = (f"--durable={cluster.folder}/other", "--checkpoint-every=10")
    cluster.start("2", 1, LEASE, *other, job=("20",))
    assert cluster.codes() == {"n1": EXIT_DONE, "n2": EXIT_DONE}
    words = cluster.hosts.command(
        "n1",
        *OUTLAST,
        "run",
        "--plain",
        "--nproc-per-node=2",
        f"--run-dir={cluster.run_dir}",
        str(JOB),
        str(cluster.out),
        "20",
    )
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode not in (EXIT_DONE, EXIT_INTERRUPTED)
    output = " ".join((ended.stdout + ended.stderr).replace("│", " ").split())
    assert "is of one of several hosts, each with its own" in output
