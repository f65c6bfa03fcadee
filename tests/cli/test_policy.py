"""`outlast policy`: presets, and the answers of a policy to each class of failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main
from outlast.controller.recovery.recovery_policy import EXIT_CLASSES, FAILURES
from outlast.launch.policies.policy_files import PRESETS, preset_text


def answers(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["policy", "explain", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def rungs(found: dict[str, Any], failure: str) -> dict[str, str]:
    return {one["case"]: one["rung"] for one in found["answers"] if one["failure"] == failure}


def test_every_preset_is_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "show"]) == 0
    listed = capsys.readouterr().out
    for name in PRESETS:
        assert f"{name}: " in listed
        assert main(["policy", "show", name]) == 0
        assert capsys.readouterr().out == preset_text(name)
    assert main(["policy", "show", "exakt"]) == 2
    assert "did you mean exact?" in capsys.readouterr().err


def test_each_class_of_failure_has_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys)
    assert {one["failure"] for one in found["answers"]} == {*FAILURES, *EXIT_CLASSES.values()}
    assert all(one["reason"] and one["rule"] for one in found["answers"])
    killed = {"one": "replace", "no-spare": "respawn", "no-replica": "rollback", "all": "rollback"}
    assert rungs(found, "killed") == killed
    assert rungs(found, "notice") == {"one": "migrate"}


def test_a_policy_and_the_spares_change_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys, "--policy", "checkpoint-restart")
    assert set(rungs(found, "killed").values()) == {"restart"}
    (notice,) = [one for one in found["answers"] if one["failure"] == "notice"]
    assert notice["rung"] == "stay" and "has no rung migrate" in notice["reason"]
    assert rungs(answers(capsys, "--spares", "0"), "notice") == {"one": "stay"}
    assert main(["policy", "explain", "--policy", "cheapest"]) == 0
    text = capsys.readouterr().out
    assert "budget: restart at most 2 times an hour" in text and "respawn" in text


def test_rungs_behind_the_deadline_are_passed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "past.toml"
    path.write_text(
        "deadline = 1999-01-01T00:00:00Z\n[default]\n"
        'rungs = [{ rung = "replace", remaining_min_s = 10 }, "respawn", "stop"]\n'
    )
    found = answers(capsys, "--policy", str(path))
    assert rungs(found, "killed")["one"] == "respawn"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--ranks", "0"), 2, "at least 1 rank"),
        (("--policy", "nothing"), 2, "is no preset"),
        (("/dev/null",), 1, "cannot be read"),
        ((__file__,), 2, "is a file, and no run directory; a policy is given by --policy"),
    ],
)
def test_bad_input_is_named(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], code: int, says: str
) -> None:
    assert main(["policy", "explain", *flags]) == code
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())
