"""Files of measured rates, and the precedence of explicit settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.plan_command import Plan

from outlast.errors import ConfigError
from outlast.plan.model.rates import EXACT, read_rates
from outlast.plan.model.scenario import scenario_of

RATES = """
format = "outlast-rates"
version = 1
name = "here"

[failures]
per_gpu_second = 9.5e-9
weight_failures = 93.5
source = "120 failures in 18,462 node-days"
more = "for people"

[scenario]
gpus-per-node = 4
repair = "17h"
transient = 0.31

[causes]
pcie = 0.2
"""


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "rates.toml"
    path.write_text(RATES)
    return path


def test_a_scenario_takes_what_was_measured(rates: Path) -> None:
    found = scenario_of({"gpus": "1024", "rates": str(rates)})
    assert found.failures.name == "here"
    assert (found.failures.per_gpu_s, found.failures.weight_failures) == (9.5e-9, 93.5)
    assert (found.gpus_per_node, found.repair_s, found.transient) == (4, 17 * 3600, 0.31)
    taken = {"rates", "failures", "failures-seen", "gpus-per-node", "repair", "transient"}
    assert taken.isdisjoint(found.assumed) and "fatal" in found.assumed


def test_flags_take_precedence_over_measured_rates(rates: Path, tmp_path: Path) -> None:
    told = {"gpus": "1024", "rates": str(rates)}
    assert scenario_of({**told, "repair": "2h"}).repair_s == 7200
    assert scenario_of({**told, "failures-seen": "7"}).failures.weight_failures == 7
    said = scenario_of({**told, "failures": "50kh"}).failures
    assert (said.name, said.weight_failures) == ("50kh", EXACT)
    mine = tmp_path / "mine.toml"
    mine.write_text('gpus = 1024\nfailures = "rsc-1"\nfailures-seen = 5\nrepair = "2h"\nfatal = 0')
    flagged = scenario_of({"rates": str(rates)}, mine)  # a flag goes before the whole file
    assert (flagged.failures.name, flagged.repair_s, flagged.fatal) == ("here", 17 * 3600, 0)
    assert flagged.failures.weight_failures == 93.5
    mine.write_text('gpus = 1024\nrates = "rates.toml"\nrepair = "2h"')  # beside the file
    filed = scenario_of({}, mine)
    assert (filed.failures.name, filed.repair_s, filed.transient) == ("here", 7200, 0.31)
    mine.write_text('gpus = 1024\nrates = "rates.toml"\nfailures = "rsc-1"')
    assert scenario_of({}, mine).failures.name == "rsc-1"
    assert scenario_of({"failures": "50kh"}, mine).failures.name == "50kh"


@pytest.mark.parametrize(
    ("was", "now", "names"),
    [
        ("9.5e-9", "0", r"rates.toml: failures.per_gpu_second: Expected `float` >="),
        ("9.5e-9", "nan", r"rates.toml: failures.per_gpu_second"),
        ("9.5e-9", "true", r"failures.per_gpu_second: Expected `float`, got `bool`"),
        ("93.5", "-1", r"failures.weight_failures"),
        ("93.5", "inf", r"failures.weight_failures"),
        ('source = "120 failures in 18,462 node-days"', "", r"failures: .*`source`"),
        ('"outlast-rates"', '"other"', r"format: Invalid enum value 'other'"),
        ("version = 1", "version = 2", r"version 2; this Outlast reads version 1"),
        ('repair = "17h"', 'repair = "17"', r"rates.toml: repair 17.*needs a number and one of"),
        ('repair = "17h"', "repair = true", r"rates.toml: repair must be a string or a number"),
        ("repair =", "repiar =", r"rates.toml: key repiar is unknown: did you mean repair"),
        ("transient = 0.31", "transient = 2", r"rates.toml: transient 2"),
        ("[failures]", "", r"rates.toml"),
        ("[scenario]", "[scenaro]", r"rates.toml: .*unknown field `scenaro`"),
        ("version", "=", r"rates.toml: "),
    ],
)  # fmt: skip
def test_invalid_rates_are_refused_by_file_and_field(
    rates: Path, was: str, now: str, names: str
) -> None:
    assert was in RATES
    rates.write_text(RATES.replace(was, now, 1))
    with pytest.raises(ConfigError, match=names):
        scenario_of({"gpus": "1024", "rates": str(rates)})


def test_a_file_of_rates_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--rates: .*gone.toml: No such file"):
        scenario_of({"gpus": "8", "rates": str(tmp_path / "gone.toml")})
    with pytest.raises(ConfigError, match="that is no file of rates"):
        read_rates(Path("/dev/zero"))


def test_every_question_takes_it(plan: Plan, rates: Path) -> None:
    told = plan("ettr", "--gpus", "1024", "--rates", str(rates), "--json")
    assert told.code == 0 and "120 failures in 18,462 node-days" in told.json["failures"]
    assert {"failures", "transient"}.isdisjoint(one["key"] for one in told.json["assumed"])
    over = ["--over", "restart=1min,10min", "--replications", "0", "--json"]
    swept = plan("sweep", "--gpus", "1024", "--rates", str(rates), *over)
    assert swept.code == 0 and "here" in swept.json["failures"]
    typo = plan("ettr", "--gpus", "1024", "--rate", str(rates))
    assert typo.code == 2 and "did you mean --rates" in typo.err
