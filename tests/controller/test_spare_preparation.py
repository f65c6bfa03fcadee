"""Hot spares: which spares are asked to prepare, and which are preferred."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver
from tests.controller.test_notices import give, notes, notice

from outlast import events
from outlast.transport import messages


def greet(desk: ControllerDriver, spare: str, *, hot: bool) -> None:
    desk.say(spare, messages.WorkerHello(pid=1, fingerprint={}, address="", hot=hot))


def running(*records: bytes, hot: tuple[str, ...] = ("w1-3",)) -> ControllerDriver:
    desk = ControllerDriver(world=2, spares=2, lease_s=1000).begin()
    desk.agent()
    for spare in ("w1-2", "w1-3"):
        greet(desk, spare, hot=spare in hot)
    desk.open()
    for seat, record in enumerate(records):
        body = messages.Recorded(seat=seat, record=record, calls=b"calls")
        desk.say(f"w1-{seat}", body)
    return desk


def renew(desk: ControllerDriver, n: int) -> None:
    desk.say("", messages.Renew(beats={"w1-0": (n, n, "running", 0.0)}))


def test_a_spare_that_may_be_hot_is_prepared_once_after_the_first_phase() -> None:
    desk = running(b"same", b"same")
    renew(desk, 0)
    assert not desk.sent(messages.Prepare)
    renew(desk, 1)
    assert [body.record for _, body in desk.sent(messages.Prepare)] == [b"same"]
    renew(desk, 2)
    assert not desk.sent(messages.Prepare)


def test_ranks_with_different_records_leave_spares_warm() -> None:
    desk = running(b"one", b"other")
    renew(desk, 1)
    assert not desk.sent(messages.Prepare)
    assert "set-up collectives" in " ".join(note.text for note in desk.emitted(events.Note))


@pytest.mark.parametrize("kind", ["exited", "killed", "hung"])
def test_a_spare_that_ends_while_it_is_prepared_is_the_last_one(kind: events.FaultKind) -> None:
    desk = running(b"same", b"same")
    renew(desk, 1)
    desk.lose("w1-3", state="waiting", kind=kind)
    assert desk.state.members.stays_warm


@pytest.mark.parametrize("lost", ["with its host", "when it was ready"])
def test_later_spares_are_prepared_after_a_loss_that_says_nothing_of_the_script(lost: str) -> None:
    desk = running(b"same", b"same")
    renew(desk, 1)
    if lost == "when it was ready":
        desk.say("w1-3", messages.WorkerReady(generation=0, n=0))
    kind = "killed" if lost == "when it was ready" else "agent_lost"
    desk.lose("w1-3", state="waiting", kind=kind)
    assert not desk.state.members.stays_warm


def test_a_hot_spare_takes_the_rank_before_a_warm_one() -> None:
    desk = running(b"same", b"same")
    renew(desk, 1)
    desk.say("w1-3", messages.WorkerReady(generation=0, n=0))
    desk.lose("w1-1", 5, slots={"before:5": b"x"})
    desk.status("w1-0", 5, "running")
    assert desk.seats() == ("w1-0", "w1-3")


def sharded(spares: int = 1, records: str = "0000") -> ControllerDriver:
    """Return a run on a 2x2 mesh whose spares have been asked to prepare."""
    desk = ControllerDriver(world=4, spares=spares, lease_s=1000).begin()
    desk.agent()
    for spare in range(4, 4 + spares):
        body = messages.WorkerHello(pid=1, fingerprint={}, address="", hot=True)
        desk.say(f"w1-{spare}", body)
    desk.open()
    for seat, record in enumerate(records):
        shards = b"even" if seat % 2 == 0 else b"odd"
        body = messages.StateProtected(schema="s", summary="", shards=shards)
        desk.say(f"w1-{seat}", body)
        desk.say(f"w1-{seat}", messages.Recorded(seat=seat, record=record.encode(), calls=b"c"))
    beats = {f"w1-{seat}": (1, 1, "running", 0.0) for seat in range(4)}
    desk.say("", messages.Renew(beats=beats))
    return desk


def test_each_spare_stands_in_for_another_replica_set() -> None:
    desk = sharded(spares=3)
    assert [body.stand_in for _, body in desk.sent(messages.Prepare)] == [0, 1, 0]


def test_records_may_differ_between_replica_sets_and_not_within() -> None:
    assert [body.record for _, body in sharded(2, "0101").sent(messages.Prepare)] == [b"0", b"1"]
    assert [body.stand_in for _, body in sharded(2, "0120").sent(messages.Prepare)] == []
    assert [body.stand_in for _, body in sharded(2, "0102").sent(messages.Prepare)] == [0, 0]


def test_ranks_without_replicas_have_no_stand_in() -> None:
    desk = running(b"same", b"same")
    for seat in (0, 1):
        shards = bytes([seat])
        body = messages.StateProtected(schema="s", summary="", shards=shards)
        desk.say(f"w1-{seat}", body)
    renew(desk, 1)
    assert [body.stand_in for _, body in desk.sent(messages.Prepare)] == [-1]


@pytest.mark.parametrize("is_hot", [False, True], ids=["preparing", "hot"])
@pytest.mark.parametrize(
    ("lost", "successor", "rung"), [(2, "w1-4", "replace"), (3, "w1-5", "respawn")]
)
def test_a_spare_takes_the_ranks_that_it_fits(
    lost: int, successor: str, rung: str, is_hot: bool
) -> None:
    desk = sharded()
    if is_hot:
        desk.say("w1-4", messages.WorkerReady(generation=0, n=0, fits=(0, 2)))
    desk.lose(f"w1-{lost}", 5, slots={"before:5": b"x"})
    for seat in {0, 1, 2, 3} - {lost}:
        desk.status(f"w1-{seat}", 5, "running")
    assert desk.seats()[lost] == successor
    assert [decided.rung for decided in desk.emitted(events.Decided, history=True)] == [rung]


def noticed(within_s: float = 0.0) -> ControllerDriver:
    """Return a run whose spares are asked to prepare, with a notice to rank 1."""
    desk = running(b"same", b"same", hot=("w1-2", "w1-3"))
    step(desk, 1)
    give(desk, notice(worker="w1-1", within_s=within_s))
    step(desk, 2)
    return desk


def step(desk: ControllerDriver, n: int) -> None:
    beats = dict.fromkeys(desk.seats(), (n, n, "running", 0.0))
    desk.say("", messages.Renew(beats=beats))


def leaves(desk: ControllerDriver) -> list[str]:
    return [worker for worker, _ in desk.sent(messages.Leave, history=True)]


def test_a_planned_move_waits_until_its_spare_has_built_its_model() -> None:
    desk = noticed()
    for n in range(3, 9):
        step(desk, n)
    assert leaves(desk) == []
    desk.say("w1-3", messages.WorkerReady(generation=0, n=0))
    assert leaves(desk) == ["w1-1"]
    desk.come_to_boundary()
    assert notes(desk, "built while") == []


@pytest.mark.parametrize(("within_s", "waits_s"), [(40.0, 9.0), (0.0, 599.0)])
def test_a_planned_move_does_not_wait_for_ever_for_its_spare(
    within_s: float, waits_s: float
) -> None:
    desk = noticed(within_s)
    desk.tick(waits_s)
    step(desk, 3)
    assert leaves(desk) == []
    desk.tick(2.0)
    step(desk, 4)
    assert leaves(desk) == ["w1-1"]
    desk.come_to_boundary()
    assert "since they were not ready in time" in notes(desk, "built while")[0]


def test_a_spare_that_ends_while_a_move_waits_for_it_leaves_the_move_to_a_warm_one() -> None:
    desk = noticed()
    desk.lose("w1-3", state="waiting", kind="exited")
    desk.lose("w1-2", state="waiting", kind="exited")
    assert leaves(desk) == []
    for fresh in set(desk.state.members.workers) - {"w1-0", "w1-1"}:
        greet(desk, fresh, hot=True)
    step(desk, 3)
    assert leaves(desk) == ["w1-1"]


def test_spares_are_prepared_when_all_first_workers_have_been_replaced() -> None:
    """Replacement workers record nothing."""
    desk = noticed()
    desk.say("w1-2", messages.WorkerReady(generation=0, n=0))
    desk.say("w1-3", messages.WorkerReady(generation=0, n=0))
    for seat, worker in enumerate(("w1-0", "w1-1")):
        n = desk.state.progress.n + 1
        desk.lose(worker, n, slots={f"before:{n}": b"x"})
        desk.status(desk.seats()[1 - seat], n, "running")
        desk.heal(n)
        step(desk, n + 1)
    assert set(desk.seats()) == {"w1-2", "w1-3"}
    (fresh, *_) = {each.name for each in desk.state.members.workers.values() if each.seat < 0}
    greet(desk, fresh, hot=True)
    step(desk, desk.state.progress.n + 2)
    assert fresh in [worker for worker, _ in desk.sent(messages.Prepare, history=True)]
    later = ControllerDriver(world=2, spares=2, term=2, lease_s=1000)
    later.begin(desk.journal())
    assert later.state.shared.calls == b"calls"
