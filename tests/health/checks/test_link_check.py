"""Link check on trees of files as the kernel makes them: state, rate, errors, flaps."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from tests.health.judged_samples import about, after, found, said, severities

from outlast.health.check_memory import CheckMemory
from outlast.health.checks.link_check import CHECK, LinkPort, LinksSample, take


def write(root: Path, files: dict[str, str | int]) -> None:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def tree(root: Path) -> Path:
    """One InfiniBand port, one Ethernet interface of hardware, and a loopback."""
    port = "sys/class/infiniband/mlx5_0/ports/1"
    net = "sys/class/net"
    write(
        root,
        {
            f"{port}/state": "4: ACTIVE", f"{port}/phys_state": "5: LinkUp",
            f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/counters/link_downed": 0,
            f"{port}/counters/symbol_error": 12, f"{port}/counters/port_rcv_data": 99,
            f"{net}/eth0/device/vendor": "0x15b3", f"{net}/eth0/type": 1,
            f"{net}/eth0/operstate": "up", f"{net}/eth0/carrier": 1, f"{net}/eth0/speed": 100_000,
            f"{net}/eth0/flags": "0x1003", f"{net}/eth0/carrier_down_count": 1,
            f"{net}/eth0/statistics/rx_errors": 0, f"{net}/lo/type": 772,
            f"{net}/docker0/type": 1, f"{net}/docker0/operstate": "down",
        },
    )  # fmt: skip
    return root


def ib(
    state: str = "ACTIVE", physical: str = "LinkUp", rate: float | None = 400.0, **n: int
) -> LinksSample:
    port = LinkPort(
        name="mlx5_0/1", kind="ib", state=state, physical=physical, rate_gbps=rate, counters=n
    )
    return LinksSample(ports=(port,))


def rail(up: int, down: int, physical: str = "Polling", second: int = 0) -> LinksSample:
    """As many adapters with their first port up, or down; with `second` their second port down."""
    ports = [
        LinkPort(name=f"mlx5_{n}/1", kind="ib", state="ACTIVE" if n < up else "DOWN",
             physical="LinkUp" if n < up else physical, rate_gbps=400.0)
        for n in range(up + down)
    ]  # fmt: skip
    ports += [LinkPort(name=f"mlx5_{n}/2", kind="ib", state="DOWN", physical="Polling")
              for n in range(second)]  # fmt: skip
    return LinksSample(ports=tuple(ports))


@pytest.mark.parametrize("physical", ["Polling", "Disabled", "Sleep"])
def test_one_port_down_among_eight_is_not_healthy(physical: str) -> None:
    found = {device: one for one, device, _ in said(CHECK, rail(7, 1, physical), about())}
    assert found == {f"mlx5_{n}/1": "healthy" for n in range(7)} | {"mlx5_7/1": "warn"}


def test_unused_second_ports_are_not_missed() -> None:
    assert severities(CHECK, rail(8, 0, second=8), about()) == ["healthy"] * 16
    assert severities(CHECK, rail(1, 7), about()) == ["healthy"] * 8, "one port is no majority"


def test_a_port_that_was_up_is_missed_when_it_is_down_or_not_there() -> None:
    memory = after(CHECK, rail(2, 2), about(CheckMemory()))
    down = said(CHECK, rail(1, 3), about(memory, 60))
    text = "is DOWN (Polling); it was up at an earlier check"
    assert [one for one in down if one[0] != "healthy"] == [("drain", "mlx5_1/1", text)]
    gone = said(CHECK, rail(1, 0), about(memory, 60))
    text = "no longer exists; it was up at an earlier check"
    assert [one for one in gone if one[0] != "healthy"] == [("drain", "mlx5_1/1", text)]
    away = about(memory, 60, links={"ignore": ["mlx5_1/1"]})
    assert severities(CHECK, rail(1, 0), away) == ["healthy"]


EXPECTED = {"expected": {"mlx5_0/1": {"rate_gbps": 400.0}}}


def test_ports_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    port, eth = take(tree(tmp_path)).ports
    assert (port.name, port.kind, port.state, port.physical) == (
        "mlx5_0/1",
        "ib",
        "ACTIVE",
        "LinkUp",
    )
    assert port.rate_gbps == 400.0 and port.counters == {"link_downed": 0, "symbol_error": 12}
    assert (eth.name, eth.state, eth.rate_gbps) == ("eth0", "up", 100.0)
    assert eth.counters == {"carrier_down_count": 1, "rx_errors": 0}


def test_files_that_are_not_there_are_no_crash(tmp_path: Path) -> None:
    assert take(tmp_path).ports == ()
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (port,) = take(tmp_path).ports
    assert port.state == "unreadable" and port.rate_gbps is None and port.counters == {}


def test_a_link_as_expected_is_healthy() -> None:
    (one,) = found(CHECK, ib(), about(links=EXPECTED))
    assert (one.severity, one.symptom, one.device) == ("healthy", "ib-link", "mlx5_0/1")


def test_a_link_that_is_down_missing_or_slow_where_it_is_expected() -> None:
    wanted = about(links=EXPECTED)
    assert said(CHECK, ib("DOWN", "Disabled"), wanted) == [
        ("now", "mlx5_0/1", "is DOWN (Disabled)")
    ]
    assert said(CHECK, ib(rate=200.0), wanted) == [
        ("drain", "mlx5_0/1", "200 Gb/s; 400 are expected")
    ]
    assert severities(CHECK, ib(rate=None), wanted) == ["unknown"]
    assert said(CHECK, LinksSample(ports=()), wanted) == [("now", "mlx5_0/1", "is missing")]


def test_an_unconfigured_port_is_not_missed() -> None:
    assert severities(CHECK, ib("DOWN", "Polling"), about()) == ["healthy"]
    assert severities(CHECK, ib("INIT", "LinkUp"), about()) == ["warn"], "no subnet manager?"
    assert severities(CHECK, ib("DOWN"), about(links={"ignore": ["mlx5_0/1"]})) == []


def test_a_node_without_any_link_is_not_healthy() -> None:
    assert severities(CHECK, LinksSample(ports=()), about()) == ["unknown"]


def test_errors_count_by_the_hour_not_since_boot() -> None:
    many = ib(symbol_error=1_000_000)
    assert severities(CHECK, many, about(CheckMemory())) == ["healthy"], "of any age"
    memory = after(CHECK, many, about(CheckMemory()))
    assert severities(CHECK, ib(symbol_error=1_000_100), about(memory, 60)) == ["healthy"]
    assert said(CHECK, ib(symbol_error=1_000_101), about(memory, 60)) == [
        ("warn", "mlx5_0/1", "symbol_error rose by 101 in the last hour; limit 100")
    ]


def test_a_saturated_counter_is_reported() -> None:
    """InfiniBand's stop there until they are reset: a link that flaps would seem well."""
    text = "link_downed is saturated at 255 and no longer counts: reset it"
    assert said(CHECK, ib(link_downed=255), about()) == [("warn", "mlx5_0/1", text)]
    assert severities(CHECK, ib(link_downed=254, symbol_error=255), about()) == ["healthy"]
    assert severities(CHECK, ib(excessive_buffer_overrun_errors=15), about()) == ["healthy"]


