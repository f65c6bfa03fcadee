"""Findings of node checks, and migration of a rank before its worker fails."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.controller.controller_driver import ControllerDriver, S

from outlast import events
from outlast.controller import planned_migration
from outlast.controller.inputs import AnyEntry, AppendJournal, Emit, RankMigrated, Send
from outlast.controller.recovery.recovery_policy import DEFAULT
from outlast.transport import messages

GPU1: dict[str, Any] = {"device": "GPU 1", "code": "XID 79"}


def found(severity: str = "now", worker: str = "", **what: Any) -> events.Warned:
    said = {"check": "gpu", "symptom": "gpu-driver", "code": "", "device": "", "detail": "it said"}
    return events.Warned(t_ns=1, host="?", severity=severity, worker=worker, **{**said, **what})


def check(
    desk: ControllerDriver, *findings: events.Warned, told: tuple[str, ...] = ("gpu",)
) -> list[str]:
    """What one check of the agent's makes: severities that were said."""
    actions = desk.say("", messages.NodeChecked(found=findings, completed=told))
    emitted = [each.event for each in actions if isinstance(each, Emit)]
    return [one.severity for one in emitted if isinstance(one, events.Warned)]


def desk(
    migrate_on: Any = "now", world: int = 3, spares: int = 1, **limits: Any
) -> ControllerDriver:
    """A run in its second phase; its agent has found something that is not worth a move."""
    made = ControllerDriver(world=world, spares=spares, migrate_on=migrate_on, **limits)
    made.begin().open()
    check(made, found("warn", check="fans"))
    made.history.clear()
    step(made)
    return made


def step(one: ControllerDriver, state: str = "running", n: int = 1) -> None:
    """The agent's pages show every rank behind the generation's first phase."""
    beats = dict.fromkeys(
        one.seats(), (one.state.progress.n + n, one.state.progress.n + n, state, 0.0)
    )
    one.say("", messages.Renew(beats=beats))


def given_up(one: ControllerDriver) -> set[str]:
    """Whom the agent was told to kill, and has not yet."""
    return one.killed() & set(one.state.members.workers)


def moved(one: ControllerDriver) -> events.Decided:
    """The agent has killed whom it was told to, and the others have answered."""
    generation, n = one.state.generation, one.state.progress.n + 1
    for worker in sorted(given_up(one)):
        one.lose(worker, n, slots={f"before:{n}": b"own"}, kind="requested", detail="killed")
    for worker in tuple(one.seats()):
        if one.state.generation == generation and worker:
            one.status(worker, n, "running")
    (decided,) = one.emitted(events.Decided, history=True)[-1:]
    one.heal(n)
    step(one)
    return decided


def notes(one: ControllerDriver) -> list[str]:
    return [
        note.text for note in one.emitted(events.Note, history=True) if "not moved yet" in note.text
    ]


def test_a_finding_is_said_once_until_it_changes_or_is_over() -> None:
    one = desk("")
    warn = found("warn", **GPU1)
    assert check(one, warn) == ["warn"]
    assert check(one, found("warn", **{**GPU1, "detail": "302 s ago"})) == []
    assert check(one, found("drain", **GPU1)) == ["drain"]
    assert check(one, found("drain", **GPU1), found("warn", device="GPU 2")) == ["warn"]
    assert check(one, told=("link",)) == [], "its check could not tell"
    assert check(one) == ["healthy", "healthy"]
    assert check(one) == []
    assert check(one, warn) == ["warn"]
    said = one.emitted(events.Warned, history=True)
    assert {event.host for event in said} == {"h"} and said[0].t_ns > 1


def test_of_one_finding_the_worst_word_counts() -> None:
    one = desk("")
    assert check(one, found("warn"), found("now"), found("unknown")) == ["now"]


def test_a_check_that_finds_without_end_is_bounded() -> None:
    one = desk("")
    many = [found("warn", device=str(number)) for number in range(planned_migration.WARNED_MAX + 5)]
    assert len(check(one, *many)) == planned_migration.WARNED_MAX - 1, "the fans are known"


def test_a_rank_is_moved_to_the_spare_and_the_reason_names_the_finding() -> None:
    one = desk("now")
    old = one.seats()[1]
    check(one, found(worker=old, **GPU1, detail="fell off"))
    assert given_up(one) == {old} and one.state.mode == "closing"
    (noticed,) = one.emitted(events.Noticed, history=True)
    assert (noticed.how, noticed.fault.kind, noticed.fault.seat) == ("check", "requested", 1)
    assert noticed.fault.detail == "gpu: XID 79 on GPU 1: fell off"
    decided = moved(one)
    assert (decided.rung, decided.n) == ("migrate", 1)
    assert "rank 1 moved to a warm spare" in decided.reason
    assert "gpu: XID 79 on GPU 1: fell off" in decided.reason
    assert decided.replaced == ((1, old, "w1-3"),) and one.state.mode == "open"
    assert one.state.budgets.restarts == 0


