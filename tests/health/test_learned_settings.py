"""Learned settings of a node: it is healthy with them, and missing parts are found."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.health.checks.test_gpu_check import H100
from tests.health.checks.test_link_check import ib
from tests.health.judged_samples import about, severities

from outlast.cli.main import main
from outlast.health.check_settings import parse_settings, read_settings
from outlast.health.checks import gpu_check, link_check, mount_check
from outlast.health.checks.clock_check import ClockSample
from outlast.health.checks.gpu_probe import GpusSample
from outlast.health.checks.link_check import LinksSample
from outlast.health.checks.memory_check import MemorySample
from outlast.health.checks.mount_check import MountSample
from outlast.health.learned_settings import _toml, settings_of_samples


def back(*samples: object) -> dict[str, object]:
    """What is learnt, as a file that was written and read."""
    tables, _ = settings_of_samples(samples)  # type: ignore[arg-type]
    return tomllib.loads("\n".join(_toml(tables)))


def test_learned_settings_are_expected() -> None:
    eight = GpusSample(on_bus=8, driver="550", gpus=(H100,) * 8)
    home = MountSample(
        path="/home of all", type="nfs4", options=("rw",), size_bytes=9, free_bytes=9
    )
    told = back(eight, ib(), home, ClockSample(source="tsc", available=("tsc",)))
    wanted = about(**told)
    assert severities(gpu_check.CHECK, eight, wanted) == ["healthy"] * 8
    assert (
        severities(gpu_check.CHECK, GpusSample(on_bus=7, driver="550", gpus=(H100,) * 7), wanted)[0]
        == "now"
    )
    assert severities(link_check.CHECK, ib(), wanted) == ["healthy"]
    assert severities(link_check.CHECK, ib(rate=100.0), wanted) == ["drain"]
    assert severities(link_check.CHECK, LinksSample(ports=()), wanted) == ["now"]
    assert severities(mount_check.CHECK, msgspec.structs.replace(home, type=""), wanted) == ["now"]


def test_a_lost_gpu_is_still_expected_in_learned_settings() -> None:
    """A node that had lost one was from then on expected to have seven."""
    lost = msgspec.structs.replace(H100, index=7, name="", lost=True)
    for seven in (GpusSample(on_bus=8, driver="550", gpus=(H100,) * 7),
                  GpusSample(on_bus=8, driver="550", gpus=((H100,) * 7 + (lost,)))):  # fmt: skip
        tables, notes = settings_of_samples([seven])
        assert tables["gpus"]["count"] == 8 and tables["gpus"]["name"] == H100.name
        assert notes == ["gpu: 1 of 8 are lost; the count includes them"]
        assert "now" in severities(gpu_check.CHECK, seven, about(**back(seven)))
    assert settings_of_samples(
        [MemorySample(total_bytes=None, available_bytes=None, hugepages=None, controllers=None)]
    )[1]


def test_broken_devices_are_not_learned() -> None:
    tables, notes = settings_of_samples(
        [ib("DOWN", "Polling"), GpusSample(on_bus=8, trouble="Driver Not Loaded")]
    )
    assert tables == {"links": {"expected": {}}, "gpus": {"count": 8}}
    assert notes == ["link mlx5_0/1: DOWN Polling", "gpu: Driver Not Loaded"]


@given(
    st.dictionaries(
        st.text(min_size=1), st.dictionaries(st.text(min_size=1), st.text() | st.booleans()),
        max_size=4,
    )
)  # fmt: skip
@settings(max_examples=60)
def test_any_names_are_written_as_they_are(tables: dict[str, dict[str, object]]) -> None:
    kept = {key: value for key, value in tables.items() if value}
    assert tomllib.loads("\n".join(_toml(tables))) == kept


def test_this_machine_is_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "check.toml"
    assert main(["check", "--learn", str(path)]) == 0
    assert "review it before use" in capsys.readouterr().out
    assert read_settings(path) == parse_settings(tomllib.loads(path.read_text()), "t")
    asked = ["check", "--settings", str(path), "--only", "memory", "disk"]
    assert main(asked) == 0, capsys.readouterr().out
    before = path.read_text()
    assert main(["check", "--learn", str(path)]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err and path.read_text() == before
