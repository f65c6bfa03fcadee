"""Differences that votes have shown: redone or replaced, transient or lasting."""

from __future__ import annotations

from msgspec.structs import replace
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import CopiesBarred, CorruptionFound
from outlast.transport import messages

RIGHT, WRONG = b"right", b"wrong"
GRADIENTS = {"gradients": "model.0.weight.grad"}
CONTRIBUTIONS = {"contributions": "model.0.weight.grad"}
STATE = {"optimizers": "optimizer.state.model.0.weight.exp_avg"}


def dispute(
    desk: ControllerDriver,
    n: int,
    *wrong: int,
    kinds: dict[str, str],
    again: int = 1,
    since_n: int = -1,
    equal: bool = True,
    repeats: bool = False,
) -> None:
    """All ranks report a window after a vote with unequal shares, and name it if asked."""
    generation = desk.state.generation
    values = {seat: WRONG if seat in wrong else RIGHT for seat in range(desk.world)}
    for seat, worker in enumerate(desk.seats()):
        body = messages.Audited(
            generation=generation, n=n, step=n, replica_set=b"", part=0, parts=2, again=again,
            kinds=dict.fromkeys(kinds, values[seat]), since_n=since_n, since_step=since_n,
            has_equal_gradients=equal, repeats=repeats,
        )  # fmt: skip
        desk.say(worker, body)
    for seat, worker in enumerate(desk.seats()):
        names = {kind: {name: values[seat]} for kind, name in kinds.items()}
        desk.say(worker, messages.AuditNamed(generation=generation, n=n, names=names))


def agree(desk: ControllerDriver, n: int) -> None:
    """All ranks report equal state after the first step of a generation."""
    generation = desk.state.generation
    for worker in desk.seats():
        body = messages.Audited(
            generation=generation, n=n, step=n, replica_set=b"", kinds={"parameters": RIGHT}
        )
        desk.say(worker, body)


def begun(world: int = 3, spares: int = 3) -> ControllerDriver:
    desk = ControllerDriver(world=world, spares=spares, respawns_max=99).begin().open()
    agree(desk, 1)
    return desk


def findings(desk: ControllerDriver) -> list[events.Warned]:
    return desk.emitted(events.Warned, history=True)


def answers(desk: ControllerDriver, again: int) -> list[messages.AuditAgreed]:
    sent = desk.sent(messages.AuditAgreed, history=True)
    return [body for _, body in sent if body.again == again]


def replaced(desk: ControllerDriver, n: int, rank: int) -> None:
    """The rank's worker is killed, and another one takes its place."""
    (old,) = desk.killed() & {desk.seats()[rank]}
    desk.lose(old, n=n, slots={f"before:{n}": b"s"})
    for seat, worker in enumerate(desk.seats()):
        if seat != rank:
            desk.status(worker, n, "running")
    desk.heal(n)
    assert desk.state.mode == "open"
    agree(desk, n + 1)


def test_a_gradient_that_differs_once_is_redone_in_place() -> None:
    desk = begun()
    dispute(desk, 6, 1, kinds=GRADIENTS)
    (found,) = findings(desk)
    assert (found.check, found.code, found.severity) == ("corruption", "transient", "warn")
    assert found.device == "rank 1" and found.worker == desk.seats()[1] and found.host
    assert "model.0.weight.grad" in found.detail and "step 7" in found.detail
    assert len(answers(desk, 1)) == 3 and desk.state.mode == "open" and not desk.killed()
    assert not [entry for entry in desk.journal() if isinstance(entry, CopiesBarred)]


def test_a_gradient_that_differs_in_the_redo_is_a_lasting_fault() -> None:
    desk = begun()
    dispute(desk, 6, 1, kinds=GRADIENTS)
    dispute(desk, 6, 1, kinds=GRADIENTS, again=2)
    assert [found.code for found in findings(desk)] == ["transient", "lasting"]
    assert findings(desk)[1].severity == "drain"
    assert desk.killed() == {desk.seats()[1]}
    assert not [entry for entry in desk.journal() if isinstance(entry, CopiesBarred)]
    replaced(desk, 6, 1)


def test_an_answer_that_was_lost_is_sent_again() -> None:
    desk = begun()
    dispute(desk, 6, 1, kinds=GRADIENTS)
    body = messages.Audited(
        generation=1, n=6, step=6, replica_set=b"", kinds={"gradients": RIGHT}, parts=2, again=1
    )
    desk.say(desk.seats()[2], body)
    assert len(answers(desk, 1)) == 4 and len(findings(desk)) == 1


def test_gradients_that_never_were_equal_differ_by_design() -> None:
    desk = begun(world=4)
    for again in (1, 2):
        dispute(desk, 6, 1, kinds=GRADIENTS, again=again, equal=False)
    assert all(body.without == ("gradients",) for body in answers(desk, 2))
    assert len(answers(desk, 2)) == 4 and not desk.killed() and findings(desk) == []
    (note,) = [
        event for event in desk.emitted(events.Note, history=True) if "by design" in event.text
    ]
    assert note.level == "info"