def test_peers_that_lose_their_connection_to_it_are_no_cause() -> None:
    one = desk("now")
    check(one, found(worker=one.seats()[1], **GPU1))
    broken = events.Fault(kind="transport", detail="reset by peer")
    one.status(one.seats()[0], 1, "running", fault=broken)
    decided = moved(one)
    assert decided.rung == "migrate" and "XID 79" in decided.reason


def test_one_that_fails_besides_is_a_failure() -> None:
    one = desk("now", spares=2)
    first, second = one.seats()[1:]
    check(one, found(worker=first, **GPU1))
    one.lose(second, slots={"before:1": b"own"}, signal=9)
    decided = moved(one)
    assert decided.rung == "replace" and "killed" in decided.reason


@pytest.mark.parametrize(
    ("migrate_on", "severity", "moves"),
    [
        *(("", "now", 0), ("now", "drain", 0), ("drain", "drain", 1), ("drain", "now", 1)),
        *(("drain", "unknown", 0), ("drain", "warn", 0)),
    ],
)
def test_only_what_was_asked_for_moves_anybody(migrate_on: str, severity: str, moves: int) -> None:
    one = desk(migrate_on)
    check(one, found(severity, worker=one.seats()[1], **GPU1))
    one.come_to_boundary()
    assert len(given_up(one)) == moves
    check(one, found("now", worker="", device="mlx5_0/1"), found("now", worker="w9-9"))
    assert len(given_up(one)) == moves


def test_without_a_warm_spare_nobody_moves_until_there_is_one() -> None:
    one = ControllerDriver(world=2, spares=1, migrate_on="now").begin()
    one.agent()
    for worker in ("w1-0", "w1-1"):
        one.hello(worker)
    one.heal(0)
    for _ in range(3):
        step(one)
        check(one, found(worker="w1-1", **GPU1))
    assert not given_up(one) and len(notes(one)) == 1
    assert "no warm spare is on a healthy device" in notes(one)[0]
    step(one)
    one.hello("w1-2")
    assert given_up(one) == {"w1-1"}


def test_a_spare_that_is_not_well_itself_is_no_refuge() -> None:
    one = desk("now")
    sick = found("drain", worker="w1-3", device="GPU 3")
    check(one, found(worker=one.seats()[1], **GPU1), sick)
    assert not given_up(one) and len(notes(one)) == 1
    one.lose(one.seats()[0], slots={"before:1": b"own"})  # in need it is better than none
    assert moved(one).replaced[0][2] == "w1-3"


def test_of_two_spares_the_one_that_is_well_takes_over() -> None:
    one = desk("now", spares=2)
    check(one, found(worker=one.seats()[1], **GPU1), found("drain", worker="w1-3", device="3"))
    assert moved(one).replaced[0][2] == "w1-4"


def test_one_move_for_a_finding_on_a_device() -> None:
    one = desk("now")
    check(one, found(worker=one.seats()[1], **GPU1))
    moved(one)
    one.hello("w1-4")
    check(one)
    for _ in range(3):
        check(one, found(worker=one.seats()[1], **GPU1))
        check(one)
    assert one.state.mode == "open" and one.state.generation == 2


def test_a_check_that_always_fires_does_not_use_up_every_spare() -> None:
    one = desk("now", spares=3, lease_s=1e6, hello_s=1e6)
    for number in range(6):
        for worker in [name for name, w in one.state.members.workers.items() if w.hello is None]:
            one.hello(worker)
        check(one, found(worker=one.seats()[1], device=f"GPU {number}"))
        if given_up(one):
            moved(one)
    assert one.state.generation == 1 + DEFAULT.moves_max
    assert any("3 moves were made within the last hour" in note for note in notes(one))
    one.tick(planned_migration.WINDOW_S + 1)
    assert given_up(one), "it is still found, and there is room for another move"


def test_two_at_once_are_one_interruption() -> None:
    one = desk("now", world=4, spares=2)
    first, second = one.seats()[1:3]
    check(one, found(worker=first, **GPU1), found(worker=second, device="GPU 2"))
    assert given_up(one) == {first, second}
    decided = moved(one)
    assert decided.rung == "migrate" and "ranks 1, 2 moved to warm spares" in decided.reason


def test_the_last_one_that_holds_the_state_stays() -> None:
    alone = desk("now", world=1)
    check(alone, found(worker=alone.seats()[0], **GPU1))
    assert not given_up(alone) and "no other rank holds the state" in notes(alone)[0]


@pytest.mark.parametrize(("state", "n"), [("dry", 1), ("setup", 0), ("running", 0)])
def test_set_up_and_rehearsals_are_not_cut(state: str, n: int) -> None:
    one = desk("now")
    step(one, state, n)
    check(one, found(worker=one.seats()[1], **GPU1))
    assert not given_up(one) and not notes(one)
    step(one)
    assert given_up(one)


def test_nobody_moves_while_the_run_ends() -> None:
    one = desk("now")
    one.say(one.seats()[0], messages.Finished(n=0))
    check(one, found(worker=one.seats()[1], **GPU1))
    assert not given_up(one)
    other = desk("now")
    other.stop()
    check(other, found(worker=other.seats()[1], **GPU1))
    assert not given_up(other)


