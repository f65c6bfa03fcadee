"""A real kill under policies: what was chosen, by which rule, with which bits."""

from __future__ import annotations

import re

import pytest
from tests.end_to_end.conftest import Outcome, Runner, same

from outlast import events
from outlast.cli.main import main
from outlast.controller.inputs import RungTaken
from outlast.launch.run_journal import read_journal

pytestmark = pytest.mark.process
KILL = "--fault=kill:rank=2,step=7,phase=backward"


def decided(outcome: Outcome) -> events.Decided:
    (found,) = [e for e in outcome.events if isinstance(e, events.Decided)]
    return found


def explained(outcome: Outcome) -> str:
    return unframed(outcome.explain())


def test_checkpoint_restart_goes_back_to_the_disk_though_a_spare_waits(
    runner: Runner, undisturbed: Outcome
) -> None:
    """Copies of steps 5 and 6 are in memory, and survive: the policy leaves them out."""
    flags = ("--policy=checkpoint-restart", "--checkpoint-every=4", "--snapshot-every=1")
    outcome = runner.run(*flags, "--spares=1", KILL)
    same(outcome, undisturbed)
    chosen = decided(outcome)
    rule = "policy checkpoint-restart, killed, rung 1 of 2"
    assert (chosen.rung, chosen.step, chosen.rule) == ("restart", 4, rule)
    assert outcome.summary["committed_steps_lost"] == 2
    assert rule in explained(outcome)
    (started,) = [e for e in outcome.events if isinstance(e, events.RunStarted)]
    assert started.policy.startswith("checkpoint-restart ")
    journal = read_journal(outcome.run_dir / "journal", print)
    assert [e.rule for e in journal if isinstance(e, RungTaken)] == [rule]


@pytest.mark.extended
def test_exact_replaces_and_loses_nothing(runner: Runner, undisturbed: Outcome) -> None:
    outcome = runner.run("--policy=exact", "--spares=1", KILL)
    same(outcome, undisturbed)
    chosen = decided(outcome)
    assert (chosen.rung, chosen.rule) == ("replace", "policy exact, killed, rung 3 of 8")
    assert outcome.summary["committed_steps_lost"] == 0


def test_a_proposed_policy_decides(runner: Runner, undisturbed: Outcome) -> None:
    """What `plan advise` writes is what the controller goes by."""
    path = runner.folder / "proposed.toml"
    words = ("plan", "advise", "--gpus", "4096", "--failures", "50kh", "--policy-out", str(path))
    assert main(list(words)) == 0
    outcome = runner.run(f"--policy={path}", "--spares=1", KILL)
    same(outcome, undisturbed)
    chosen = decided(outcome)
    assert (chosen.rung, chosen.rule) == ("replace", "policy proposed, killed, rung 3 of 6")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--policy=checkpoint-restart",), "add --checkpoint-every STEPS"),
        (("--policy=exacty",), "did you mean exact?"),
    ],
)
def test_what_the_job_cannot_do_is_refused(
    runner: Runner, flags: tuple[str, ...], says: str
) -> None:
    outcome = runner.run(*flags)
    assert outcome.code == 2
    text = unframed(outcome.output)
    assert says in text and "nothing was started" in text
    assert not outcome.run_dir.exists()


def unframed(output: str) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())
