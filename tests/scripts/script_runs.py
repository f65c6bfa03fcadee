"""Runs of a catalogue script, on plain ranks and under `outlast run`, and their comparison."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.scripts.plain_ranks import PlainRanks
from tests.scripts.script_catalogue import FOLDER, Script

from outlast import events
from outlast.telemetry.event_store import read_events

DEADLINE_S = float(os.environ.get("SCRIPTS_DEADLINE_S", "300"))
REFUSED_WITHIN_STEPS = 3
LIMITS = ("--limit=hang_floor_s=3", "--limit=hang_ceiling_s=120")
Digests = list[dict[str, str]]  # by rank


class Ended(NamedTuple):
    """A launcher that has ended."""

    code: int
    output: str
    folder: Path


def run_plainly(script: Script, folder: Path, plain_ranks: PlainRanks) -> Digests:
    """Run on plain ranks, where `outlast` is a module of the same names that adds nothing."""
    codes = plain_ranks.run(script.path, script.ranks, folder)
    outputs = "\n".join(path.read_text() for path in sorted(folder.glob("output-*.txt")))
    assert set(codes) == {0}, f"plain ranks ended with exit codes {codes}\n{outputs}"
    return _plain_digests(script, folder)


def run_under_torchrun(script: Script, folder: Path) -> Digests:
    """Run the same ranks, started by torchrun."""
    words = ("torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}")
    ended = _launch([*words, str(script.path)], folder, FOLDER / "plain")
    assert ended.code == 0, f"under torchrun: exit code {ended.code}\n{ended.output}"
    return _plain_digests(script, folder)


def _plain_digests(script: Script, folder: Path) -> Digests:
    digests = _digests(folder, script.ranks)
    for rank, parts in enumerate(digests):
        reports = json.loads((folder / f"reports-{rank}.json").read_text())
        parts["reports"] = _reported({int(step): values for step, values in reports.items()})
    return digests


def _digests(folder: Path, ranks: int) -> Digests:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def reference_key(script: Script) -> str:
    """Return a name for the inputs of the reference's bits, so that it can be cached."""
    cpu = f"{torch.__version__} {sys.version} {torch.backends.cpu.get_cpu_capability()}"
    sources = [script.path, *(FOLDER / "kit").glob("*.py"), *(FOLDER / "plain").glob("*.py")]
    texts = [path.read_bytes() for path in sorted(sources)]
    return hashlib.sha256(b"\0".join([cpu.encode(), *texts])).hexdigest()[:24]


def run_outlast(script: Script, folder: Path, *faults: str) -> Ended:
    """Run under `outlast run`; with faults, beside a spare."""
    flags = ("--plain", f"--run-dir={folder / 'run'}", f"--nproc-per-node={script.ranks}")
    spares = ("--spares=1",) if faults else ()
    command = ["outlast", "run", *flags, *LIMITS, *spares, *faults, str(script.path)]
    return _launch(command, folder)


def _launch(command: list[str], folder: Path, *paths: Path) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    found = [*paths, FOLDER / "kit", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, found)),
        "DIGESTS": str(folder),
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "01"[not paths],  # torch would ask plain/outlast for ours
    }
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, cwd=folder, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            process.wait(30)
            raise AssertionError(
                f"hung: no end within {DEADLINE_S:.0f} s\n{log.read_text()[-6000:]}"
            ) from None
    return Ended(code, log.read_text(errors="replace"), folder)


def digests_of_run(ended: Ended, ranks: int) -> Digests:
    """Return the digests that the ranks wrote, and their results from the run's events."""
    digests = _digests(ended.folder, ranks)
    reports: list[dict[int, dict[str, float]]] = [{} for _ in range(ranks)]
    for event in read_events(ended.folder / "run"):
        if isinstance(event, events.Metrics):
            reports[event.seat].setdefault(event.step, {}).update(event.values)
    for parts, reported in zip(digests, reports, strict=True):
        parts["reports"] = _reported(reported)
    return digests


def _reported(reports: dict[int, dict[str, float]]) -> str:
    return repr({step: dict(sorted(reports[step].items())) for step in sorted(reports)})


def differences(got: Digests, expected: Digests) -> list[str]:
    """Return one line for each part of a rank that differs from plain torchrun."""
    return [
        f"rank {rank}: {name} is {mine.get(name)}, plain torchrun has {theirs.get(name)}"
        for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True))
        for name in theirs
        if mine.get(name) != theirs[name]
    ]


def assert_refused(script: Script, ended: Ended) -> None:
    """Assert that the run ended at its start with the expected words."""
    summary = summary_of(ended)
    assert ended.code == 1, f"exit code {ended.code} instead of a refusal\n{ended.output}"
    assert summary["outcome"] == "user_error", ended.output
    assert script.refused in ended.output, f"{script.refused!r} is not said:\n{ended.output}"
    assert summary["steps"] <= REFUSED_WITHIN_STEPS, f"refused after {summary['steps']} steps"


def summary_of(ended: Ended) -> dict[str, Any]:
    """Return the run's summary."""
    return json.loads((ended.folder / "run" / "summary.json").read_text())
