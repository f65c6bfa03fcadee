"""An unmodified script under `outlast run` and under torchrun: what its ranks find is the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.process
EXTENDED = pytest.mark.extended
PROBE = Path(__file__).with_name("rank_probe.py")
LAUNCHERS = ("torch.distributed.run", "outlast")
# What differs on purpose: docs/unmodified-scripts.md.
OURS = {"OUTLAST_WORKER", "OUTLAST_FAMILY", "PYTHONHASHSEED"}
# MASTER_ADDR is this host either way: torchrun takes its full name, which may not resolve.
HOSTS = ("MASTER_ADDR", "TORCHELASTIC_RUN_ID")
CHOSEN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "PROBE"}
THREE = ("--nnodes=1", "--nproc-per-node=3", "--monitor-interval=1", "--start-method=spawn")
TWO = ("--nproc-per-node", "2")
C10D = (*TWO, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


class Launched(NamedTuple):
    """One launcher's run."""

    root: Path
    code: int
    out: str
    err: str

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """Return what each rank of each attempt has recorded."""
        return {path.stem: json.loads(path.read_text()) for path in self.root.glob("*.json")}

    @property
    def words(self) -> set[str]:
        """Return the names of the files that ranks have written."""
        return {path.name for path in self.root.iterdir() if path.is_file()}

    def lines(self, text: str) -> list[str]:
        """Return what ranks have printed, in any order: torchrun may join their lines."""
        # Our reports repeat the last lines of a rank's log.
        text = re.sub(r"(?s)-{72}.*?-{72}|│[^\n]*|outlast: [^\n]*", "", text)
        return sorted(re.findall(r"(?:<[^>]*> |\[\w+\]:)?(?:(?:out|err) of|total) [\d.]+", text))


class Pair:
    """Starts of the same command line by both launchers."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path = tmp_path
        self.running: list[subprocess.Popen[str]] = []
        for name in list(os.environ):
            if name.startswith(("PET_", "TORCHELASTIC_", "OMP_")):
                monkeypatch.delenv(name)
        monkeypatch.setenv("TEST_SENTINEL_PARENT", "FOOBAR")
        monkeypatch.setenv("NO_COLOR", "1")

    def start(self, launcher: str, *args: str, act: str = "", **variables: str) -> Path:
        root = self.tmp_path / launcher
        root.mkdir()
        ours = ["run", "--run-dir", str(self.tmp_path / "run")] if launcher == "outlast" else []
        self.running.append(
            subprocess.Popen(
                [sys.executable, "-m", launcher, *ours, *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=PROBE.parent,
                env={**os.environ, "PROBE": str(root), "ACT": act, **variables},
            )
        )
        return root

    def end(self, root: Path) -> Launched:
        launcher = self.running.pop()
        out, err = launcher.communicate(timeout=120)
        return Launched(root, launcher.returncode, out, err)

    def run(self, *args: str, act: str = "", **variables: str) -> list[Launched]:
        """Return the runs of both launchers, torchrun's first."""
        return [self.end(self.start(name, *args, act=act, **variables)) for name in LAUNCHERS]

    def close(self) -> None:
        for launcher in self.running:
            launcher.kill()
            launcher.communicate()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(tmp_path, monkeypatch)
    # Ignored under nohup and behind `&`, and inherited.
    ignored = {
        each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGHUP, signal.SIGQUIT)
    }
    yield pair
    for each, handler in ignored.items():
        signal.signal(each, handler)
    pair.close()


def comparable(record: dict[str, Any], free: set[str]) -> dict[str, Any]:
    variables = record["environment"]
    error_file = Path(variables["TORCHELASTIC_ERROR_FILE"])
    assert error_file.is_absolute() and error_file.name == "error.json"
    kept = {name: variables[name] for name in variables.keys() - OURS - CHOSEN - free}
    return {**record, "environment": kept}


def assert_equal(theirs: Launched, ours: Launched, *free: str) -> None:
    """Assert that both have started, restarted and ended the same ranks in the same way."""
    assert theirs.records, theirs.err
    assert ours.records.keys() == theirs.records.keys(), ours.err
    for name, record in theirs.records.items():
        assert comparable(ours.records[name], set(free)) == comparable(record, set(free))
    assert (ours.code == 0) == (theirs.code == 0)
    assert ours.lines(ours.out) == theirs.lines(theirs.out)
    assert ours.lines(ours.err) == theirs.lines(theirs.err)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of(run: Launched) -> str:
    (port,) = {record["environment"]["MASTER_PORT"] for record in run.records.values()}
    return str(port)