def test_two_ranks_redo_and_none_is_blamed() -> None:
    desk = begun(world=2)
    dispute(desk, 6, 1, kinds=GRADIENTS)
    assert findings(desk) == [] and len(answers(desk, 1)) == 2
    dispute(desk, 6, 1, kinds=GRADIENTS, again=2)
    (fault,) = [event.fault for event in desk.emitted(events.Noticed, history=True)]
    assert (fault.kind, fault.seat) == ("diverged", -1)


def test_wrong_state_is_replaced_and_bars_the_copies_since_it_was_equal() -> None:
    desk = begun()
    for n in (2, 4, 6):
        path = f"/c/step-{n:09d}-n{n}-t1g1"
        desk.say(desk.seats()[0], messages.Checkpointed(n=n, step=n, path=path))
    dispute(desk, 7, 2, kinds=STATE, since_n=5)
    (found,) = findings(desk)
    assert (found.code, found.device) == ("transient", "rank 2")
    assert "exp_avg" in found.detail and desk.killed() == {desk.seats()[2]}
    assert CopiesBarred(after_n=5, generation=1) in desk.journal()
    newest = desk.state.saves.checkpoint
    assert newest is not None and newest.n == 4
    replaced(desk, 7, 2)


def test_wrong_bits_on_the_same_device_again_are_lasting() -> None:
    desk = begun()
    dispute(desk, 7, 2, kinds=STATE)
    replaced(desk, 7, 2)
    dispute(desk, 9, 2, kinds=STATE)
    assert [found.code for found in findings(desk)] == ["transient", "lasting"]
    assert findings(desk)[1].severity == "drain"
    replaced(desk, 9, 2)


def test_another_rank_and_another_hour_are_transient() -> None:
    desk = begun()
    dispute(desk, 7, 2, kinds=STATE)
    replaced(desk, 7, 2)
    dispute(desk, 9, 1, kinds=GRADIENTS)
    desk.state.audit = replace(
        desk.state.audit,
        strikes=tuple(
            replace(one, t_ns=one.t_ns - 3600 * 10**9) for one in desk.state.audit.strikes
        ),
    )
    dispute(desk, 11, 1, kinds=GRADIENTS)
    assert [found.code for found in findings(desk)] == ["transient"] * 3


def test_a_later_term_knows_where_wrong_bits_were() -> None:
    desk = begun()
    dispute(desk, 6, 1, kinds=GRADIENTS)
    assert any(isinstance(entry, CorruptionFound) for entry in desk.journal())
    later = ControllerDriver(world=3, term=2).begin(journal=tuple(desk.journal()))
    (strike,) = later.state.audit.strikes
    assert (strike.rank, strike.n, strike.device) == (1, 6, "rank 1")


def test_a_difference_that_names_do_not_confirm_ends_in_a_narrower_comparison() -> None:
    """Kinds whose digests differ and whose names do not: a buffer of one rank alone."""
    desk = begun()
    for again in (1, 2, 3):
        for seat, worker in enumerate(desk.seats()):
            body = messages.Audited(
                generation=1, n=6, step=6, replica_set=b"", part=0, parts=2, again=again,
                kinds={"buffers": RIGHT if seat else WRONG},
            )  # fmt: skip
            desk.say(worker, body)
        for worker in desk.seats():
            names = {"buffers": {f"own of {worker}": RIGHT}}
            desk.say(worker, messages.AuditNamed(generation=1, n=6, names=names))
    assert len(answers(desk, 3)) == 3 and not desk.killed()


def test_a_contribution_that_differs_once_is_noted_alone() -> None:
    desk = begun()
    dispute(desk, 6, 1, kinds=CONTRIBUTIONS, since_n=4)
    (found,) = findings(desk)
    assert (found.code, found.severity, found.device) == ("transient", "warn", "rank 1")
    assert "another contribution than ranks 0, 2 from the same batch in step 7" in found.detail
    assert len(answers(desk, 1)) == 3 and desk.state.mode == "open" and not desk.killed()


def test_a_contribution_that_differs_again_bars_copies_since_its_last_equal_replay() -> None:
    """All replicas hold equal bytes meanwhile: that does not clear what is in all of them."""
    desk = begun()
    agree(desk, 5)
    dispute(desk, 6, 1, kinds=CONTRIBUTIONS, since_n=3, repeats=True)
    (found,) = findings(desk)
    assert (found.code, found.severity) == ("lasting", "drain")
    assert "last equal replay was before step 4" in found.detail
    assert desk.killed() == {desk.seats()[1]}
    (bar,) = [entry for entry in desk.journal() if isinstance(entry, CopiesBarred)]
    assert bar.after_n == 3
    replaced(desk, 6, 1)


def test_contributions_without_a_majority_end_nothing() -> None:
    desk = begun(world=2)
    dispute(desk, 6, 1, kinds=CONTRIBUTIONS, repeats=True)
    assert len(answers(desk, 1)) == 2 and desk.state.mode == "open"
    assert not findings(desk) and not desk.killed()
