"""Audit protocol of the controller: replacement, rollback, and the end of the run."""

from __future__ import annotations

from typing import Any

from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.audit.audit_records import Agreement, AuditState
from outlast.controller.inputs import (
    AuditAgreedEntry,
    CheckpointFound,
    CopiesBarred,
    DecisionMade,
    Verify,
)
from outlast.transport import messages

RIGHT, WRONG = b"right", b"wrong"


def report(desk: ControllerDriver, n: int, *wrong: int, parts: int = 1, part: int = 0) -> None:
    """All ranks complete phase n and report; the named ones hold something else."""
    for seat, worker in enumerate(desk.seats()):
        value = WRONG if seat in wrong else RIGHT
        desk.say(
            worker,
            messages.Audited(
                generation=desk.state.generation, n=n, step=n, replica_set=b"",
                kinds={"parameters": value}, part=part, parts=parts,
            ),
        )  # fmt: skip


def answer(desk: ControllerDriver, n: int, *wrong: int) -> None:
    """Whoever was asked names what it holds."""
    asked = desk.sent(messages.AuditRequest, history=True)
    seats = {name: seat for seat, name in enumerate(desk.seats())}
    for worker, body in asked:
        if body.n == n and worker in seats:
            value = WRONG if seats[worker] in wrong else RIGHT
            names = {"parameters": {"model.0.weight": value, "model.0.bias": RIGHT}}
            desk.say(
                worker,
                messages.AuditNamed(generation=desk.state.generation, n=n, names=names),
            )


def compared(desk: ControllerDriver) -> list[events.ReplicasCompared]:
    return desk.emitted(events.ReplicasCompared, history=True)


def noticed(desk: ControllerDriver) -> list[events.Fault]:
    return [event.fault for event in desk.emitted(events.Noticed, history=True)]


def saved(desk: ControllerDriver, n: int, generation: int) -> None:
    path = f"/c/step-{n:09d}-n{n}-t1g{generation}"
    desk.say(desk.seats()[0], messages.Checkpointed(n=n, step=n, path=path))


def test_ranks_that_agree_are_told_once_all_have_reported() -> None:
    desk = ControllerDriver(world=3, spares=0).begin().open()
    seats = desk.seats()
    report(desk, 1)
    assert {worker for worker, _ in desk.sent(messages.AuditAgreed, history=True)} == set(seats)
    (event,) = compared(desk)
    assert (event.step, event.ranks, event.minority) == (1, 3, ())
    assert desk.state.audit.whole is not None and desk.state.audit.whole.n == 1


def test_a_report_that_comes_again_is_answered_again() -> None:
    desk = ControllerDriver(world=2).begin().open()
    report(desk, 1)
    before = len(desk.sent(messages.AuditAgreed, history=True))
    again = messages.Audited(
        generation=1, n=1, step=1, replica_set=b"", kinds={"parameters": RIGHT}
    )
    desk.say(desk.seats()[1], again)
    assert len(desk.sent(messages.AuditAgreed, history=True)) == before + 1
    assert len(compared(desk)) == 1


def test_a_minority_is_named_and_replaced_from_the_majority() -> None:
    desk = ControllerDriver(world=3, spares=1).begin().open()
    report(desk, 1)
    report(desk, 2, 1)
    old = desk.seats()[1]
    assert desk.state.mode == "open", "names come first"
    answer(desk, 2, 1)
    (fault,) = noticed(desk)
    assert (fault.kind, fault.seat, fault.worker) == ("diverged", 1, old)
    assert "model.0.weight" in fault.detail and "bias" not in fault.detail
    assert desk.killed() == {old}
    desk.lose(old, n=2, slots={"before:2": b"s"})
    for seat in (0, 2):
        desk.status(desk.seats()[seat], 2, "idle")
    (decided,) = desk.emitted(events.Decided, history=True)
    assert (decided.rung, decided.n) == ("replace", 2)
    assert all(donor != 1 for donor, _ in desk.state.progress.transfers)


