"""Command line of torchrun and of Outlast."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from outlast import config
from outlast.errors import ConfigError, UsageError
from outlast.launch.torchrun_arguments import RunPlan, parse

FLAGS = {flag for action in get_args_parser()._actions for flag in action.option_strings}


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


@pytest.mark.parametrize("flag", ["--token", "--log", "--keep", "--n", "--rdzv"])
def test_the_script_keeps_flags_that_abbreviate_several_of_ours(script: str, flag: str) -> None:
    assert parse([script, flag, "7"]).args == (flag, "7")
    with pytest.raises(UsageError):
        parse([flag, "7", script])


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
    plan = parse(["--nproc-per-node", "2", *faults, *limits, *rest, script])
    assert plan.run_dir == "here" and plan.faults == ("kill:rank=1", "slow:step=3,for=1")
    assert (plan.fault_seed, plan.checkpoint_every, plan.json, plan.plain) == (7, 50, True, True)
    assert plan.limits.lease_s == 3.0 and plan.limits.attempts_max == 5


@pytest.mark.skipif("--shutdown-timeout" not in FLAGS, reason="torch 2.11")
def test_the_time_to_stop_is_torchruns(script: str) -> None:
    assert parse(["--shutdown-timeout", "7", script]).limits.stop_s == 7.0


@pytest.mark.skipif("--log-line-prefix-template" not in FLAGS, reason="torch before 2.14")
def test_a_prefix_of_lines(script: str) -> None:
    assert parse(["--log-line-prefix-template", "${rank}: ", script]).line_prefix == "${rank}: "


def test_a_file_timer_is_refused(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    with pytest.raises(UsageError, match=r"TORCHELASTIC_ENABLE_FILE_TIMER=1: .* not supported"):
        parse([script])


@pytest.mark.parametrize("copies", ["0", "3", "-1"])
def test_copies_need_as_many_ranks(script: str, copies: str) -> None:
    assert parse(["--nproc-per-node", "2", "--copies", "2", script]).copies == 2
    with pytest.raises(UsageError, match=f"--copies {copies}: each is held by another rank's"):
        parse(["--nproc-per-node", "2", "--copies", copies, script])


def test_parity_needs_a_group(script: str) -> None:
    def asked(copies: str, world: int = 4) -> tuple[int, int]:
        plan = parse(["--nproc-per-node", str(world), "--copies", copies, script])
        return plan.copies, plan.parity

    assert asked("xor:3") == (1, 3) and asked("xor:4") == (1, 4)
    assert asked("xor:2") == asked("2") == (2, 0)  # of a pair, parity is a copy
    for copies, world, says in (
        ("xor:1", 4, "so that xor:2 to xor:4 are possible with 4 ranks"),
        ("xor:5", 4, "so that xor:2 to xor:4 are possible with 4 ranks"),
        ("xor:17", 20, "so that xor:2 to xor:16 are possible with 20 ranks"),
        ("xor:2", 1, "so that none is possible with 1 ranks"),
        *[(copies, 4, "give a number of copies") for copies in ("xor:x", "xor:", "x")],
        ("raid:3", 4, "give a number of copies"),
    ):
        with pytest.raises(UsageError, match=f"--copies {copies}: .*{says}"):
            asked(copies, world)


def test_random_faults_are_drawn_before_anything_starts(script: str) -> None:
    asked = ["--nproc-per-node", "4", "--fault", "kill:random=3", "--fault-seed"]
    drawn = parse([*asked, "7", script]).faults
    assert len(set(drawn)) == 3 and all(text.startswith("kill:rank=") for text in drawn)
    assert drawn == parse([*asked, "7", script]).faults != parse([*asked, "8", script]).faults


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
        (["--no-such-flag", "SCRIPT"], "unrecognized arguments: --no-such-flag; try"),
        (["--sparess", "1", "SCRIPT"], "--sparess; did you mean --spares?; try"),
        (["--checkpoint_evry=3", "SCRIPT"], "; did you mean --checkpoint_every?"),
        ([], "no training script"),
        (["nowhere.py"], "cannot find training script nowhere.py"),
        (["-m", "no_such_module_here"], "cannot find module no_such_module_here"),
        (["--no-python", "no-such-program-here"], "no such program"),
        (["--no-python", "-m", "json"], "exclude each other"),
        (["--nproc-per-node", "many", "SCRIPT"], "give a number, auto, cpu or gpu"),
        (["--nproc-per-node", "0", "SCRIPT"], "at least one worker"),
        (["--nnodes", "2", "SCRIPT"], "--nnodes above 1 needs --run-dir DIR"),
        (["--nnodes", "2:1", "SCRIPT"], "--nnodes 2:1"),
        (["--node-rank", "1", "SCRIPT"], "one node"),
        (["--spares", "-1", "SCRIPT"], "must not be negative"),
        (["--spares", "x", "SCRIPT"], "invalid int"),
        (["--fault", "melt:rank=1", "SCRIPT"], "unknown kind 'melt'"),
        (["--fault", "kill:rank=1", "SCRIPT"], "'kill:rank=1': this run has the ranks 0 to 0"),
        (["--fault", "kill:spare=0", "SCRIPT"], "this run has no spare"),
        (["--fault", "kill:step=1", "--fault", "kill:step=1", "SCRIPT"], "times=2"),
        (["--durable", "/far often=3", "SCRIPT"], "known are every, keep and rate"),
        (["--limit", "lease=3", "SCRIPT"], "no such limit"),
        (["--limit", "lease_s", "SCRIPT"], "not NAME=VALUE"),
        (["--limit", "lease_s=0", "SCRIPT"], "above zero"),
        (["--limit", "attempts_max=x", "SCRIPT"], "attempts_max"),
        (["--redirects", "9", "SCRIPT"], "--redirects"),
        (["--local-ranks-filter", "a", "SCRIPT"], "--local-ranks-filter"),
        (["--signals-to-handle", "SIGKILL", "SCRIPT"], "SIGKILL"),
        (["--run-path", "nowhere.py"], "cannot find training script"),
        (["--event-log-handler", "console", "SCRIPT"], "--event-log-handler"),
        (["--rdzv-endpoint", "localhost", "SCRIPT"], "give HOST:PORT"),
        (["--spares", "1", "SCRIPT", "${local_rank}"], "cannot be replaced for spares"),
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


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "1e10"])
def test_limits_that_no_clock_can_count(script: str, value: str) -> None:
    with pytest.raises(ConfigError, match="limit hello_s must be above zero"):
        parse(["--limit", f"hello_s={value}", script])


@pytest.mark.parametrize(
    ("version", "fits"),
    [("1.13.1", False), ("2.4.0+cu121", False), ("2.10.9", False), ("2.11.0a0", True),
     ("2.13.0+cpu", True), ("3.0", True)],
)  # fmt: skip
def test_a_torch_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    """Before its parser is touched: an old one would fail somewhere inside."""
    home = tmp_path / f"torch-{version}.dist-info"
    home.mkdir()
    (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if fits:
        config.check_torch()
        return
    for refuse in (config.check_torch, lambda: parse(["x.py"])):
        with pytest.raises(
            ConfigError, match=rf"torch {re.escape(version)} .* 2\.11 .* nothing was"
        ):
            refuse()


def test_no_torch_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path)])
        patch.delitem(sys.modules, "torch", raising=False)
        with pytest.raises(ConfigError, match=r"pip install 'outlast\[run\]'"):
            config.check_torch()


@pytest.mark.parametrize("text", ["1000000000", "9" * 20, "\u00b2", "-1", "1.5", "Auto", ""])
def test_what_is_no_interval(script: str, text: str) -> None:
    with pytest.raises(UsageError, match="is not a number of steps below"):
        parse([f"--checkpoint-every={text}", script])
    assert parse(["--checkpoint-every", "999999999", script]).checkpoint_every == 999_999_999


def test_node_checks_beside_a_run(script: str, tmp_path: Path) -> None:
    plan = parse([script])
    assert (plan.check_every_s, plan.check_settings, plan.migrate_on) == (0, "", "")
    settings = tmp_path / "check.toml"
    settings.write_text("")
    flags = ["--check-every=5min", f"--check-settings={settings}", "--migrate-on=drain"]
    plan = parse([*flags, script])
    assert (plan.check_every_s, plan.migrate_on) == (300, "drain")
    assert plan.check_settings == str(settings)


@pytest.mark.parametrize(
    "flags",
    [
        ["--migrate-on=now"],
        ["--check-settings=/etc/x.toml"],
        ["--check-every=5"],
        ["--check-every=0s"],
        ["--check-every=often"],
        ["--check-every=1h", "--migrate-on=warn"],
        ["--check-every=1h", "--check-settings=/no/such/file"],
    ],
)
def test_checks_that_cannot_be_are_refused(script: str, flags: list[str]) -> None:
    with pytest.raises(UsageError, match=r"check|migrate"):
        parse([*flags, script])
