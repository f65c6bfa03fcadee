"""`make demo-cluster`: a small GPT on three hosts and a spare one; the controller's host freezes,
and another one is unplugged.

The hosts are namespaces of this machine (`hosts.py`). The same training follows on one host,
undisturbed, and both are compared to the last bit.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from tests.cluster.hosts import Hosts, missing_requirement

from outlast.cli.demo import compare, example
from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_USAGE, RunDirError
from outlast.events import PhaseDone
from outlast.telemetry.event_store import read_events

HOSTS, SPARES, STEPS = 3, 1, 60
LEASE_S = 3.0
WITHIN_S = 600.0


class Deed(NamedTuple):
    """What is done to a host when the run has committed a step."""

    step: int
    host: str
    text: str
    do: Callable[[Hosts, str], None]


DEEDS = (
    Deed(20, "n1", "the controller's host n1 freezes", Hosts.stop),
    Deed(
        40,
        "n3",
        "the cable of n3 is pulled out",
        lambda hosts, name: hosts.set_link(name, up=False),
    ),
)


def main() -> int:
    """Run the demo; return EXIT_DONE if both trainings are equal to the last bit."""
    if missing := missing_requirement():
        say(f"demo-cluster: {missing}; nothing was started; run it as root: sudo make demo-cluster")
        return EXIT_USAGE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_GAVE_UP))  # the hosts are removed
    folder = Path("runs", time.strftime("demo-cluster-%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True)
    say(f"1/2  {STEPS} steps on {HOSTS} hosts, with {SPARES} spare; files are in {folder}")
    disturbed, undisturbed = folder / "on-hosts", folder / "on-one-host"
    with Hosts(folder, HOSTS + SPARES) as hosts:
        train_on(hosts, folder, disturbed)
    say("2/2  the same training on one host, undisturbed")
    command = run_command(undisturbed, f"--nproc-per-node={HOSTS}", "--checkpoint-every=0")
    subprocess.run(command, check=True, timeout=WITHIN_S)
    found = compare(disturbed, undisturbed, faults=0)
    equal = found.steps_equal and found.losses_equal and found.digests_equal
    say(
        f"committed steps: {found.steps[0]} on {HOSTS} hosts, {found.steps[1]} on one"
        f"\nlosses that were reported: {found.losses[0]} and {found.losses[1]},"
        f" {'equal' if found.losses_equal else 'DIFFERENT'}"
        f"\nparameters sha256: {found.digests[0][:16]} and {found.digests[1][:16]}"
        f"\n\n{'equal to the last bit' if equal else 'NOT equal'}:"
        f" {', '.join(deed.text for deed in DEEDS)}; what it cost: outlast explain {disturbed}"
    )
    return EXIT_DONE if equal else EXIT_GAVE_UP


def say(text: str) -> None:
    """Print one message between the launchers' own lines."""
    print(f"\n{text}", flush=True)


def run_command(run_dir: Path, *flags: str) -> list[str]:
    """Return the command line of a launcher."""
    common = ("--plain", "--run-dir", str(run_dir), *flags)
    words = [sys.executable, "-m", "outlast", "run", *common]
    return [*words, str(example()), f"--steps={STEPS}"]


def train_on(hosts: Hosts, folder: Path, run_dir: Path) -> None:
    """Train on all hosts while the deeds are done."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    flags = (
        *(f"--nnodes={HOSTS}:{HOSTS + SPARES}", "--nproc-per-node=1", "--rdzv-endpoint=n1:29400"),
        *(f"--token-file={token}", "--checkpoint-every=10", f"--limit=lease_s={LEASE_S:g}"),
    )
    launchers: dict[str, subprocess.Popen[str]] = {}
    for name in hosts.names:
        launchers[name] = subprocess.Popen(
            hosts.command(name, *run_command(run_dir, *flags)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        Thread(target=show, args=(name, launchers[name]), daemon=True).start()
    sound = [name for name in hosts.names if name not in {deed.host for deed in DEEDS}]
    try:
        for deed in DEEDS:
            wait_for_step(run_dir, deed.step, launchers[sound[0]])
            say(f"step {deed.step} is committed: {deed.text}")
            deed.do(hosts, deed.host)
        if {launchers[name].wait(WITHIN_S) for name in sound} != {EXIT_DONE}:
            raise SystemExit(f"the run did not end well; see {folder}")
    finally:
        for launcher in launchers.values():
            launcher.kill()
            launcher.wait()


def show(name: str, launcher: subprocess.Popen[str]) -> None:
    """Print what a host's launcher prints."""
    assert launcher.stdout is not None
    for line in launcher.stdout:
        print(f"{name} | {line}", end="", flush=True)


def wait_for_step(run_dir: Path, step: int, launcher: subprocess.Popen[str]) -> None:
    """Wait until a rank has committed a step. Raises SystemExit if the launcher has ended."""
    until_s = time.monotonic() + WITHIN_S
    while launcher.poll() is None and time.monotonic() < until_s:
        with suppress(RunDirError):  # nothing is written yet
            for event in read_events(run_dir):
                if isinstance(event, PhaseDone) and event.step >= step:
                    return
        Event().wait(0.1)
    raise SystemExit(f"step {step} was not reached; see {run_dir}")


if __name__ == "__main__":
    sys.exit(main())