def test_names_that_do_not_come_are_not_waited_for() -> None:
    desk = ControllerDriver(world=3, spares=1, status_s=5).begin().open()
    report(desk, 1)
    report(desk, 2, 0)
    desk.tick(6)
    (fault,) = noticed(desk)
    assert (fault.kind, fault.seat) == ("diverged", 0)
    assert "parameters" in fault.detail


def test_another_failure_does_not_make_a_known_difference_forgotten() -> None:
    desk = ControllerDriver(world=4, spares=2).begin().open()
    report(desk, 1)
    report(desk, 2, 3)
    seats = desk.seats()
    desk.lose(seats[0], n=2, slots={"before:2": b"s"})
    assert seats[3] in desk.killed(), "it must not be a donor"


def undecided(desk: ControllerDriver) -> None:
    """Two ranks of two hold different bytes after phase 6."""
    report(desk, 6, 1)
    answer(desk, 6, 1)
    (fault,) = noticed(desk)
    assert (fault.kind, fault.seat) == ("diverged", -1)
    assert "no majority" in fault.detail and "model.0.weight" in fault.detail
    for worker in desk.seats():
        desk.status(worker, 6, "idle")


def test_two_ranks_go_back_to_a_copy_from_before_the_last_agreement() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    saved(desk, 2, 1)
    report(desk, 3)
    saved(desk, 5, 1)
    desk.verifies = False
    undecided(desk)
    (decided,) = desk.emitted(events.Decided, history=True)
    assert (decided.rung, decided.n) == ("restart", 2)
    assert [entry for entry in desk.journal() if isinstance(entry, CopiesBarred)] == [
        CopiesBarred(after_n=3, generation=1)
    ]
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, n=6)
    (verify,) = [action for action in desk.history if isinstance(action, Verify)]
    assert [(bar.after_n, bar.generation) for bar in verify.bars] == [(3, 1)]


def test_a_save_that_ends_late_is_not_the_newest_either() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    saved(desk, 2, 1)
    report(desk, 3)
    undecided(desk)
    saved(desk, 5, 1)
    assert desk.state.saves.checkpoint is not None and desk.state.saves.checkpoint.n == 2


def test_without_such_a_copy_the_run_stops_with_the_cause() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    report(desk, 3)
    saved(desk, 5, 1)
    undecided(desk)
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, n=6)
    end = desk.end()
    assert end is not None and end.exit_code == 3 and end.cause is not None
    assert end.cause.kind == "diverged" and "model.0.weight" in end.cause.detail


def test_where_that_copy_is_gone_the_run_stops_as_well() -> None:
    desk = ControllerDriver(world=2, spares=0).begin().open()
    saved(desk, 2, 1)
    report(desk, 3)
    desk.verifies = False
    undecided(desk)
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, n=6)
    desk.feed(CheckpointFound(t_ns=desk.now_ns, generation=desk.state.generation, checkpoint=None))
    end = desk.end()
    assert end is not None and end.outcome == "gave_up" and end.cause is not None
    assert end.cause.kind == "diverged"


def test_ranks_that_never_were_equal_stop_the_run() -> None:
    desk = ControllerDriver(world=4, spares=1).begin().open()
    report(desk, 1, 2)
    answer(desk, 1, 2)
    for worker in desk.seats():
        desk.status(worker, 1, "idle")
    for worker in tuple(desk.state.members.workers):
        desk.lose(worker, n=1)
    end = desk.end()
    assert end is not None and end.outcome == "user_error" and end.cause is not None
    assert "never been found equal" in end.cause.detail
    assert "ranks 0, 1, 2, 3 hold different bytes of model.0.weight" in end.cause.detail


