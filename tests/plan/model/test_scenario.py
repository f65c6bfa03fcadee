"""Scenarios of a cluster and a run, and refusal of impossible ones."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import quantities
from outlast.config import TOML_BYTES_MAX
from outlast.errors import ConfigError
from outlast.plan.answers.copy_counts import memory_copies
from outlast.plan.model.ladder_costs import STRATEGIES, matters
from outlast.plan.model.rates import EXACT, parse_failures
from outlast.plan.model.scenario import FIELDS, KEYS, default_text, scenario_of
from outlast.plan.model.strategy_prediction import predict, reason_impossible
from outlast.theory.failures import DAY_S, HOUR_S, PRESETS

GPUS = {"gpus": "16384"}
# What else a scenario may say: which of it matters follows from the question, not the strategy.
BESIDES = {
    "gpus", "failures-seen", "rack-nodes", "lemons", "lemon-factor", "shape", "age", "state",
    "gpu-hour", "rates", "gap-spread",
}  # fmt: skip


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "-inf", "many", "1e3s s", "0x10", "½", ""])
@pytest.mark.parametrize("key", sorted(KEYS))
def test_no_number_is_refused_by_name(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{key}"):
        scenario_of({**GPUS, key: text})


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({}, "gpus is not given"),
        ({"gpus": "0"}, "--gpus must be above 0"),
        ({"gpus": "0.5"}, "--gpus"),
        ({"gpus": "1001"}, "gpus-per-node"),
        ({"gpus": "999G"}, "--gpus 999G is out of range"),
        ({**GPUS, "cost": "5"}, "'--cost 5' needs a number and one of ms, s"),
        ({**GPUS, "cost": "5GB"}, "--cost 5GB"),
        ({**GPUS, "cost": "5min30s"}, "--cost 5min30s"),
        ({**GPUS, "state": "5min"}, "--state 5min"),
        ({**GPUS, "work": "0s"}, "--work must be above 0"),
        ({**GPUS, "gpu-hour": "$0"}, "--gpu-hour must be above 0"),
        ({**GPUS, "work": "999999y"}, "--work 999999y.*1000y"),
        ({**GPUS, "interval": "31d"}, "--interval is longer than --work"),
        ({**GPUS, "interval": "1min"}, "--flush is longer than --interval"),
        ({**GPUS, "flush": "31d"}, "--flush is longer than --work"),
        ({**GPUS, "interval": "1h", "memory-interval": "2h"}, "--memory-interval is longer"),
        ({**GPUS, "spares": "2049"}, "--spares 2,049 is more than the 2,048 nodes"),
        ({**GPUS, "copies": "3"}, "--copies 3 must divide"),
        ({**GPUS, "replica-gpus": "100"}, "--replica-gpus 100 must divide"),
        ({**GPUS, "replica-gpus": "4"}, "whole nodes of 8"),
        ({**GPUS, "transient": "60%", "fatal": "41%"}, "--transient and --fatal"),
        ({**GPUS, "fatal": "101%"}, "--fatal 101%"),
        ({**GPUS, "shape": "0.001"}, "--shape 0.001"),
        ({**GPUS, "failures-seen": "0"}, "--failures-seen must be above 0"),
        ({**GPUS, "failures-seen": "999G"}, "--failures-seen 999G"),
        ({**GPUS, "lemon-factor": "$10"}, "--lemon-factor"),
        ({**GPUS, "failures": "llama3"}, "did you mean llama3-405b"),
        ({**GPUS, "failures": "often"}, "presets are llama3-405b, rsc-1"),
        ({**GPUS, "failures": "100%/day"}, "--failures 100%/day"),
        ({**GPUS, "failures": "0%/day"}, "--failures 0%/day"),
        ({**GPUS, "failures": "0h"}, "--failures 0h"),
        ({**GPUS, "failures": "1ms"}, "--failures 1ms.*out of range"),
        ({**GPUS, "failures": "6.5/100 node-days"}, "--failures 6.5/100 node-days"),
        ({"gpus": "100M", "failures": "1h", "repair": "9d"}, "--failures 1h and --repair"),
        ({**GPUS, "gpu_s": "1"}, "flag --gpu_s is unknown: did you mean --gpus"),
        ({**GPUS, "qqq": "1"}, "flag --qqq is unknown: known are gpus"),
        ({**GPUS, "gpus-per-node": "8", "gpus_per_node": "4"}, "given twice"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one.values()) or "nothing",
)  # fmt: skip
def test_impossible_scenarios_are_refused_by_name(said: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        scenario_of(said)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpus = 16384\ncots = '5s'", "key cots is unknown: did you mean cost"),
        ("gpus = 16384\ncost = true", "cost must be a string or a number"),
        ("gpus = [1, 2]", "gpus must be a string or a number"),
        ("[gpus]\nmany = 1", "gpus must be a string or a number"),
        ("gpus = 2026-01-01", "gpus must be a string or a number"),
        ("gpus = 16384\ncost = 5", r"my.toml: cost 5' needs a number and one of"),
        ("gpus = 16384\ncost = nan", "cost nan"),
        ("gpus = 16384\nfailures = 'lama3-405b'", "my.toml: failures lama3-405b.*llama3-405b"),
        ("gpus = 16384\n'gpus-per-node' = 8\ngpus_per_node = 8", "given twice"),
        ("gpus = 1\ngpus = 2", "my.toml: "),
        ("gpus", "my.toml: "),
        ("gpus = " + "9" * 5000, "my.toml: "),
        ("gpus = 0x" + "f" * 5000, "my.toml: "),
        ("gpus = " + "[" * 5000, "my.toml: nested too deeply"),
        ("# " + "x" * TOML_BYTES_MAX, "larger than"),
    ],
    ids=lambda one: one[:30],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        scenario_of({}, file_of(tmp_path, text))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.toml: No such file"):
        scenario_of({}, tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        scenario_of({}, tmp_path)
    path = tmp_path / "latin.toml"
    path.write_bytes(b"gpus = '\xff'")
    with pytest.raises(ConfigError, match=r"latin.toml: .*utf-8"):
        scenario_of({}, path)
    with pytest.raises(ConfigError, match="larger than"):
        scenario_of({}, Path("/dev/zero"))


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    """As in `outlast plan interval <(make-scenario)`."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("gpus = 1024"), daemon=True)
    writer.start()
    assert scenario_of({}, path).gpus == 1024
    writer.join(10)


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "gpus = 16384\ncost = '30s'\nfatal = 1e-5\nfailures = 'rsc-1'")
    scenario = scenario_of({"cost": "7s"}, path)
    assert (scenario.gpus, scenario.cost_s, scenario.fatal) == (16384, 7, 1e-5)
    assert scenario.failures.name == "rsc-1"
    assert {"gpus", "cost", "fatal", "failures"}.isdisjoint(scenario.assumed)
    assert "flush" in scenario.assumed


