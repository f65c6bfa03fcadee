"""Slurm on the hosts of `hosts.py`: a controller on n1, and a daemon on each host.

One munged serves all hosts, since its socket is a path. Jobs run as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from tests.cluster import hosts
from tests.cluster.hosts import Hosts
from tests.end_to_end.conftest import wait_for

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue")
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={first}({address})
SlurmUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout=6
KillWait=20
MinJobAge=300
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MailProg=/bin/true
NodeName={nodes} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=normal Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing_requirement() -> str:
    """Return why Slurm cannot run here, or "" if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return hosts.missing_requirement() or (
        f"Slurm needs {', '.join(missing)} (slurm-wlm, munge)" if missing else ""
    )


class Slurm:
    """A cluster of all hosts, up inside a `with` block. Its daemons end with the hosts."""

    def __init__(self, nodes: Hosts, folder: Path) -> None:
        self._hosts, self._folder = nodes, folder
        self._munged: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slurm:
        (self._folder / "state").mkdir(parents=True)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{kind}-file={self._folder}/munge.{kind}" for kind in ("key", "seed", "pid")]
        files += [f"--socket={self._folder}/munge.sock", f"--log-file={self._folder}/munge.log"]
        # --force: the folder belongs to root, and the socket is not in /run.
        self._munged = subprocess.Popen(
            ["munged", "--foreground", "--force", *files], stderr=subprocess.DEVNULL
        )
        names = self._hosts.names
        (self._folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                first=names[0],
                address=self._hosts.address(names[0]),
                folder=self._folder,
                nodes=",".join(names),
            )
        )
        try:
            wait_for((self._folder / "munge.sock").exists, "munged")
            self.run("slurmctld", "-f", str(self._folder / "slurm.conf"))
            for name in names:
                (self._folder / f"spool.{name}").mkdir()
                self._hosts.run(name, *self._with_configuration("slurmd"))
            wait_for(lambda: self.node_states() == dict.fromkeys(names, "idle"), "all nodes")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, *argv: str) -> str:
        """Run a command of Slurm on the first host and return its output."""
        return self._hosts.run(self._hosts.names[0], *self._with_configuration(*argv))

    def command(self, *argv: str) -> list[str]:
        """Return the command line that runs `argv` on the first host, as a user of the cluster."""
        return self._hosts.command(self._hosts.names[0], *self._with_configuration(*argv))

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo names it."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        return dict(line.split() for line in dict.fromkeys(lines))

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of a job, as `scontrol show job` names them."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str, within_s: float = 120.0) -> dict[str, str]:
        """Wait until a job is in one of these states; return its fields."""
        wait_for(lambda: self.job(job)["JobState"] in states, f"job {job} in {states}", within_s)
        return self.job(job)

    def _with_configuration(self, *argv: str) -> tuple[str, ...]:
        return ("env", f"SLURM_CONF={self._folder / 'slurm.conf'}", *argv)

    def _end(self) -> None:
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait(10)