def test_a_flap_has_memory() -> None:
    """Down three times in an hour: drain, and until it was quiet for half an hour."""
    memory, seen = CheckMemory(), []
    for t_s, downs in ((0, 5), (300, 6), (600, 7), (900, 8), (1200, 8), (2699, 8), (2700, 8)):
        at = about(memory, t_s)
        sample = ib(link_downed=downs)
        seen.append(severities(CHECK, sample, at))
        memory = after(CHECK, sample, at)
    assert seen == [["healthy"], ["warn"], ["warn"], ["drain"], ["drain"], ["drain"], ["warn"]]
    assert severities(CHECK, ib(link_downed=8), about(memory, 900 + 3601)) == ["healthy"]


def test_the_links_of_a_real_node(fixtures: Path, tmp_path: Path) -> None:
    with tarfile.open(fixtures / "gpud_sys-class-infiniband-h100.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "sys/class"
    place.mkdir(parents=True)
    (tmp_path / "testdata/sys-class-infiniband-h100.0").rename(place / "infiniband")
    sample = take(tmp_path)
    assert len(sample.ports) == 9
    up = {port.name: port.rate_gbps for port in sample.ports if port.state == "ACTIVE"}
    assert up["mlx5_4/1"] == 400.0
    wanted = about(links={"expected": {name: {"rate_gbps": rate} for name, rate in up.items()}})
    by_port = {one.device: one.severity for one in found(CHECK, sample, wanted)}
    assert by_port.keys() == {port.name for port in sample.ports}
    at_its_end = {port.name for port in sample.ports if port.counters["link_downed"] == 255}
    assert at_its_end and all(by_port[name] == "warn" for name in at_its_end)
    assert all(by_port[name] == "healthy" for name in up.keys() - at_its_end)
