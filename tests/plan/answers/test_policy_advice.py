"""Policies that `outlast plan advise` proposes: files that are read, with reasons that hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.plan_command import Plan

from outlast.cli.main import main
from outlast.controller.recovery.recovery_policy import FROM_A_COPY
from outlast.launch.policies.policy_files import read_policy
from outlast.launch.policies.policy_needs import JobShape, check_policy
from outlast.plan.answers.advice import best_settings, settings_of
from outlast.plan.answers.policy_advice import ProposedPolicy, propose_policy
from outlast.plan.model.scenario import scenario_of

JOB = JobShape(world=8, spares=1, saves=True, on_disk=True)


def proposed(**fields: str) -> ProposedPolicy:
    texts = {name.replace("_", "-"): text for name, text in fields.items()}
    at = best_settings(scenario_of({"gpus": "4096", "failures": "50kh", **texts}))
    return propose_policy(at, settings_of(at.scenario, at.taken))


def rungs(policy: ProposedPolicy) -> list[str]:
    return [one.rung for one in policy.rungs]


def test_spares_and_replicas_call_for_the_default_order() -> None:
    policy = proposed()
    assert rungs(policy) == ["retry", "migrate", "replace", "respawn", "restart", "stop"]
    assert "would cost" in policy.left_out["shrink"]
    assert "do not pay" in policy.left_out["rollback"]
    costs = [one.usd for one in policy.rungs if one.usd]
    assert costs == sorted(costs)


def test_a_start_of_all_ranks_that_is_cheaper_comes_first() -> None:
    quick = proposed(pause="30min", restart="5s", cost="1s", flush="1s")
    assert rungs(quick) == ["retry", "restart", "stop"]
    assert "a start of all ranks is cheaper" in quick.left_out["replace"]


def test_long_repairs_of_single_replicas_call_for_shrinking_or_spares_by_their_price() -> None:
    fields = {"gpus": "64", "replica_gpus": "8", "failures": "5kh"}
    fewer = proposed(**fields, repair="30min")
    assert "shrink" in rungs(fewer) and not fewer.spares
    assert rungs(fewer).index("respawn") < rungs(fewer).index("shrink")
    stocked = proposed(**fields, repair="10d", gpu_hour="$2")
    assert ("shrink" in rungs(stocked)) != ("shrink" in stocked.left_out)
    single = proposed(**{**fields, "replica_gpus": "64"}, repair="30min")
    assert "nobody can go on" in single.left_out["shrink"]


def test_copies_in_memory_of_one_replica_are_used_where_they_pay() -> None:
    policy = proposed(gpus="512", replica_gpus="512", memory_cost="0.1s")
    assert rungs(policy)[-4:] == ["rebuild", "rollback", "restart", "stop"]
    assert "copy in memory every" in policy.file


def test_budgets_grow_with_the_upper_end_of_the_rate() -> None:
    rare, often = proposed(failures="100kh"), proposed(failures="300h", fatal="60%")
    assert rare.budgets["restart"] == 2 < often.budgets["restart"]
    unsure = proposed(failures="300h", fatal="60%", failures_seen="3")
    assert unsure.budgets["restart"] > often.budgets["restart"]
    assert "upper end" in unsure.why_budgets["restart"]
    assert "upper end" not in often.why_budgets["restart"]


@settings(max_examples=40, deadline=None)
@given(
    gpus=st.sampled_from([8, 16, 64, 512, 4096]),
    mtbf_h=st.integers(200, 10**6),
    pause_s=st.integers(0, 3600),
    restart_s=st.integers(0, 3600),
    replicas=st.sampled_from([1, 2]),
    repair_h=st.integers(1, 100),
    fatal=st.integers(0, 80),
    price=st.sampled_from(["$0.01", "$2.5", "$99"]),
)
def test_every_file_is_a_policy_whose_costs_are_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    gpus: int,
    mtbf_h: int,
    pause_s: int,
    restart_s: int,
    replicas: int,
    repair_h: int,
    fatal: int,
    price: str,
) -> None:
    policy = proposed(
        gpus=str(gpus), failures=f"{mtbf_h}h", pause=f"{pause_s}s", restart=f"{restart_s}s",
        replica_gpus=str(gpus // replicas) if gpus > 8 else "8", repair=f"{repair_h}h",
        fatal=f"{fatal}%", gpu_hour=price,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("file") / "proposed.toml"
    path.write_text(policy.file)
    found = read_policy(str(path))
    check_policy(found, JOB)
    assert [rule.rung for rule in found.default] == rungs(policy)
    assert found.budgets == policy.budgets
    live = [one.usd for one in policy.rungs if one.rung in ("replace", "respawn")]
    copies = [one.usd for one in policy.rungs if one.rung in FROM_A_COPY]
    assert all(one < copies[-1] for one in live)
    assert copies == sorted(copies)


def test_the_command_writes_a_file_that_is_explained(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    words = ("advise", "--gpus", "4096", "--failures", "50kh", "--policy-out", str(path))
    found = plan(*words)
    assert found.code == 0 and f"written to {path}" in " ".join(found.out.split())
    assert "policy: retry, migrate, replace" in found.out
    text = path.read_text()
    assert main(["policy", "explain", "--policy", str(path)]) == 0
    assert "policy mine (digest" in capsys.readouterr().out
    assert (
        plan("advise", "--gpus", "4096", "--failures", "50kh", "--json").json["policy_file"] == text
    )
    again = plan(*words)
    assert again.code == 2 and "nothing was overwritten" in again.err
    assert path.read_text() == text


def test_names_of_rates_cannot_end_a_comment(tmp_path: Path) -> None:
    rates = tmp_path / "rates.toml"
    rates.write_text(
        'format = "outlast-rates"\nversion = 1\nname = "a\\n[budgets]\\u0007 = 1"\n'
        '[failures]\nper_gpu_second = 1e-9\nweight_failures = 10\nsource = "x"\n'
    )
    at = best_settings(scenario_of({"gpus": "64", "rates": str(rates)}))
    policy = propose_policy(at, settings_of(at.scenario, at.taken))
    (tmp_path / "p.toml").write_text(policy.file)
    assert "budgets" not in read_policy(str(tmp_path / "p.toml")).classes
    assert "failures: a [budgets]  = 1." in policy.file


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--policy-out", "mine.json"), "give the name of a new .toml file"),
        (("--policy-out", "no/mine.toml"), "--policy-out no/mine.toml: there is no directory"),
        (("--policy-out", "mine.toml", "--failures", "1h"), "never ends at any settings"),
        (("--policy-outt", "mine.toml"), "policy-out"),
    ],
)
def test_bad_input_writes_nothing(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = plan("advise", "--gpus", "16384", *flags)
    assert found.code == 2 and says in found.err
    assert list(tmp_path.iterdir()) == []
