"""Recovery policies: conditions, budgets, and an end of every failure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.controller.inputs import Emit, FailedWorker, RungTaken, Verify
from outlast.controller.recovery.recovery_ladder import Situation, choose
from outlast.controller.recovery.recovery_policy import (
    DEFAULT,
    FAILURES,
    FROM_A_COPY,
    HOUR_NS,
    RUNGS,
    Means,
    RecoveryPolicy,
    Rung,
    RungRule,
    class_of,
    plain_rules,
)
from outlast.events import Fault
from outlast.transport import messages

KILLED = Fault(kind="killed", detail="w1 was killed")
HUNG = Fault(kind="hung", detail="rank 2 hangs")
RULES = plain_rules("replace", "stop")
SITUATION = Situation(
    cause=KILLED, lost=(2,), donors=3, spares=1, respawns=9, world=4, checkpoint_n=8, disk_n=4,
    steps_lost=1, disk_steps_lost=5, in_memory=True,
)  # fmt: skip


def policy(*rules: Rung | RungRule, **fields: Any) -> RecoveryPolicy:
    listed = tuple(RungRule(rung=rule) if isinstance(rule, str) else rule for rule in rules)
    return RecoveryPolicy(name="mine", default=listed, **fields)


@pytest.mark.parametrize(
    ("rules", "rung", "says"),
    [
        (("restart", "stop"), "restart", "checkpoint at phase 4; steps that a rank has completed"),
        (("rollback", "restart", "stop"), "rollback", "copy in memory at phase 8"),
        (("respawn", "stop"), "respawn", "started anew"),
        (("retry", "stop"), "stop", "no other rung of the policy applies"),
        (("stop",), "stop", "no other rung"),
    ],
)
def test_the_first_rung_of_the_policy_that_works(rules: Any, rung: str, says: str) -> None:
    choice = choose(SITUATION, policy(*rules))
    assert choice.rung == rung and says in choice.reason
    assert choice.rule == f"policy mine, killed, rung {rules.index(rung) + 1} of {len(rules)}"


def test_a_class_of_failure_has_its_own_rungs() -> None:
    mine = policy("replace", "stop", classes={"hung": plain_rules("restart", "stop")})
    assert choose(SITUATION, mine).rung == "replace"
    assert choose(replace(SITUATION, cause=HUNG), mine).rung == "restart"


@pytest.mark.parametrize(
    ("rule", "means", "says"),
    [
        (RungRule(rung="replace", spares_min=2), Means(warm=1), "2 warm spare(s), and there are 1"),
        (RungRule(rung="replace", lost_max=0), Means(), "up to 0 lost rank(s), and 1 are lost"),
        (RungRule(rung="rollback", steps_lost_max=0), Means(), "0 step(s), and would redo 1"),
        (RungRule(rung="rollback", cost_max_usd=1), Means(), "no step was timed by a save"),
        (RungRule(rung="rollback", cost_max_usd=1), Means(step_s=3600), "would cost $40.00"),
        (RungRule(rung="replace", remaining_min_s=60), Means(now_ns=90 * S), "and 10 are"),
    ],
)  # fmt: skip
def test_a_condition_that_is_not_met_passes_the_rung(
    rule: RungRule, means: Means, says: str
) -> None:
    mine = policy(rule, "stop", price_usd_per_rank_hour=10.0, deadline_s=100.0)
    choice = choose(replace(SITUATION, means=means), mine)
    assert choice.rung == "stop" and says in choice.reason
    met = Means(warm=2, step_s=1.0, now_ns=0)
    if rule.lost_max is None and rule.steps_lost_max is None:
        assert choose(replace(SITUATION, means=met), mine).rung == rule.rung


def test_a_budget_counts_one_rung_for_an_hour() -> None:
    mine = policy("replace", "restart", "stop", budgets={"replace": 2})
    spent = Means(
        rungs=(("replace", "killed", 0), ("replace", "killed", S), ("restart", "hung", S)),
        now_ns=HOUR_NS - 1,
    )
    choice = choose(replace(SITUATION, means=spent), mine)
    assert choice.rung == "restart" and "taken 2 times within an hour" in choice.reason
    later = replace(spent, now_ns=HOUR_NS)
    assert choose(replace(SITUATION, means=later), mine).rung == "replace"


def test_a_class_is_recovered_from_as_often_as_its_budget_allows() -> None:
    mine = policy("replace", "stop", failures_max={"killed": 2}, classes={"killed": RULES})
    twice = (("replace", "killed", 0), ("retry", "killed", S), ("replace", "hung", S))
    spent = replace(SITUATION, means=Means(rungs=twice, now_ns=HOUR_NS - 1))
    choice = choose(spent, mine)
    assert choice.rung == "stop" and choice.rule == "policy mine, killed, budget"
    assert "recovered from 2 times within an hour, and the budget is 2" in choice.reason
    assert choose(replace(spent, cause=HUNG), mine).rung == "replace"
    later = replace(spent, means=replace(spent.means, now_ns=HOUR_NS))
    assert choose(later, mine).rung == "replace"


def test_repeats_count_workers_that_a_failure_has_ended_within_an_hour() -> None:
    mine = policy("retry", "replace", "stop", repeats_max=2)
    exited = Fault(kind="exited", detail="", worker="w5", seat=2, exit_code=1)
    failed = tuple(FailedWorker("exit code 1", 2, f"w{at}", at * S) for at in (0, 1, 1))
    spent = replace(SITUATION, cause=exited, means=Means(failed=failed, now_ns=HOUR_NS - 1))
    choice = choose(spent, mine)
    assert choice.rung == "stop" and choice.rule == "policy mine, exited, repeats_max"
    assert choose(replace(spent, cause=replace(exited, worker="w1")), mine).rung == "replace"
    assert choose(replace(spent, cause=replace(exited, seat=1)), mine).rung == "replace"
    assert choose(replace(spent, lost=()), mine).rung == "retry", "no worker is lost by it"
    later = replace(spent, means=replace(spent.means, now_ns=HOUR_NS))
    chosen = choose(later, mine)
    assert chosen.failed == FailedWorker("exit code 1", 2, "w5", HOUR_NS)


def test_a_budget_of_default_is_for_each_class_without_a_table() -> None:
    mine = policy("replace", "stop", failures_max={"default": 1}, classes={"killed": RULES})
    taken = (("replace", "killed", S), ("replace", "exited", S))
    spent = replace(SITUATION, means=Means(rungs=taken, now_ns=2 * S))
    assert choose(spent, mine).rung == "replace", "killed has a table"
    assert choose(replace(spent, cause=HUNG), mine).rung == "replace", "none of its class"
    exited = Fault(kind="exited", detail="exit code 1", exit_code=1)
    assert choose(replace(spent, cause=exited), mine).rung == "stop"


@pytest.mark.parametrize(
    ("code", "failure", "rung"),
    [
        (1, "exited", "replace"),
        (16, "resume_to_disambiguate", "replace"),
        (17, "failed_validation", "stop"),
        (93, "no_restart", "stop"),
        (42, "license_lost", "restart"),
    ],
)
def test_an_exit_code_names_a_class(code: int, failure: str, rung: str) -> None:
    restart = plain_rules("restart", "stop")
    mine = policy("replace", "stop", exit_codes={42: "license_lost"}, classes={})
    mine = replace(mine, classes={"license_lost": restart})
    left = Fault(kind="exited", detail=f"exit code {code}", exit_code=code)
    choice = choose(replace(SITUATION, cause=left), mine)
    assert (choice.rung, choice.rule.split(", ")[1]) == (rung, failure)
    assert class_of(choice.rule) == failure


def test_a_file_decides_about_codes_of_others() -> None:
    left = replace(SITUATION, cause=Fault(kind="exited", detail="", exit_code=93))
    mine = policy("replace", "stop", classes={"no_restart": RULES, "exited": plain_rules("stop")})
    assert choose(left, mine).rung == "replace"
    again = replace(left, cause=Fault(kind="exited", detail="", exit_code=16))
    assert choose(again, mine).rung == "stop", "as exited, which has a table"
    killed = replace(left, cause=Fault(kind="killed", detail="", exit_code=93))
    assert policy("stop").failure_class(killed.cause) == "killed"


def test_requests_are_no_failures_and_follow_no_policy() -> None:
    saved = replace(SITUATION, cause=Fault(kind="save", detail="now"), lost=())
    assert choose(saved, policy("restart", "stop")).rung == "retry"


def test_no_restart_without_need_loses_all_steps_unless_nothing_cheaper_is_named() -> None:
    new = replace(SITUATION, spares=0, respawns=0, checkpoint_n=0, disk_n=0, in_memory=False)
    assert choose(new).rung == "stop"
    assert choose(new, policy("restart", "stop")).rung == "restart"


# --- every valid policy ends every class of failure ----------------------------------------

_whole = st.none() | st.integers(0, 3)
_rules = st.builds(
    RungRule,
    rung=st.sampled_from([rung for rung in RUNGS if rung != "stop"]),
    spares_min=_whole, lost_max=_whole, steps_lost_max=_whole,
    cost_max_usd=st.none() | st.floats(0, 10), remaining_min_s=st.none() | st.floats(0, 100),
)  # fmt: skip
_lists = st.lists(_rules, max_size=8).map(lambda rules: (*rules, RungRule(rung="stop")))
_policies = st.builds(
    RecoveryPolicy,
    name=st.just("drawn"),
    default=_lists,
    classes=st.dictionaries(st.sampled_from(FAILURES), _lists, max_size=4),
    budgets=st.dictionaries(st.sampled_from(RUNGS[:-1]), st.integers(1, 3)),
    price_usd_per_rank_hour=st.floats(0, 10),
    deadline_s=st.floats(0, 1000),
)
_kinds = st.sampled_from([each for each in FAILURES if each != "notice"] + ["requested", "save"])


@st.composite
def _situations(draw: st.DrawFn) -> Situation:
    world = draw(st.integers(1, 4))
    seats = st.sets(st.integers(0, world - 1)).map(lambda found: tuple(sorted(found)))
    lost = draw(seats)
    diverged = draw(st.booleans())
    checkpoint_n = draw(st.sampled_from([0, 5]))
    return Situation(
        cause=Fault(kind=draw(_kinds), detail="d", seat=draw(st.sampled_from([-1, 0]))),
        lost=lost,
        planned=lost if draw(st.booleans()) else (),
        stateless=lost[: draw(st.integers(0, 1))],
        unreplicated=draw(seats) if draw(st.booleans()) else (),
        copy_step=draw(st.sampled_from([-1, 4])),
        donors=0 if diverged else draw(st.integers(0, world)),
        diverged=diverged,
        spares=draw(st.integers(0, len(lost))),
        cold=draw(st.integers(0, 1)),
        respawns=draw(st.integers(0, 3)),
        restarts=draw(st.integers(0, 3)),
        world=world,
        checkpoint_n=checkpoint_n,
        in_memory=bool(checkpoint_n) and draw(st.booleans()),
        disk_n=draw(st.sampled_from([0, 3])),
        means=Means(warm=draw(st.integers(0, 3)), step_s=draw(st.floats(0, 9))),
    )


@given(_policies, _situations())
def test_any_policy_chooses_a_rung_that_can_be_taken(
    mine: RecoveryPolicy, situation: Situation
) -> None:
    choice = choose(situation, mine)
    assert choice.reason and choice.rule
    assert choice.from_disk <= (choice.rung == "restart")
    if choice.rung == "retry":
        assert not situation.lost and situation.donors
    if choice.rung in ("replace", "respawn", "migrate"):
        assert situation.donors and not set(situation.lost) & set(situation.unreplicated)
    if choice.rung == "rollback":
        assert situation.in_memory
    if "request" not in choice.rule:
        assert choice.rung in {rule.rung for rule in mine.rules(choice.rule.split(", ")[1])}


@given(_policies, _situations())
def test_any_policy_ends_a_failure_that_comes_again_and_again(
    mine: RecoveryPolicy, situation: Situation
) -> None:
    """Each generation ends in the same failure: the rungs that start nothing anew run out by the
    attempts, those that do by restarts in a row."""
    attempts, restarts, taken = 0, situation.restarts, []
    while (choice := choose(situation, mine)).rung != "stop":
        taken.append((choice.rung, choice.failure, 0))
        assert len(taken) < 10, taken
        attempts, restarts = attempts + 1, restarts + (choice.rung in FROM_A_COPY)
        means = replace(situation.means, rungs=tuple(taken))
        situation = replace(situation, attempts=attempts, restarts=restarts, means=means)


@given(_situations())
def test_a_policy_with_other_classes_does_not_change_this_one(situation: Situation) -> None:
    other = replace(DEFAULT, classes={"storage": plain_rules("stop")})
    if situation.cause is not None and situation.cause.kind != "storage":
        assert choose(situation, other) == choose(situation)


# --- in the controller -----------------------------------------------------------------------

FROM_DISK = policy("restart", "stop")


def running(recovery: RecoveryPolicy, **fields: Any) -> ControllerDriver:
    desk = ControllerDriver(world=2, spares=1, **fields)
    desk.state = replace_recovery(desk, recovery)
    return desk.begin().open()


def replace_recovery(desk: ControllerDriver, recovery: RecoveryPolicy) -> Any:
    state = desk.state.copy()
    state.recovery = recovery
    return state


def lose(desk: ControllerDriver, n: int) -> None:
    first, second = desk.seats()
    desk.lose(first, n, slots={f"before:{n}": b"b"})
    desk.status(second, n, "idle")


def test_a_restart_from_disk_leaves_out_newer_copies_in_memory() -> None:
    desk = running(FROM_DISK)
    seat_0 = desk.seats()[0]
    desk.say(seat_0, messages.Checkpointed(n=3, step=3, path="disk/3", tier="disk"))
    desk.say(seat_0, messages.Checkpointed(n=5, step=5, path="5", tier="memory"))
    desk.verifies = False
    lose(desk, 6)
    decided = next(a.event for a in reversed(desk.history)
                   if isinstance(a, Emit) and isinstance(a.event, events.Decided))  # fmt: skip
    assert (decided.rung, decided.n, decided.rule) == (
        "restart", 3, "policy mine, killed, rung 1 of 2",
    )  # fmt: skip
    desk.say(desk.seats()[1], messages.Checkpointed(n=6, step=6, path="6", tier="memory"))
    desk.lose(desk.seats()[1], 6)
    (verify,) = [action for action in desk.history if isinstance(action, Verify)]
    assert verify.from_disk
    assert desk.state.saves.checkpoint is not None and desk.state.saves.checkpoint.n == 3


def test_a_spent_budget_of_a_class_stops_the_run() -> None:
    mine = policy("replace", "stop", failures_max={"default": 1})
    desk = running(mine)
    desk.state.budgets.take_rung("replace", "killed", desk.now_ns, None)
    lose(desk, 4)
    end = desk.state.ending.result
    assert end is not None and end.outcome == "gave_up"
    assert end.cause is not None and end.cause.kind == "killed"


def test_a_later_term_counts_the_rungs_of_the_hour() -> None:
    mine = policy("replace", "stop", budgets={"replace": 1})
    desk = running(mine)
    lose(desk, 4)
    taken = [entry for entry in desk.journal() if isinstance(entry, RungTaken)]
    assert [(one.rung, one.incident) for one in taken] == [("replace", 1)]
    later = ControllerDriver(world=2, spares=1, term=2)
    later.state = replace_recovery(later, mine)
    later.now_ns = desk.now_ns + S
    later.begin(journal=tuple(desk.journal()))
    assert later.state.budgets.rungs == ((taken[0].rung, taken[0].failure, taken[0].t_ns),)