def test_without_an_agreement_all_copies_since_the_start_are_barred() -> None:
    """A later term, which knows the journal alone, must not start from one."""
    desk = ControllerDriver(world=4, spares=1).begin().open()
    saved(desk, 1, 1)
    report(desk, 2, 2)
    answer(desk, 2, 2)
    journal = desk.journal()
    assert CopiesBarred(after_n=0, generation=1) in journal
    later = ControllerDriver(world=4, term=2).begin(journal=tuple(journal))
    assert later.state.audit.bars[0].covers(1, "/c/step-000000001-n1-t1g1")
    assert desk.state.saves.checkpoint is None


def test_copies_up_to_the_first_start_are_trusted_without_an_agreement() -> None:
    state = AuditState().begun_again(4, 4)
    assert state.trusted_n == 4
    assert state.begun_again(6, 6).trusted_n == 4
    assert state.agreed(Agreement(7, 7)).trusted_n == 7


def test_a_rank_that_differs_again_and_again_is_not_replaced_for_ever() -> None:
    desk = ControllerDriver(world=3, spares=9, respawns_max=99).begin().open()
    report(desk, 1)
    for round_ in range(3):
        n = 2 + round_
        old = desk.seats()[1]
        report(desk, n, 1)
        answer(desk, n, 1)
        assert old in desk.killed()
        desk.lose(old, n=n, slots={f"before:{n}": b"s"})
        for seat in (0, 2):
            desk.status(desk.seats()[seat], n, "idle")
        desk.heal(n)
        assert desk.state.mode == "open"
    report(desk, 9, 1)
    answer(desk, 9, 1)
    assert noticed(desk)[-1].seat == -1
    assert "replaced for this 3 times" in noticed(desk)[-1].detail


def test_the_end_waits_for_names() -> None:
    desk = ControllerDriver(world=3, spares=1).begin().open()
    report(desk, 1)
    report(desk, 2, 1)
    for worker in desk.seats():
        desk.say(worker, messages.Finished(n=2, step=2))
    assert desk.end() is None and desk.state.mode == "open"
    answer(desk, 2, 1)
    assert noticed(desk)[-1].seat == 1


def rest(desk: ControllerDriver, n: int, *since: int) -> None:
    """All ranks report what votes do not compare, which they have compared since these phases."""
    for worker, since_n in zip(desk.seats(), since, strict=True):
        body = messages.Audited(
            generation=1, n=n, step=n, replica_set=b"", kinds={"objects": RIGHT}, part=1, parts=2,
            since_n=since_n, since_step=since_n,
        )  # fmt: skip
        desk.say(worker, body)


def test_what_votes_have_compared_and_the_rest_are_all_of_the_state() -> None:
    desk = ControllerDriver(world=2).begin().open()
    report(desk, 1)
    rest(desk, 10, -1, -1)
    assert desk.state.audit.whole == Agreement(1, 1)
    rest(desk, 20, 12, 11)
    assert desk.state.audit.whole == Agreement(11, 11)
    assert [event.since_step for event in compared(desk)] == [-1, -1, 11]
    rest(desk, 30, 12, -1)
    assert desk.state.audit.whole == Agreement(11, 11)


def test_all_of_the_state_is_compared_after_a_phase_of_which_a_part_was() -> None:
    """The loop ends where a part was due."""
    desk = ControllerDriver(world=3, spares=1).begin().open()
    report(desk, 1)
    report(desk, 8, parts=2, part=1)
    report(desk, 8, 1)
    answer(desk, 8, 1)
    assert noticed(desk)[-1].seat == 1


def test_a_part_that_comes_after_the_whole_changes_nothing() -> None:
    desk = ControllerDriver(world=2).begin().open()
    first, second = desk.seats()
    for worker, parts in ((first, 2), (first, 1), (second, 2), (second, 1)):
        body = messages.Audited(
            generation=1, n=8, step=8, replica_set=b"", kinds={"parameters": RIGHT}, parts=parts
        )
        desk.say(worker, body)
    (event,) = compared(desk)
    assert event.parts == 1 and desk.state.audit.whole is not None


