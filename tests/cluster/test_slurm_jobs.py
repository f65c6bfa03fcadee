"""Jobs of `outlast slurm submit` in a real Slurm: interrupted, cancelled, preempted, lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm, missing_requirement
from tests.end_to_end.conftest import wait_for

from outlast.errors import RunDirError
from outlast.events import Decided, PhaseDone, Warned, WorkerSeated, WorkerSpawned
from outlast.launch.nodes.slurm_drains import LOOK_S
from outlast.telemetry.event_store import read_events

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.skipif(bool(missing_requirement()), reason=missing_requirement()),
]
JOB = Path(__file__).with_name("steady_job.py")
WORLD, STEPS = 2, 200


class Jobs:
    """Jobs of one cluster. The working directory of a job is its own folder."""

    def __init__(self, hosts: Hosts, slurm: Slurm, folder: Path) -> None:
        self.hosts, self.slurm, self.folder = hosts, slurm, folder

    def submit(
        self, name: str, *flags: str, nodes: int = 1, spares: int = 0, job: tuple[str, ...] = ()
    ) -> str:
        """Submit a run of `WORLD` ranks and return the job's number."""
        (self.folder / name).mkdir()
        command = self.slurm.command(
            *(sys.executable, "-m", "outlast", "slurm", "submit", "--json", f"--name={name}"),
            *(f"--sbatch=--chdir={self.folder / name}", *flags, "--"),
            *(f"--nproc-per-node={WORLD // nodes}", f"--nnodes={nodes}:{nodes + spares}"),
            *("--limit=lease_s=3", str(JOB), str(self.folder / name / "out"), str(STEPS), *job),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["job"]

    def result(self, name: str) -> list[Any]:
        out = self.folder / name / "out"
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(WORLD)]

    def output(self, name: str, job: str) -> str:
        return (self.folder / name / f"slurm-{job}.out").read_text()

    def wait_for_step(self, name: str, job: str, step: int) -> None:
        run_dir = self.folder / name / "runs" / f"slurm-{job}"

        def reached() -> bool:
            with suppress(RunDirError):  # it has not started yet
                done = [event for event in read_events(run_dir) if isinstance(event, PhaseDone)]
                return any(event.step >= step for event in done)
            return False

        wait_for(reached, f"step {step} of job {job}")

    def resume_now(self, job: str) -> None:
        """Start a requeued job: Slurm would wait two minutes. In the second in which an attempt was
        ended, its credentials are revoked."""
        self.slurm.wait_for_state(job, "PENDING")
        self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("cluster")
    with Hosts(folder, 3) as hosts, Slurm(hosts, folder / "slurm") as slurm:
        yield Jobs(hosts, slurm, folder)


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> list[Any]:
    job = jobs.submit("undisturbed", "--time=10")
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", jobs.output("undisturbed", job)
    assert ended["Restarts"] == "0"
    return jobs.result("undisturbed")


def test_a_job_that_is_interrupted_requeues_itself_and_ends_equal(
    jobs: Jobs, undisturbed: list[Any]
) -> None:
    job = jobs.submit("interrupted", "--notice=6")
    jobs.wait_for_step("interrupted", job, 20)
    jobs.slurm.run("scancel", "--signal=USR2", job)  # as Slurm does before the time limit
    jobs.resume_now(job)
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    output = jobs.output("interrupted", job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert "term 2" in output, "the second attempt resumes the run of the first"
    assert "notice: drain: signal: SIGUSR2" in output
    assert jobs.result("interrupted") == undisturbed


def test_a_cancelled_job_saves_and_stays_cancelled(jobs: Jobs, undisturbed: list[Any]) -> None:
    job = jobs.submit("cancelled")
    jobs.wait_for_step("cancelled", job, 20)
    jobs.slurm.run("scancel", job)
    jobs.slurm.wait_for_state(job, "CANCELLED")
    run_dir = jobs.folder / "cancelled" / "runs" / f"slurm-{job}"
    wait_for(lambda: "interrupted" in jobs.output("cancelled", job), "the summary of the run")
    assert any((run_dir / "checkpoints").iterdir())
    command = [sys.executable, "-m", "outlast", "run", f"--nproc-per-node={WORLD}"]
    command += [f"--run-dir={run_dir}", str(JOB), str(jobs.folder / "cancelled/out"), str(STEPS)]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    assert jobs.result("cancelled") == undisturbed


def test_a_preempted_job_resumes_and_ends_equal(jobs: Jobs, undisturbed: list[Any]) -> None:
    where = ("--sbatch=--nodelist=n2", "--sbatch=--exclusive")
    job = jobs.submit("preempted", *where)
    jobs.wait_for_step("preempted", job, 20)
    urgent = ["--partition=urgent", "--nodelist=n2", "--exclusive", "--output=/dev/null"]
    jobs.slurm.run("sbatch", *urgent, "--wrap", "true")
    jobs.resume_now(job)
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert jobs.result("preempted") == undisturbed


def test_an_error_of_the_script_is_not_requeued(jobs: Jobs) -> None:
    (jobs.folder / "broken.py").write_text("raise KeyError('learning_rate')\n")
    command = ["outlast", "slurm", "submit", "--json", "--", str(jobs.folder / "broken.py")]
    submitted = subprocess.run(
        jobs.slurm.command(sys.executable, "-m", *command),
        capture_output=True, text=True, timeout=60, check=True, cwd=jobs.folder,
    )  # fmt: skip
    job = json.loads(submitted.stdout)["job"]
    ended = jobs.slurm.wait_for_state(job, "FAILED", "COMPLETED")
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "1:0")