def test_defaults_equal_explicit_flags() -> None:
    """Every default, as a flag, gives the same scenario; what follows from the nodes is named."""
    for gpus in ("8", "72", "1000", "16384"):
        plain = scenario_of({"gpus": gpus})
        texts = {field.key: default_text(plain, field) for field in FIELDS if field.default}
        said = scenario_of({"gpus": gpus, **texts})
        assert plain.assumed == KEYS.keys() - {"gpus"} and not said.assumed
        for field in FIELDS:
            if field.name in ("seen", "rates", "replica_gpus"):
                continue
            assert getattr(plain, field.name) == getattr(said, field.name)
        assert plain.replicas == said.replicas
        assert plain.nodes % plain.copies == 0
    assert scenario_of({"gpus": "1000"}).copies == 5


def test_rates_in_every_form() -> None:
    day = parse_failures("x", "0.5%/day", 8, None)
    assert day.per_gpu_s == pytest.approx(-math.log(0.995) / DAY_S)
    assert parse_failures("x", " 0.005/ d", 8, None).per_gpu_s == day.per_gpu_s
    days = parse_failures("x", "6.5/1000 node-days", 8, None)
    assert days.per_gpu_s == pytest.approx(PRESETS["rsc-1"].rate_per_device_s)
    hours = parse_failures("x", "50kh", 8, None)
    assert hours.per_gpu_s == 1 / (50_000 * HOUR_S) and hours.weight_failures == EXACT
    assert hours.at(0.05) == hours.at(0.95) == hours.per_gpu_s


@pytest.mark.parametrize(("seen", "low", "high"), [(1, 0.0513, 2.996), (40, 0.7549, 1.2735)])
def test_a_rate_is_as_sure_as_what_it_was_counted_from(seen: int, low: float, high: float) -> None:
    """Quantiles of the gamma distribution, chi-squared with twice as many degrees of freedom."""
    rate = parse_failures("x", "50kh", 8, seen)
    assert rate.at(0.05) / rate.per_gpu_s == pytest.approx(low, rel=1e-3)
    assert rate.at(0.95) / rate.per_gpu_s == pytest.approx(high, rel=1e-3)
    preset = parse_failures("x", "rsc-2", 8, None)
    assert preset.at(0.95) / preset.at(0.05) == pytest.approx(13.3, abs=0.1)


def test_every_key_that_matters_is_a_field_and_every_field_matters() -> None:
    named = set().union(*(matters(one) for one in STRATEGIES))
    assert named <= KEYS.keys()
    assert named | BESIDES == KEYS.keys()
    assert not named & (BESIDES - {"rack-nodes"})


