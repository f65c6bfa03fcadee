"""`outlast ckpt copy` between directories and a bucket: equal bytes or no checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.checkpoint.bucket_server import BUCKET, BucketServer
from tests.cli.ckpt_command import Ckpt, checkpoint, flip, place, tree

from outlast.errors import EXIT_USAGE, EXIT_USER_ERROR
from outlast.launch.terms.run_identity import RunningJob

NAMES = [place(step).directory for step in range(4)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 3."""
    made = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        checkpoint(made, step)
    return made


def test_copies_are_equal_and_made_once(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    found = ckpt("copy", root, tmp_path / "a" / "b", "--json")
    assert found.code == 0 and [each["directory"] for each in found.json] == [NAMES[3]]
    assert found.json[0]["sent_bytes"] > 0 and found.json[0]["present_bytes"] == 0
    assert tree(tmp_path / "a" / "b" / NAMES[3]) == tree(root / NAMES[3])
    found = ckpt("copy", root / NAMES[3], tmp_path / "a" / "b", "--json")
    assert found.json[0]["sent_bytes"] == 0 and found.json[0]["present_bytes"] > 0
    found = ckpt("copy", root, tmp_path / "a" / "b", "--all")
    assert found.code == 0 and found.out.index(NAMES[2]) < found.out.index(NAMES[1])
    assert tree(tmp_path / "a" / "b") == tree(root)
    assert "has all checkpoints" in ckpt("copy", root, tmp_path / "a" / "b", "--all").out
    assert ckpt("copy", root, tmp_path / "a" / "b", "--all", "--json").json == []


def test_a_damaged_checkpoint_is_not_copied(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    flip(root / NAMES[2] / "shard-00001", 5000)
    found = ckpt("copy", root, tmp_path / "to", "--step", 2)
    assert found.code == EXIT_USER_ERROR and "chunk 1" in found.err and found.out == ""
    assert not (tmp_path / "to" / NAMES[2] / "commit.json").exists()
    found = ckpt("copy", root, tmp_path / "to", "--all", "--json")
    assert found.code == EXIT_USER_ERROR and "chunk 1" in found.err
    assert [bool(each["error"]) for each in found.json] == [False, True, False]
    assert [each["step"] for each in ckpt("ls", tmp_path / "to", "--json").json
            if each["state"] == "committed"] == [3, 1]  # fmt: skip


@pytest.mark.process
def test_ctrl_c_leaves_no_checkpoint_and_the_same_command_goes_on(
    ckpt: Ckpt, root: Path, tmp_path: Path
) -> None:
    to = tmp_path / "to"
    command = [sys.executable, "-m", "outlast", "ckpt", "copy", str(root), str(to)]
    with subprocess.Popen([*command, "--limit-rate", "20kB/s"], stderr=subprocess.PIPE) as process:
        pause = threading.Event()
        for _ in range(1500):
            if list(to.rglob("shard-*")):
                break
            pause.wait(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and b"Traceback" not in process.stderr.read()
        assert process.wait(20) == 130
    assert not list(to.rglob("commit.json"))
    assert [each["state"] for each in ckpt("ls", to, "--json").json] == ["uncommitted"]
    assert subprocess.run(command, timeout=60, check=False, capture_output=True).returncode == 0
    assert tree(to / NAMES[3]) == tree(root / NAMES[3])


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path_factory.mktemp("s3") / "root")
    yield server
    server.kill()


@pytest.mark.process
def test_a_bucket_is_a_target_like_any_other(
    ckpt: Ckpt, root: Path, tmp_path: Path, bucket: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.into(monkeypatch)
    address = f"s3://{BUCKET}/runs/7"
    assert ckpt("copy", root, address, "--all").code == 0
    assert [each["step"] for each in ckpt("ls", address, "--json").json] == [3, 2, 1]
    assert ckpt("verify", address, "--all").code == 0
    assert ckpt("show", f"{address}/{NAMES[2]}/", "--json").json["step"] == 2
    assert ckpt("diff", root, address).code == 0
    flip(bucket.bucket / "runs" / "7" / NAMES[3] / "shard-00000", 100)
    found = ckpt("verify", f"{address}/{NAMES[3]}")
    assert (
        found.code == EXIT_USER_ERROR and f"{address}/{NAMES[3]}/shard-00000: chunk 0" in found.out
    )
    found = ckpt("prune", address, "--keep", "last=1")
    assert "2 kept, 1 deleted" in found.out
    assert ckpt("copy", address, tmp_path / "back", "--step", 2).code == 0
    assert tree(tmp_path / "back" / NAMES[2]) == tree(root / NAMES[2])
    found = ckpt("show", address, "--step", 1)
    assert found.code == EXIT_USAGE and "there are 3, 2" in found.err
    found = ckpt("ls", "s3://no-such-bucket/x")
    assert found.code == EXIT_USER_ERROR and "no such bucket" in found.err


@pytest.mark.process
def test_missing_credentials_are_named(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    found = ckpt("ls", "az://container/x")
    assert found.code in (EXIT_USAGE, EXIT_USER_ERROR) and "AZURE_STORAGE" in found.err


def test_a_run_takes_no_checkpoint_of_another_job(ckpt: Ckpt, tmp_path: Path) -> None:
    checkpoint(tmp_path / "from", 1)
    (commit,) = (tmp_path / "from").glob("*/commit.json")
    job = json.loads(commit.read_text())["job"]
    for run, code in (("another", EXIT_USAGE), (job, 0)):
        (tmp_path / run).mkdir()
        about = RunningJob(version=1, run=run, script="x", args=(), world=1, created_ns=0, term=1)
        (tmp_path / run / "run.json").write_bytes(msgspec.json.encode(about))
        found = ckpt("copy", tmp_path / "from", tmp_path / run)
        assert found.code == code
        assert (tmp_path / run / "checkpoints").exists() == (code == 0)