@pytest.mark.parametrize(
    ("flags", "free"),
    [
        ([*TWO], HOSTS),
        pytest.param([*C10D, "--rdzv-id=77", "--local-addr=127.0.0.1"], (), marks=EXTENDED),
        pytest.param([*TWO, "--standalone", "--role", "trainer"], HOSTS, marks=EXTENDED),
        pytest.param([*THREE, "--rdzv-id=123", "--max-restarts=3"], HOSTS, marks=EXTENDED),
        pytest.param([*C10D, "--rdzv-id=7", "--rdzv-conf=timeout=5"], HOSTS[:1], marks=EXTENDED),
        pytest.param(["--nproc-per-node=1"], HOSTS, marks=EXTENDED),
    ],
)
def test_ranks_find_the_same(pair: Pair, flags: list[str], free: tuple[str, ...]) -> None:
    runs = pair.run(*flags, PROBE.name, "--lr", "0.1", "--spares", "-m")
    assert_equal(*runs, *free)
    ids = [run.records["0-0"]["environment"]["TORCHELASTIC_RUN_ID"] for run in runs]
    assert len({len(each) for each in ids}) == 1, "both are given, or both are UUIDs"


def test_the_static_form(pair: Pair) -> None:
    port = str(free_port())
    flags = ("--master-addr=localhost", f"--master-port={port}", "--node-rank=0", "--rdzv-id=5")
    theirs, ours = pair.run(*TWO, *flags, PROBE.name)
    assert_equal(theirs, ours)
    assert port_of(theirs) == port_of(ours) == port


@EXTENDED
def test_a_static_endpoint(pair: Pair) -> None:
    port = str(free_port())
    theirs, ours = pair.run(*TWO, f"--rdzv-endpoint=localhost:{port}", PROBE.name)
    assert_equal(theirs, ours)
    assert port_of(theirs) == port_of(ours) == port


@EXTENDED
def test_variables_in_place_of_flags(pair: Pair) -> None:
    variables = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ID": "9"}
    more = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0", "PET_ROLE": "tuner"}
    runs = pair.run(PROBE.name, **variables, **more, OMP_NUM_THREADS="3")
    assert_equal(*runs, "MASTER_ADDR")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(["-m", "rank_probe"], marks=EXTENDED),
        pytest.param(["--no-python", sys.executable, PROBE.name], marks=EXTENDED),
        pytest.param(["--run-path", str(PROBE)], marks=EXTENDED),
    ],
)
def test_modules_programs_and_paths(pair: Pair, form: list[str]) -> None:
    runs = pair.run(*TWO, *form, "x", "--y")
    for run in runs:
        for path in run.root.glob("*.json"):
            record = json.loads(path.read_text())
            if form[0] == "--run-path":  # the launcher's folder there, the working directory here
                record["path"] = ""
                record["handlers"] = []  # torchrun's child has handlers of its own
                record["leads"] = record["stdin"] = None  # and is none of a session
            path.write_text(json.dumps(record))
    assert_equal(*runs, *HOSTS)


def test_local_ranks_in_arguments(pair: Pair) -> None:
    runs = pair.run(*TWO, PROBE.name, "--device=${local_rank}", "$$HOME", "$other")
    assert_equal(*runs, *HOSTS)
    assert runs[1].records["0-1"]["argv"][1:] == ["--device=1", "$HOME", "$other"]


@pytest.mark.parametrize(
    "flags",
    [
        ["-r", "3", "-t", "0:1,1:2"],
        *(
            pytest.param(flags, marks=EXTENDED)
            for flags in (
                ["--tee", "3"],
                ["--redirects", "1"],
                ["--tee", "3", "--local-ranks-filter", "1"],
                ["--local-ranks-filter=0"],
            )
        ),
    ],
)
def test_lines_and_log_files(pair: Pair, flags: list[str]) -> None:
    logs = pair.tmp_path / "logs"
    layouts = []
    runs = []
    for launcher in LAUNCHERS:
        own = logs / launcher
        root = pair.start(
            launcher, *C10D, "--rdzv-id=job", "--log-dir", str(own), *flags, PROBE.name
        )
        runs.append(pair.end(root))
        files = own.glob("job_*/attempt_0/*/*.log")
        layouts.append({"/".join(file.parts[-3:]): file.read_text() for file in files})
    assert_equal(*runs, "MASTER_ADDR")
    theirs, ours = layouts
    assert theirs.items() <= ours.items(), "we keep every stream in a file"
    assert ours["attempt_0/1/stdout.log"] == "out of 1\n"


