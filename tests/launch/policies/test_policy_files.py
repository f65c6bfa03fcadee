"""Policies from files and presets, and their refusals by name and line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from outlast.controller.recovery.recovery_policy import DEFAULT, RungRule
from outlast.errors import ConfigError, OutlastError, UsageError
from outlast.launch.policies.policy_files import PRESETS, preset_text, read_policy
from outlast.launch.policies.policy_needs import JobShape, check_policy

D = "[default]\nrungs = "
LAST = '[default]\nrungs = ["retry", "stop"]\n'
JOB = JobShape(world=4, spares=1, saves=True, on_disk=True)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_the_default_policy_is_its_file(tmp_path: Path) -> None:
    copied = read_policy(written(tmp_path, preset_text("default")))
    assert replace(copied, name="default") == DEFAULT == read_policy("default")


@pytest.mark.parametrize("name", PRESETS)
def test_a_copied_preset_is_the_preset_under_another_name(tmp_path: Path, name: str) -> None:
    copied = read_policy(written(tmp_path, preset_text(name)))
    assert copied.name == "mine" and copied.digest == read_policy(name).digest
    check_policy(copied, JOB)
    assert preset_text(name).startswith(f"# {name}: ")


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    policy = read_policy(
        written(
            tmp_path,
            "price_usd_per_rank_hour = 2\nrepeats_max = 7\ndeadline = 1970-01-01T01:00:10+01:00\n"
            "[budgets]\nrestart = 2\n"
            '[default]\nrungs = [{ rung = "restart", cost_max_usd = 5, steps_lost_max = 3 },'
            ' { rung = "restart", remaining_min_s = 60 }, "stop"]\n'
            '[hung]\nrungs = ["stop"]\nbudget = 3\n'
            '[exit_codes]\n42 = "license_lost"\n18 = "no_restart"\n'
            '[license_lost]\nrungs = ["restart", "stop"]\n',
        )
    )
    assert policy.rules("killed") == (
        RungRule(rung="restart", cost_max_usd=5, steps_lost_max=3),
        RungRule(rung="restart", remaining_min_s=60),
        RungRule(rung="stop"),
    )
    assert policy.rules("hung") == (RungRule(rung="stop"),)
    assert (policy.deadline_s, policy.price_usd_per_rank_hour) == (10.0, 2.0)
    assert policy.repeats_max == 7 and read_policy("exact").repeats_max == 5
    assert policy.budgets == {"restart": 2} and policy.failures_max == {"hung": 3}
    assert policy.exit_classes[42] == "license_lost" and policy.exit_classes[17]
    assert [rule.rung for rule in policy.rules("license_lost")] == ["restart", "stop"]
    assert [rule.rung for rule in policy.rules("no_restart")] == ["stop"]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[defualt]\nrungs = ['stop']", 1, "unknown key 'defualt'; did you mean default?"),
        ("repeats_max = 0\n" + LAST, 1, "repeats_max is 0, and must be from 1 to 1,000,000"),
        ("repeats_max = true\n" + LAST, 1, "repeats_max is True: give times an hour"),
        (LAST + "[hang]\nrungs = ['stop']", 3, "unknown key 'hang'; did you mean hung?"),
        (LAST + "[contract]\nrungs = ['stop']", 3, "a broken contract of a phase has no rungs"),
        (LAST + "[shrink]\nrungs = ['stop']", 3, "unknown key 'shrink'"),
        (LAST + "[killed]\nrung = ['stop']", 4, "in [killed]; did you mean rungs"),
        (D + "[\n 'retry',\n 'replce',\n 'stop']", 4, "did you mean replace?"),
        (D + "['shirnk', 'stop']", 2, "did you mean shrink?"),
        (D + "[{ rung = 'retry', spares = 1 }, 'stop']", 2, "did you mean spares_min"),
        (D + "[{ spares_min = 1 }, 'stop']", 1, "None is no rung"),
        (D + "[3, 'stop']", 1, "rung 1 is 3"),
        ("[default]\nrungs = 'stop'", 1, "has no rungs"),
        ("default = ['stop']", 1, "default is not a table"),
        (D + "[]", 1, "has no rungs"),
        (D + "['retry', 'restart']", 1, "ends in restart, which cannot always"),
        (D + "['stop', 'retry', 'stop']", 2, "so that retry behind it is never"),
        (D + "['retry', 'retry', 'stop']", 2, "rung 2: retry stands before it"),
        (D + "[{ rung = 'stop', lost_max = 1 }]", 2, "stop has no conditions"),
        (D + "[{ rung = 'retry', steps_lost_max = 1 }, 'stop']", 2, "retry makes none"),
        (D + "[{ rung = 'restart', cost_max_usd = 1 }, 'stop']", 2, "needs price_usd"),
        (D + "[{ rung = 'retry', remaining_min_s = 1 }, 'stop']", 2, "needs deadline"),
        (D + "[{ rung = 'retry', lost_max = -1 }, 'stop']", 2, "must be from 1 to"),
        (D + "[{ rung = 'retry', lost_max = 1.5 }, 'stop']", 2, "a whole number"),
        (D + "[{ rung = 'retry', lost_max = true }, 'stop']", 2, "a whole number"),
        (D + "[{ rung = 'retry', lost_max = 'x' }, 'stop']", 2, "a whole number"),
        ("deadline = 1\n" + LAST, 1, "deadline is 1; give a time with its zone"),
        ("deadline = 2026-12-24\n" + LAST, 1, "a date without time"),
        ("deadline = 2026-12-24T08:00:00\n" + LAST, 1, "a time with its zone"),
        ("price_usd_per_rank_hour = 0\n" + LAST, 1, "must be above zero"),
        ("price_usd_per_rank_hour = nan\n" + LAST, 1, "must be above zero"),
        ("price_usd_per_rank_hour = true\n" + LAST, 1, "must be above zero"),
        ("version = 2\n" + LAST, 1, "this Outlast reads version 1"),
        (LAST + "[budgets]\nretry = 0", 4, "to never take retry, leave it out of the rungs"),
        (LAST + "[budgets]\nretry = 1.0", 4, "give times an hour"),
        (LAST + "[budgets]\nstop = 1", 4, "unknown key 'stop' in [budgets]"),
        (LAST + "[budgets]\nrestart = 1", 4, "no class of failure has this rung"),
        (LAST + "[killed]\nbudget = 0\nrungs = ['stop']", 4, "to never recover, give rungs"),
        (LAST + "[killed]\nbudget = '3'\nrungs = ['stop']", 4, "give times an hour"),
        (LAST + "[notice]\nbudget = 3\nrungs = ['stop']", 4, "planned moves have no budget"),
        (LAST + "[lost]\nrungs = ['stop']\n[exit_codes]\n42 = 'losd'", 3, "unknown key 'lost'"),
        (LAST + "[exit_codes]\n42 = 'killed'", 4, "killed has another meaning"),
        (LAST + "[exit_codes]\n42 = 'budgets'", 4, "budgets has another meaning"),
        (LAST + "[exit_codes]\n42 = 'No'", 4, "give the name of a class"),
        (LAST + "[exit_codes]\n42 = 3", 4, "give the name of a class"),
        (LAST + "[exit_codes]\n0 = 'fine'", 4, "is no exit code of a failure"),
        (LAST + "[exit_codes]\n256 = 'far'", 4, "is no exit code of a failure"),
        ("exit_codes = 3\n" + LAST, 1, "exit_codes is not a table"),
        ("", 0, "there is no table [default]"),
        ("x = [", 0, "Invalid value"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_policy(written(tmp_path, text))
    message = str(caught.value)
    where = f"mine.toml, line {line}: " if line else "mine.toml: "
    assert where in message and says in message, message
    assert message.endswith("nothing was started")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    for text, is_policy in ((LAST, True), (LAST + "[hang]", False)):
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
        writer.start()
        if is_policy:
            assert read_policy(str(pipe)).name == "pipe"
        else:
            with pytest.raises(ConfigError, match=r"pipe\.toml: unknown key 'hang'"):
                read_policy(str(pipe))
        writer.join(10)
        pipe.unlink()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exacty", "did you mean exact?"),
        ("", "is no preset"),
        ("./none.toml", "No such file"),
        ("/", "Is a directory"),
        ("/dev/null", "there is no table [default]"),
    ],
)
def test_a_name_that_is_no_policy_is_refused(name: str, says: str) -> None:
    with pytest.raises(OutlastError, match="nothing was started") as caught:
        read_policy(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("rungs", "job", "says"),
    [
        ('{ rung = "replace", spares_min = 2 }', JOB, "add --spares 2, or lower spares_min"),
        ('"restart"', JOB._replace(saves=False, on_disk=False), "would lose all steps; add"),
        ('"rollback"', JOB._replace(saves=False, on_disk=False), "by rollback alone"),
        ('"restart"', JOB._replace(on_disk=False), "this job writes none"),
        ('"rollback", "restart"', JOB._replace(on_disk=False), ""),
        ('"retry", "restart"', JOB._replace(saves=False, on_disk=False), ""),
    ],
)
def test_what_the_job_cannot_do_is_refused_by_name(
    tmp_path: Path, rungs: str, job: JobShape, says: str
) -> None:
    policy = read_policy(written(tmp_path, f'[default]\nrungs = [{rungs}, "stop"]'))
    if not says:
        check_policy(policy, job)
        return
    with pytest.raises(UsageError, match="--policy mine") as caught:
        check_policy(policy, job)
    assert says in str(caught.value)