RICH = {
    "gpus": "1024", "failures": "3kh", "failures-seen": "9", "fatal": "5%", "rack-mtbf": "1y",
    "spares": "3", "drag": "5%", "copies": "4", "interval": "30min", "memory-interval": "5min",
    "replica-gpus": "512",
}  # fmt: skip
OTHER = {
    "gpus-per-node": "4", "failures": "2kh", "transient": "30%", "fatal": "7%", "spares": "5",
    "rack-mtbf": "2y", "repair": "30h", "work": "40d", "step": "20s", "replica-gpus": "256",
    "interval": "40min", "cost": "9s", "flush": "3min", "drag": "9%", "memory-interval": "3min",
    "memory-cost": "2s", "copies": "8", "window": "10min", "detect": "2min", "restart": "20min",
    "restore": "4min", "pause": "50s",
    "overhead": "checkpoint-restart=1%,peer-memory=2%,migrate=3%,drop=4%,outlast=5%",
}  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_listed_assumptions_are_those_that_change_the_outcome(strategy: str) -> None:
    """`assumed` lists exactly what an answer depends on; the window of dropped replicas is one that
    only the simulator knows."""
    plain = predict(scenario_of(RICH), strategy)
    changes = {
        key for key, text in OTHER.items()
        if (other := predict(scenario_of({**RICH, key: text}), strategy)).outcome != plain.outcome
        or other.wall_s != plain.wall_s
    }  # fmt: skip
    assert changes | ({"window"} if strategy == "drop" else set()) == set(matters(strategy))


def test_fields_outside_of_strategies_are_used() -> None:
    """By the simulator, by what copies take, by prices and by bands."""
    pytest.importorskip("numba", reason="the job that is simulated")
    from outlast.plan.simulate.simulated_job import job_of

    rich = {**RICH, "lemons": "5%", "shape": "0.8", "spares": "9"}
    plain = scenario_of(rich)
    job = job_of(plain, "outlast")
    others = {
        "rack-nodes": "4", "gap-spread": "30%",
        "lemons": "9%", "lemon-factor": "3", "shape": "0.7", "age": "30d",
    }  # fmt: skip
    for key, text in others.items():
        assert job_of(scenario_of({**rich, key: text}), "outlast") != job, key
    dear = scenario_of({**rich, "gpu-hour": "$5"})
    assert predict(dear, "outlast").usd == pytest.approx(2 * predict(plain, "outlast").usd)
    large = memory_copies(scenario_of({**rich, "state": "3TB"})).rows[1]
    assert large.memory_per_gpu_bytes == 2 * memory_copies(plain).rows[1].memory_per_gpu_bytes
    sure = scenario_of({**rich, "failures-seen": "90"}).failures
    assert sure.at(0.95) < plain.failures.at(0.95)
    assert BESIDES - {"gpus", "gpu-hour", "state", "failures-seen", "rates"} == set(others)


UNITS = st.sampled_from(
    ["", "s", "min", "h", "d", "y", "kh", "B", "TB", "%", "k", "M", "/day", "$"]
)
NUMBERS = st.one_of(
    st.integers(-2, 10**7).map(str), st.floats(allow_nan=True, allow_infinity=True).map(str)
)
TEXTS = st.one_of(st.builds(lambda number, unit: f"{number}{unit}", NUMBERS, UNITS), st.text())


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), TEXTS, max_size=4), st.integers(1, 10**6))
def test_arbitrary_flags_are_read_or_refused(said: dict[str, str], nodes: int) -> None:
    """By ConfigError and nothing else; what is read is finite where it has to be."""
    try:
        scenario = scenario_of({"gpus": str(8 * nodes), **said})
    except ConfigError:
        return
    assert 0 < scenario.failures.per_gpu_s < math.inf
    assert 0 <= scenario.cost_s < math.inf and 0 < scenario.work_s < math.inf
    assert scenario.nodes % scenario.replicas == scenario.nodes % scenario.copies == 0
    assert not reason_impossible(scenario, "checkpoint-restart")


@given(st.binary(max_size=60))
def test_arbitrary_files_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"any\.toml|gpus is not given|must be|gpus"):
        scenario_of({"copies": "-"}, path)


def test_amounts() -> None:
    assert quantities.count("x", "16,384") == 16384 and quantities.count("x", "1.5M") == 1_500_000
    assert quantities.share("x", "5e-3") == quantities.share("x", "0.5 %") == 0.005
    assert quantities.price("x", "$ 2.50") == quantities.price("x", "2.5") == 2.5
    assert quantities.measured(quantities.SECONDS, "x", "50kh", "") == 50_000 * HOUR_S
    assert quantities.number("x", "2.5e3") == 2500
    for reader in (quantities.share, quantities.number, quantities.price, quantities.count):
        with pytest.raises(ConfigError, match="'x y'"):
            reader("x y", "-1")