@EXTENDED
def test_a_template_of_prefixes(pair: Pair) -> None:
    template = "<${role_name} ${rank}/${local_rank} ${x}> "
    runs = pair.run(*TWO, "-t", "3", PROBE.name, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=template)
    assert_equal(*runs, *HOSTS)
    assert "<default 1/1 ${x}> err of 1" in runs[1].err


@EXTENDED
def test_restarts(pair: Pair) -> None:
    runs = pair.run(*TWO, "--max-restarts", "2", PROBE.name, act="restart")
    assert_equal(*runs, *HOSTS)
    assert runs[1].records.keys() == {
        f"{attempt}-{rank}" for attempt in range(3) for rank in (0, 1)
    }
    ports = {record["environment"]["MASTER_PORT"] for record in runs[1].records.values()}
    assert len(ports) == 3, "no attempt reads the store of another"


def test_a_fixed_port_stays(pair: Pair) -> None:
    port = str(free_port())
    flags = ("--max-restarts", "2", "--master-port", port)
    runs = pair.run(*TWO, *flags, PROBE.name, act="restart")
    assert_equal(*runs)
    assert port_of(runs[0]) == port_of(runs[1]) == port


@EXTENDED
def test_a_failure_ends_the_others_by_sigterm(pair: Pair) -> None:
    theirs, ours = pair.run(*TWO, "--max-restarts", "1", PROBE.name, act="fail")
    assert_equal(theirs, ours, *HOSTS)
    assert theirs.words == ours.words and "1-0-SIGTERM" in ours.words
    assert theirs.code == ours.code == 1


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=EXTENDED) for n in (signal.SIGTERM, signal.SIGHUP))],
)
def test_signals_are_passed_on(pair: Pair, number: signal.Signals) -> None:
    found = []
    for launcher in LAUNCHERS:
        root = pair.start(launcher, *TWO, PROBE.name, act="wait")
        until_s = time.monotonic() + 60
        while not all((root / f"0-{rank}-ready").exists() for rank in (0, 1)):
            assert time.monotonic() < until_s
            threading.Event().wait(0.01)
        pair.running[-1].send_signal(number)
        found.append(pair.end(root))
    theirs, ours = found
    assert theirs.words == ours.words and f"0-1-{number.name}" in ours.words
    assert theirs.code != 0 and ours.code == 4


@EXTENDED
def test_error_files(pair: Pair) -> None:
    errors = []
    for launcher in LAUNCHERS:
        above = pair.tmp_path / f"{launcher}.json"
        flags = (launcher, *TWO, PROBE.name)
        run = pair.end(pair.start(*flags, act="record", TORCHELASTIC_ERROR_FILE=str(above)))
        assert run.code == 1
        errors.append(json.loads(above.read_text()))
    theirs, ours = errors
    assert theirs["message"].keys() == ours["message"].keys()
    for name in ("message", "errorCode"):
        assert theirs["message"][name] == ours["message"][name]
    assert "shard 7 is empty" in ours["message"]["message"]


@EXTENDED
def test_the_store_outlives_rank_0(pair: Pair) -> None:
    theirs, ours = pair.run(*TWO, "--master-addr=localhost", PROBE.name, act="rank 0 ends first")
    assert_equal(theirs, ours, *HOSTS)
    assert (theirs.code, ours.code) == (0, 0), ours.err


@EXTENDED
@pytest.mark.parametrize("act", ["env://", "tcp"])
def test_process_groups(pair: Pair, act: str) -> None:
    flags = ("--master-addr=localhost", f"--master-port={free_port()}")
    theirs, ours = pair.run(*TWO, *flags, PROBE.name, act=act)
    assert_equal(theirs, ours)
    assert ours.out.count("total 2.0, launched True") == 2