def test_a_donor_and_its_copies_are_one_vote() -> None:
    """Rank 0 is wrong, and rank 2 has its copy: nothing says that rank 1 is not right."""
    desk = ControllerDriver(world=3, spares=1).begin().open()
    report(desk, 1)
    saved(desk, 1, 1)
    desk.state.audit = desk.state.audit.copied([(0, 2)])
    report(desk, 2, 0, 2)
    answer(desk, 2, 0, 2)
    assert noticed(desk)[-1].seat == -1 and "no majority" in noticed(desk)[-1].detail


def test_who_differs_from_most_copies_of_one_donor_has_changed_since() -> None:
    """All three began as the donor's: the copying explains no difference between them."""
    desk = ControllerDriver(world=3, spares=1).begin().open()
    report(desk, 1)
    desk.state.audit = desk.state.audit.copied([(0, 1), (0, 2)])
    report(desk, 2, 2)
    answer(desk, 2, 2)
    assert noticed(desk)[-1].seat == 2


def test_the_copies_of_an_agreed_state_are_votes_of_their_own() -> None:
    desk = ControllerDriver(world=3, spares=1).begin().open()
    desk.state.audit = desk.state.audit.copied([(0, 2)])
    report(desk, 1)
    assert desk.state.audit.origins == {}
    report(desk, 2, 1)
    answer(desk, 2, 1)
    assert noticed(desk)[-1].seat == 1


def test_a_later_term_knows_what_is_out_of_use() -> None:
    entries = (AuditAgreedEntry(n=3, step=3), CopiesBarred(after_n=3, generation=1))
    origin = messages.Checkpointed(n=4, step=4, path="/c/step-000000004-n4-t2g2")
    desk = ControllerDriver(world=2, term=2).begin(journal=entries, checkpoint=origin)
    assert desk.state.audit.whole is not None and desk.state.audit.whole.n == 3
    assert desk.state.audit.bars[0].covers(4, "/c/step-000000004-n4-t1g1")
    assert not desk.state.audit.bars[0].covers(3, "/c/step-000000003-n3-t1g1")
    assert not desk.state.audit.bars[0].covers(4, "/c/step-000000004-n4-t1g2")


def test_a_later_term_knows_whose_copies_ranks_have() -> None:
    """Rank 1 was replaced from rank 0, and the launcher died before the audit of that recovery."""
    desk = ControllerDriver(world=2, spares=1).begin().open()
    slots = {"before:5": b"b5", "after:5": b"a5", "result:5": b"r5"}
    desk.lose(desk.seats()[1], 5, slots=slots)
    desk.status(desk.seats()[0], 5, "running")
    desk.heal(5)
    assert desk.state.audit.origins == {1: 0}
    assert later_audit(desk).origins == {1: 0}


def test_a_later_term_knows_which_agreements_a_rollback_made_void() -> None:
    decided = DecisionMade(generation=2, n=3, step=3, verdict="start", seats=("a", "b"))
    desk = ControllerDriver(world=2, term=2).begin(journal=(AuditAgreedEntry(n=9, step=9), decided))
    assert desk.state.audit.whole is not None and desk.state.audit.whole.n == 3


def later_audit(desk: ControllerDriver) -> AuditState:
    later = ControllerDriver(world=desk.world, term=2).begin(journal=desk.journal())
    return later.state.audit


def test_a_round_of_a_closed_generation_is_dropped() -> None:
    desk = ControllerDriver(world=2, spares=1).begin().open()
    body: Any = messages.Audited(generation=1, n=1, step=1, replica_set=b"", kinds={"x": RIGHT})
    desk.say(desk.seats()[0], body)
    desk.lose(desk.seats()[1], n=1, slots={"before:1": b"s"})
    assert desk.state.audit.rounds == {}