def test_an_interrupted_job_of_two_nodes_requeues_itself_and_ends_equal(
    jobs: Jobs, undisturbed: list[Any]
) -> None:
    job = jobs.submit("two", nodes=2)
    jobs.wait_for_step("two", job, 20)
    jobs.slurm.run("scancel", "--signal=TERM", job)
    jobs.resume_now(job)
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    output = jobs.output("two", job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert jobs.result("two") == undisturbed


def test_ranks_leave_a_node_that_is_set_to_drain(jobs: Jobs) -> None:
    """Slurm lets a draining node run its jobs to their end; the run moves to its spare node."""
    calm = jobs.submit("calm", job=("ddp", str(jobs.folder / "none")))
    jobs.slurm.wait_for_state(calm, "COMPLETED")
    (hold := jobs.folder / "hold").touch()
    # A rank that stands 10 steps before the end decides nothing: it gets there after two looks.
    pace = str(3 * LOOK_S / STEPS)
    job = jobs.submit("drained", nodes=2, spares=1, job=("ddp", str(hold), pace))
    run_dir = jobs.folder / "drained" / "runs" / f"slurm-{job}"
    jobs.wait_for_step("drained", job, 20)
    jobs.slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a bad fan")

    def decides() -> bool:
        return any(isinstance(one, Decided) for one in read_events(run_dir))

    try:
        wait_for(decides, "the move from n2", 3 * LOOK_S)
    except AssertionError as error:
        error.add_note(jobs.output("drained", job))
        raise
    hold.unlink()
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED", "PENDING", "NODE_FAIL")
    output = jobs.output("drained", job)
    jobs.slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    found = read_events(run_dir)
    drains = [one for one in found if isinstance(one, Warned) and one.check == "slurm"]
    assert drains[0].host == "n2" and "a bad fan" in drains[0].detail
    host_of = {one.worker: one.host for one in found if isinstance(one, WorkerSpawned)}
    seated = [one for one in found if isinstance(one, WorkerSeated) and one.generation > 1]
    assert {host_of[one.worker] for one in seated} == {"n3"}, output
    assert jobs.result("drained") == jobs.result("calm")


def test_a_spare_node_of_the_job_takes_the_ranks_of_a_lost_one(
    jobs: Jobs, undisturbed: list[Any]
) -> None:
    job = jobs.submit("spare", nodes=2, spares=1)
    jobs.wait_for_step("spare", job, 20)
    jobs.hosts.power_off("n2")
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED", "PENDING", "NODE_FAIL")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), jobs.output("spare", job)
    assert jobs.result("spare") == undisturbed


def test_a_job_whose_node_loses_power_resumes_on_another(
    jobs: Jobs, undisturbed: list[Any]
) -> None:
    job = jobs.submit("lost", "--sbatch=--nodelist=n3")
    jobs.wait_for_step("lost", job, 20)
    jobs.hosts.power_off("n3")
    jobs.slurm.wait_for_state(job, "PENDING", within_s=150)
    jobs.slurm.run("scontrol", "update", f"JobId={job}", "ReqNodeList=n1", "StartTime=now+2")
    ended = jobs.slurm.wait_for_state(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert jobs.result("lost") == undisturbed
