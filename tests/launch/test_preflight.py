"""Preflight checks before any process is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.checkpoint.bucket_server import BUCKET, BucketServer

from outlast.checkpoint.keeper import arena
from outlast.errors import ConfigError, StorageError
from outlast.launch import preflight, torchrun_arguments
from outlast.launch.host.worker_environment import free_port
from outlast.launch.torchrun_arguments import RunPlan

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

MIB = 1 << 20


@pytest.mark.parametrize(
    ("address", "says"), [("8.8.8.8", "is not this host's"), ("no.such.host.invalid", "resolve")]
)
def test_a_master_address_of_somebody_else(stage: Stage, address: str, says: str) -> None:
    plan = stage.plan(stage.script(""), "--master-addr", address)
    with pytest.raises(ConfigError, match=f"--master-addr {address} .*{says}.*nothing was started"):
        preflight.check(plan)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", socket.gethostname()])
def test_a_master_address_of_ours(stage: Stage, address: str) -> None:
    preflight.check(stage.plan(stage.script(""), "--master-addr", address))
    assert free_port(address) > 0


@pytest.mark.parametrize(
    ("copies", "rate", "says"),
    [
        ("1", "1GB/s", "--copies 2"),
        ("2", "199MB/s", "of 199 MB/s: 4 ranks send to 1 peer each, .* at least 200MB/s"),
        ("2", "200MB/s", ""),
        ("xor:4", "599MB/s", "at least 600MB/s"),
    ],
)
def test_a_rate_that_peers_can_live_with(stage: Stage, copies: str, rate: str, says: str) -> None:
    flags = ("--nproc-per-node=4", f"--copies={copies}", f"--peer-rate={rate}")
    plan = stage.plan(stage.script(""), *flags)
    if not says:
        assert preflight.check(plan) == [] and plan.peer_rate_bytes_per_s == 200_000_000
        return
    with pytest.raises(ConfigError, match=f"--peer-rate.*{says}"):
        preflight.check(plan)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """The files as the kernel shows them, on a host with 8 GiB to spare."""
    write(tmp_path / "proc/meminfo", "MemTotal: 16777216 kB", "MemAvailable: 8388608 kB")
    return tmp_path


def free(kernel: Path) -> tuple[int, str]:
    return arena.tightest_limit(kernel / "proc", kernel / "cgroup")[:2]


def test_a_host_without_control_groups(kernel: Path) -> None:
    assert free(kernel) == (8 << 30, "of this host")


@pytest.mark.parametrize("name", ["/", "/somewhere/else"])
def test_a_containers_own_limit(kernel: Path, name: str) -> None:
    """In its namespace the mount is the group, whatever the group is called outside."""
    write(kernel / "proc/self/cgroup", f"0::{name}")
    write(kernel / "cgroup/memory.max", str(64 * MIB))
    write(kernel / "cgroup/memory.current", str(60 * MIB))
    write(kernel / "cgroup/memory.stat", "anon 5", f"inactive_file {2 * MIB}", "active_file 9")
    assert free(kernel)[0] == 6 * MIB


def test_the_tightest_of_the_groups_above_counts(kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "0::/jobs/mine")
    for group, limit in (("jobs", str(100 * MIB)), ("jobs/mine", "max")):
        write(kernel / "cgroup" / group / "memory.max", limit)
        write(kernel / "cgroup" / group / "memory.current", str(90 * MIB))
    left, whose = free(kernel)
    assert left == 10 * MIB and whose.endswith("cgroup/jobs")


def test_the_first_version_of_control_groups(kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "5:devices:/x", "4:memory:/mine", "0::/")
    write(kernel / "cgroup/memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    write(kernel / "cgroup/memory/memory.usage_in_bytes", str(5 << 30))
    write(kernel / "cgroup/memory/mine/memory.limit_in_bytes", str(50 * MIB))
    write(kernel / "cgroup/memory/mine/memory.usage_in_bytes", str(60 * MIB))
    assert free(kernel)[0] == 0


def test_too_little_memory_is_said_before_anything(
    stage: Stage, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(kernel / "proc/self/cgroup", "0::/")
    write(kernel / "cgroup/memory.max", str(8 * MIB))
    write(kernel / "cgroup/memory.current", str(5 * MIB))
    monkeypatch.setattr(arena.tightest_limit, "__defaults__", (kernel / "proc", kernel / "cgroup"))
    preflight.check(stage.plan(stage.script("")))
    with pytest.raises(ConfigError, match=r"pages of 2 workers .*control group.*nothing was"):
        preflight.check(stage.plan(stage.script(""), "--nproc-per-node", "2"))


@pytest.mark.parametrize(
    ("name", "text", "nodes", "is_refused"),
    [
        ("a.py", "import torch", "2:3", True),
        ("a.py", "import torch", "2", False),
        ("a.py", "import outlast", "2:3", False),
        ("a.sh", "", "2:3", True),
        ("a.sh", "exec python train.py  # calls outlast.init()", "2:3", False),
    ],
)
def test_spare_nodes_of_an_unmodified_script(
    tmp_path: Path, name: str, text: str, nodes: str, *, is_refused: bool
) -> None:
    (script := tmp_path / name).write_text(text)
    flags = (
        f"--nnodes={nodes}",
        "--rdzv-endpoint=n1:1",
        f"--run-dir={tmp_path / 'run'}",
        "--no-python",
    )
    script.chmod(0o755)
    plan = torchrun_arguments.parse([*flags, str(script)])
    if is_refused:
        words = r"a\.(py|sh) does not name outlast.*nothing was started"
        with pytest.raises(ConfigError, match=words):
            preflight.check_node(plan)
    else:
        assert preflight.check_node(plan) == []


@pytest.fixture
def server(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path_factory.mktemp("s3") / "root")
    server.into(monkeypatch)
    yield server
    server.kill()


def with_durable(tmp_path: Path, *targets: str) -> RunPlan:
    (tmp_path / "script.py").write_text("")
    flags = ["--run-dir", str(tmp_path / "run"), *(f"--durable={target}" for target in targets)]
    return torchrun_arguments.parse([*flags, str(tmp_path / "script.py")])


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ftp://host/x", "cannot store there"),
        ("file://x", "three slashes"),
        ("s3://no-such-bucket/x", "no such bucket"),
    ],
)
def test_durable_storage_that_is_none(
    tmp_path: Path, server: BucketServer, address: str, says: str
) -> None:
    assert server.port
    told = f"--durable .*{says}.*nothing was started"
    with pytest.raises((ConfigError, StorageError), match=told):
        preflight.check(with_durable(tmp_path, address))
    assert not (tmp_path / "run").exists()


def test_durable_storage_that_answers(tmp_path: Path, server: BucketServer) -> None:
    (target,) = preflight.check(with_durable(tmp_path, f"s3://{BUCKET}/x"))
    assert target.store.where == f"s3://{BUCKET}/x"
    assert server.requests("PUT") == []
    assert preflight.check(with_durable(tmp_path)) == []


def test_a_target_out_of_reach_may_not_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "REQUEST_S", 1.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    gone = f"s3://{BUCKET}/x"
    with pytest.raises(StorageError, match=r"--durable s3.*cannot be reached.*nothing was started"):
        preflight.check(with_durable(tmp_path, gone))
    far = str(tmp_path / "far")
    both = preflight.check(with_durable(tmp_path, f"{gone} every=6h rate=1MB/s", far))
    assert [target.store.where for target in both] == [gone, far]
    assert both[0].rule.rate_bytes_per_s == 1_000_000
    write(tmp_path / "run" / "run.json", "{}")
    assert len(preflight.check(with_durable(tmp_path, gone))) == 1


def test_a_target_is_said_once(tmp_path: Path) -> None:
    far = tmp_path / "far"
    with pytest.raises(ConfigError, match=f"--durable {far} is given twice"):
        preflight.check(with_durable(tmp_path, str(far), f"file://{far} every=5"))


def test_durable_storage_in_a_folder(tmp_path: Path) -> None:
    far = tmp_path / "a" / "b"
    assert preflight.check(with_durable(tmp_path, str(far)))
    assert far.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        preflight.check(with_durable(tmp_path, str(tmp_path / "file" / "x")))
    with pytest.raises(ConfigError, match="where this run already saves"):
        preflight.check(with_durable(tmp_path, str(tmp_path / "run" / "checkpoints")))
