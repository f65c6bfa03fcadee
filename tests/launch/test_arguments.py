"""torchrun's command line, and ours, as somebody types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import ConfigError, UsageError
from outlast.launch.arguments import RunPlan, parse


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_both_spellings(script: str, flag: str) -> None:
    assert parse([flag, "3", script]).world == 3
    assert parse([f"{flag}=3", script]).world == 3


def test_pet_variables(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    plan = parse([script])
    assert (plan.world, plan.max_restarts) == (2, 4)
    assert parse(["--nproc-per-node", "5", script]).world == 5
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(UsageError, match="PET_"):
        parse([script])


def test_the_script_keeps_its_own_flags(script: str) -> None:
    plan = parse(["--spares", "1", script, "--spares", "7", "--json", "-m", "x"])
    assert plan.spares == 1 and not plan.json
    assert plan.args == ("--spares", "7", "--json", "-m", "x")
    assert plan.command[1:] == ("-u", script, *plan.args)
    assert plan.script == script


def test_module_and_program() -> None:
    module = parse(["-m", "json.tool", "x"])
    assert module.command[1:] == ("-u", "-m", "json.tool", "x") and module.script == "-m json.tool"
    assert parse(["--no-python", "true", "x"]).command == ("true", "x")


def test_auto_cpu_and_standalone(script: str) -> None:
    assert parse(["--nproc-per-node", "cpu", script]).world >= 1
    assert parse(["--nproc-per-node", "auto", "--standalone", script]).world >= 1


def test_ours(script: str) -> None:
    faults = ["--fault", "kill:rank=1", "--fault", "slow:step=3,for=1", "--fault-seed", "7"]
    limits = ["--limit", "lease_s=3", "--limit", "attempts_max=5"]
    rest = ["--run-dir", "here", "--checkpoint-every", "50", "--json", "--plain"]
    plan = parse([*faults, *limits, *rest, script])
    assert plan.run_dir == "here" and plan.faults == ("kill:rank=1", "slow:step=3,for=1")
    assert (plan.fault_seed, plan.checkpoint_every, plan.json, plan.plain) == (7, 50, True, True)
    assert plan.limits.lease_s == 3.0 and plan.limits.attempts_max == 5
    assert parse(["--shutdown-timeout", "7", script]).limits.stop_s == 7.0


def test_run_dirs_are_named_after_the_script(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Path(parse([script]).run_dir)
    assert first.parent == Path("runs") and first.name.startswith("train-")
    first.mkdir(parents=True)
    assert Path(parse([script]).run_dir) != first


@pytest.mark.parametrize(
    ("flags", "streams"),
    [
        ([], {0: 3, 1: 3}),
        (["--redirects", "3"], {0: 0, 1: 0}),
        (["-r", "1"], {0: 2, 1: 2}),
        (["-r", "3", "--tee", "0:1,1:2"], {0: 1, 1: 2}),
        (["--local-ranks-filter", "1"], {0: 0, 1: 3}),
    ],
)
def test_which_streams_reach_the_console(
    script: str, flags: list[str], streams: dict[int, int]
) -> None:
    assert parse(["--nproc-per-node", "2", *flags, script]).streams == streams


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--no-such-flag", "SCRIPT"], "--no-such-flag"),
        ([], "no training script"),
        (["nowhere.py"], "cannot find training script nowhere.py"),
        (["-m", "no_such_module_here"], "cannot find module no_such_module_here"),
        (["--no-python", "no-such-program-here"], "no such program"),
        (["--no-python", "-m", "json"], "exclude each other"),
        (["--nproc-per-node", "many", "SCRIPT"], "give a number, auto, cpu or gpu"),
        (["--nproc-per-node", "0", "SCRIPT"], "at least one worker"),
        (["--nnodes", "2", "SCRIPT"], "runs on one node"),
        (["--nnodes", "1:4", "SCRIPT"], "runs on one node"),
        (["--node-rank", "1", "SCRIPT"], "one node"),
        (["--spares", "-1", "SCRIPT"], "must not be negative"),
        (["--spares", "x", "SCRIPT"], "invalid int"),
        (["--fault", "melt:rank=1", "SCRIPT"], "'melt' is none of"),
        (["--limit", "lease=3", "SCRIPT"], "unknown field"),
        (["--limit", "lease_s", "SCRIPT"], "not NAME=VALUE"),
        (["--limit", "lease_s=0", "SCRIPT"], "above zero"),
        (["--limit", "attempts_max=x", "SCRIPT"], "attempts_max"),
        (["--redirects", "9", "SCRIPT"], "--redirects"),
        (["--local-ranks-filter", "a", "SCRIPT"], "--local-ranks-filter"),
        (["--signals-to-handle", "SIGKILL", "SCRIPT"], "SIGKILL"),
        (["--run-path", "SCRIPT"], "--run-path"),
        (["--virtual-local-rank", "SCRIPT"], "--virtual-local-rank"),
    ],
)
def test_wrong_use_says_what_to_do_in_one_line(script: str, argv: list[str], says: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as caught:
        parse([script if part == "SCRIPT" else part for part in argv])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_is_frozen(script: str) -> None:
    plan = parse([script])
    with pytest.raises(AttributeError):
        plan.world = 3  # type: ignore[misc]
    assert isinstance(plan, RunPlan)