def test_during_a_recovery_it_waits_for_the_next_generation() -> None:
    one = desk("now", spares=2)
    one.lose(one.seats()[0], slots={"before:1": b"own"})
    check(one, found(worker=one.seats()[1], **GPU1))
    assert not given_up(one)
    for worker in one.seats()[1:]:
        one.status(worker, 1, "running")
    one.heal(1)
    assert not given_up(one), "its ranks do not step yet"
    step(one)
    assert given_up(one) == {one.seats()[1]} and one.state.generation == 2


# --- a later term ---------------------------------------------------------------------------


def later_term(earlier: ControllerDriver, *alive: str, ahead_s: float = 0.0) -> ControllerDriver:
    """Its launcher was killed; the agent and these workers live on, and a spare is started."""
    later = ControllerDriver(
        world=earlier.world, spares=1, term=2, migrate_on="now", lease_s=1e6, hello_s=1e6
    )
    later.now_ns = earlier.now_ns - int(ahead_s * S)
    kept = msgspec.msgpack.encode(earlier.journal())
    later.begin(journal=msgspec.msgpack.decode(kept, type=tuple[AnyEntry, ...]))
    n = earlier.state.progress.n
    later.agent(*alive)
    for worker in alive:
        later.hello(worker)
    for worker in alive:
        later.status(worker, n, "idle")
    later.heal(n)
    step(later)  # the spares are made up behind a phase
    for worker in [
        name for name, known in later.state.members.workers.items() if known.hello is None
    ]:
        later.hello(worker)
    check(later, found("warn", check="fans"))
    step(later)
    assert later.state.mode == "open" and later.seats() == alive
    return later


def move_three(one: ControllerDriver) -> None:
    for number in range(DEFAULT.moves_max):
        check(one, found(worker=one.seats()[1], device=f"GPU {number}"))
        moved(one)


def test_a_move_is_in_the_journal_before_anybody_is_given_up() -> None:
    one = desk("now")
    old = one.seats()[1]
    check(one, found(worker=old, **GPU1))
    acts = [each for each in one.actions if isinstance(each, AppendJournal | Send)]
    (at,) = [at for at, each in enumerate(acts) if isinstance(each, AppendJournal)]
    (kill,) = [
        at for at, e in enumerate(acts) if isinstance(e, Send) and type(e.body) is messages.Kill
    ]
    (entry,) = one.journal()
    assert at < kill and isinstance(entry, RankMigrated)
    assert (entry.worker, entry.finding) == (old, ("h", "gpu", "gpu-driver", "XID 79", "GPU 1"))


def test_a_later_term_knows_how_many_moves_were_made() -> None:
    one = desk("now", spares=3)
    begun = one.now_ns
    move_three(one)
    later = later_term(one, *one.seats())
    check(later, found(worker=later.seats()[1], device="GPU 7"))
    assert not given_up(later) and "3 moves were made within the last hour" in notes(later)[0]
    later.tick(planned_migration.WINDOW_S - (later.now_ns - begun) / S + 1)
    assert given_up(later) == {later.seats()[1]}, "the hour is counted from the moves on"


def test_a_later_term_does_not_move_for_the_same_finding_again() -> None:
    one = desk("now")
    check(one, found(worker=one.seats()[1], **GPU1))
    moved(one)
    later = later_term(one, *one.seats())
    check(later, found(worker=later.seats()[1], **GPU1))
    assert not given_up(later)
    check(later, found(worker=later.seats()[1], **{**GPU1, "device": "GPU 2"}))
    assert given_up(later) == {later.seats()[1]}


def test_what_was_to_be_moved_and_still_lives_is_moved_and_counted_once() -> None:
    """The launcher was killed between the journal and the signal."""
    one = desk("now", spares=3)
    for number in range(DEFAULT.moves_max - 1):
        check(one, found(worker=one.seats()[1], device=f"GPU {number}"))
        moved(one)
    seats = one.seats()
    check(one, found(worker=seats[1], device="GPU 7"))
    assert given_up(one) == {seats[1]}
    later = later_term(one, *seats)
    check(later, found(worker=seats[0], device="GPU 7"))
    assert not given_up(later), "it is another's finding"
    check(later, found(worker=seats[1], device="GPU 7"))
    assert given_up(later) == {seats[1]} and len(later.state.findings.moves) == DEFAULT.moves_max


def test_a_clock_that_was_ahead_takes_no_longer_than_the_hour() -> None:
    one = desk("now", spares=3, lease_s=1e6, hello_s=1e6)
    one.tick(9 * planned_migration.WINDOW_S)
    step(one)
    move_three(one)
    later = later_term(one, *one.seats(), ahead_s=9 * planned_migration.WINDOW_S)
    check(later, found(worker=later.seats()[1], device="GPU 7"))
    assert not given_up(later)
    later.tick(planned_migration.WINDOW_S + 1)
    assert given_up(later)
