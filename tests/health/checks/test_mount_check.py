"""Mount check: present, responsive, writable and not full; a hanging path is late."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.health.judged_samples import about, found, said, severities

from outlast.health.check_settings import CheckSettings, parse_settings
from outlast.health.checks import mount_check
from outlast.health.checks.mount_check import (
    CHECK,
    MountLine,
    MountSample,
    parse_mounts,
    probes,
    take,
)

HOME = MountSample(
    path="/home", source="fs1:/home", type="nfs4", options=("rw", "hard"), size_bytes=10**13,
    free_bytes=10**12, inodes=10**6, inodes_free=10**5,
)  # fmt: skip


def mounted(**other: object) -> MountSample:
    fields = {name: getattr(HOME, name) for name in HOME.__struct_fields__}
    return MountSample(**{**fields, **other})


WANTED = {"expected": {"/home": {"type": "nfs4"}}}


def test_a_mount_as_expected_is_healthy() -> None:
    assert said(CHECK, HOME, about(mounts=WANTED)) == [
        ("healthy", "/home", "nfs4, 1000 of 10000 GB free")
    ]


@pytest.mark.parametrize(
    ("other", "severity", "detail"),
    [
        ({"type": ""}, "now", "nothing is mounted there"),
        ({"type": "xfs"}, "drain", "is xfs; nfs4 is expected"),
        ({"options": ("ro",)}, "now", "fs1:/home is read-only"),
        ({"trouble": "Stale file handle (ESTALE)"}, "now", "Stale file handle (ESTALE)"),
        ({"trouble": "Permission denied", "denied": True}, "unknown", "Permission denied"),
        ({"free_bytes": 10**11}, "warn", "99.0 % full, at most 97 % is expected"),
        ({"inodes_free": 10}, "warn", "100.0 % out of inodes, at most 97 % is expected"),
        ({"size_bytes": 0, "free_bytes": 0}, "healthy", "nfs4, 0 of 0 GB free"),
    ],
)
def test_each_mount_fault_is_a_finding(
    other: dict[str, object], severity: str, detail: str
) -> None:
    assert said(CHECK, mounted(**other), about(mounts=WANTED)) == [(severity, "/home", detail)]


def test_a_full_disk_of_the_nodes_own_drains_it() -> None:
    (one,) = found(CHECK, mounted(type="ext4", free_bytes=0), about())
    assert (one.severity, one.symptom) == ("drain", "disk")


def test_an_unconfigured_read_only_mount_is_no_fault() -> None:
    assert severities(CHECK, mounted(options=("ro",)), about()) == ["healthy"]


def test_the_kernels_table_is_read() -> None:
    lines = parse_mounts(
        "fs:/a\\040b /mnt/a\\040b nfs4 rw,hard 0 0\nodd\n/dev/sda1 / ext4 ro 0 0\n"
    )
    assert lines[0] == MountLine("fs:/a b", "/mnt/a b", "nfs4", ("rw", "hard"))
    assert [line.path for line in lines] == ["/mnt/a b", "/"]


def test_probed_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected, servers and disks; each source once, and nothing of the kernel's own."""
    listed = tmp_path / "mounts"
    listed.write_text(
        "proc /proc proc rw 0 0\n/dev/sda1 / ext4 rw 0 0\n/dev/sda1 /etc/hosts ext4 rw 0 0\n"
        "fs:/h /home nfs4 rw 0 0\nscratch /scratch lustre rw 0 0\ntmpfs /run tmpfs rw 0 0\n"
        "tmpfs /dev/shm tmpfs rw 0 0\noverlay /var/lib/x overlay rw 0 0\n"
    )
    monkeypatch.setattr(mount_check, "TABLE", listed)
    asked = parse_settings(
        {"mounts": {"expected": {"/data": {}, "/run": {}}, "ignore": ["/scratch"]}}, "t"
    )
    assert {probe.device for probe in probes(asked)} == {
        "/", "/home", "/data", "/run", "/dev/shm", "/var/lib/x",
    }  # fmt: skip
    answers = {probe.device: probe for probe in probes(asked)}
    assert answers["/data"].take() == MountSample(path="/data")
    assert {probe.device for probe in probes(CheckSettings())} == {
        "/", "/home", "/scratch", "/dev/shm", "/var/lib/x",
    }  # fmt: skip


def test_an_automount_is_judged_after_it_was_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table shows autofs until somebody looks."""
    listed, place = tmp_path / "mounts", tmp_path / "home"
    place.mkdir()
    listed.write_text(f"auto {place} autofs rw 0 0\nfs:/h {place} nfs4 ro 0 0\n")
    monkeypatch.setattr(mount_check, "TABLE", listed)
    sample = take(str(place), MountLine("auto", str(place), "autofs", ("rw",)))
    assert (sample.type, sample.source, sample.options) == ("nfs4", "fs:/h", ("ro",))


def test_mount_names_of_arbitrary_bytes_are_reported_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may mount a file system chooses its name, and a report must still be written."""
    listed, place = tmp_path / "mounts", os.fsencode(tmp_path) + b"/home\xff"
    os.mkdir(place)  # noqa: PTH102 - of bytes
    listed.write_bytes(b"fs:/\xff " + place + b" nfs4 rw,x=\xff 0 0\n")
    monkeypatch.setattr(mount_check, "TABLE", listed)
    (probe,) = probes(CheckSettings())
    sample = msgspec.json.decode(msgspec.json.encode(probe.take()), type=MountSample)
    assert sample.path == probe.device and sample.path.endswith("home\\xff")
    assert sample.size_bytes > 0


def test_the_root_of_this_machine_answers() -> None:
    sample = take("/", MountLine("x", "/", "ext4", ("rw",)))
    figures = os.statvfs("/")
    assert sample.size_bytes > sample.free_bytes > 0 and sample.inodes == figures.f_files


def test_a_failing_path_is_reported_with_its_errno(tmp_path: Path) -> None:
    sample = take(str(tmp_path / "none"), MountLine("x", "x", "nfs", ("rw",)))
    assert sample.trouble == "No such file or directory (ENOENT)"
    looped = tmp_path / "loop"
    looped.symlink_to(looped)
    assert "ELOOP" in partial(take, str(looped), MountLine("x", "x", "nfs", ()))().trouble
