"""Spare workers: replacement up to their number, bounded by early deaths."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.config import Limits
from outlast.controller import membership, node_placement, state_machine
from outlast.controller.controller_state import ControllerState, ControllerTurn
from outlast.controller.member_tables import AgentRecord, NodePlacement, WorkerRecord
from outlast.controller.recovery import reconfiguration
from outlast.transport import messages


def running(spares: int = 1, **limits: Any) -> ControllerDriver:
    return ControllerDriver(world=2, spares=spares, **limits).begin().open()


def notes(desk: ControllerDriver) -> str:
    return " ".join(note.text for note in desk.emitted(events.Note))


@pytest.mark.parametrize("lived_s", [1, 700])
def test_a_lost_spare_is_replaced_at_once(lived_s: int) -> None:
    desk = running(lease_s=1000)
    desk.tick(lived_s)
    desk.lose("w1-2", state="waiting")
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [-1]
    assert "spare w1-2 is lost" in notes(desk) and "another is started" in notes(desk)
    assert desk.state.mode == "open" and desk.state.budgets.respawns == 1


@pytest.mark.parametrize("warm", [True, False])
def test_spares_that_keep_dying_young_are_not_replaced_for_ever(warm: bool) -> None:
    desk = running(attempts_max=3)
    for number in range(2, 5):
        if warm and number > 2:
            desk.hello(f"w1-{number}")
        desk.lose(f"w1-{number}", state="waiting")
    assert not desk.sent(messages.Spawn)
    assert "no other is started before the next recovery, since 3 in a row" in notes(desk)
    desk.status("w1-0", 0, "idle", fault=events.Fault(kind="transport", detail="reset"))
    desk.status("w1-1", 0, "idle")
    desk.heal(0)
    desk.commit(1)
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [-1]


def test_a_used_spare_is_replaced_though_no_phase_is_completed_for_long() -> None:
    desk = running(lease_s=1000)
    desk.lose("w1-1", 5, slots={"before:5": b"x", "after:5": b"y"})
    desk.status("w1-0", 5, "running")
    desk.heal(5)
    desk.say("", messages.Renew())
    assert not desk.sent(messages.Spawn)
    desk.tick(40)
    desk.say("", messages.Renew())
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [-1]


def test_a_spare_that_is_still_starting_takes_the_seat_when_it_is_warm() -> None:
    desk = ControllerDriver(world=2, spares=1, lease_s=1000).begin()
    desk.agent()
    for worker in ("w1-0", "w1-1"):
        desk.hello(worker)
    desk.heal(0)
    desk.commit(1)
    desk.lose("w1-1", 5, slots={"before:5": b"x"})
    desk.status("w1-0", 5, "running")
    assert not desk.sent(messages.Spawn) and desk.seats() == ("w1-0", "w1-2")
    assert desk.emitted(events.Decided, history=True)[-1].rung == "replace"
    desk.hello("w1-2")
    ((worker, seat),) = desk.sent(messages.Seat)
    assert (worker, seat.seat) == ("w1-2", 1)


def test_the_first_spare_to_be_warm_gets_the_seat() -> None:
    desk = ControllerDriver(world=2, spares=2, lease_s=1000).begin()
    desk.agent()
    for worker in ("w1-0", "w1-1"):
        desk.hello(worker)
    desk.heal(0)
    desk.lose("w1-1", 5, slots={"before:5": b"x"})
    desk.status("w1-0", 5, "running")
    assert desk.seats() == ("w1-0", "w1-2")
    desk.hello("w1-3")
    assert desk.seats() == ("w1-0", "w1-3")
    assert [worker for worker, _ in desk.sent(messages.Seat)] == ["w1-3"]
    desk.hello("w1-2")
    assert [worker.name for worker in desk.state.warm_spares()] == ["w1-2"]


def test_long_lives_are_not_counted_together() -> None:
    desk = running(attempts_max=2, lease_s=1e6)
    for number in range(2, 9):
        desk.hello(f"w1-{number}")
        desk.tick(700)
        desk.lose(f"w1-{number}", state="waiting")
        assert desk.sent(messages.Spawn), number


def test_a_spare_that_was_given_up_is_replaced_when_it_is_reaped() -> None:
    desk = running(hello_s=5, lease_s=1000)
    desk.lose("w1-2", state="waiting")
    desk.tick(6)
    assert desk.killed() == {"w1-3"}
    desk.lose("w1-3", state="starting", kind="requested", detail="killed by its agent")
    assert [body.seat for _, body in desk.sent(messages.Spawn)] == [-1]
    assert desk.state.budgets.spares_failed == 2


def test_a_run_that_drains_starts_no_spares() -> None:
    desk = running()
    desk.stop()
    for worker in desk.seats():
        desk.status(worker, 7, "idle")
    desk.heal(7)
    desk.history.clear()
    desk.lose("w1-2", state="waiting")
    assert not desk.sent(messages.Spawn, history=True)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_spare_that_dies_before_init_is_told_with_its_last_line_and_log(is_open: bool) -> None:
    desk = running(spares=2) if is_open else ControllerDriver(world=2, spares=1).begin()
    if not is_open:
        desk.agent()
    spare = next(b.worker for _, b in desk.sent(messages.Spawn, history=True)[::-1] if b.seat < 0)
    if is_open:
        desk.lose(spare, state="waiting")
        spare = next(b.worker for _, b in desk.sent(messages.Spawn) if b.seat < 0)
    desk.lose(spare, state="starting", kind="exited", exit_code=1, traceback="a\nKeyError: 'RANK'")
    told = notes(desk)
    assert "its last line: KeyError: 'RANK'" in told
    assert f"before outlast.init(), where a spare has no rank yet: see logs/spare/{spare}" in told


def two_hosts(world: int, spares: int = 0) -> ControllerTurn:
    state = state_machine.initial(world, spares, Limits())
    state.members.agents = {
        name: AgentRecord(
            name=name, incarnation=1, host=name, capacity=9, lease_ns=10**12, renewed_ns=0
        )
        for name in ("a", "b")
    }  # fmt: skip
    turn = ControllerTurn(state)
    reconfiguration.start_over(turn, 0, 0)
    return turn


def hosts(state: ControllerState) -> str:
    return "".join(state.members.workers[name].agent for name in state.members.seats)


@pytest.mark.parametrize(("world", "expected"), [(4, "aabb"), (5, "aaabb"), (2, "ab")])
def test_ranks_are_contiguous_by_host(world: int, expected: str) -> None:
    turn = two_hosts(world)
    reconfiguration.gather_members(turn)
    assert hosts(turn.state) == expected


def nodes(world: int, ranks_per_node: int, spares: int = 0) -> ControllerTurn:
    """Return the start of a run of nodes c, a, b, in this order of node ranks."""
    state = state_machine.initial(
        world,
        spares,
        Limits(),
        placement=NodePlacement(agents=("c", "a", "b"), ranks_per_node=ranks_per_node),
    )
    turn = ControllerTurn(state)
    reconfiguration.start_over(turn, 0, 0)
    return turn


def connect(turn: ControllerTurn, *names: str) -> None:
    for name in names:
        turn.state.members.agents[name] = AgentRecord(
            name=name, incarnation=1, host=name, capacity=4, lease_ns=10**12, renewed_ns=0
        )
    reconfiguration.gather_members(turn)


def test_ranks_follow_node_ranks_once_all_nodes_are_there() -> None:
    turn = nodes(4, 2, spares=2)
    connect(turn, "a", "b")
    assert turn.state.members.workers == {}, "no rank starts before all nodes are there"
    connect(turn, "c")
    assert hosts(turn.state) == "ccaa"
    spares = [worker.agent for worker in turn.state.members.workers.values() if worker.seat < 0]
    assert spares == ["b", "b"], "the spare node has most room"


def test_a_rank_returns_to_its_node_and_to_another_one_if_that_is_lost() -> None:
    turn = nodes(4, 2)
    connect(turn, "a", "b", "c")
    state = turn.state
    state.members.remove(state.members.seats[2])
    membership.fill(turn, 2)
    assert hosts(state) == "ccaa"
    state.members.agents["a"] = replace(state.members.agents["a"], connected=False, lapsed=True)
    for seat in (2, 3):
        state.members.remove(state.members.seats[seat])
    for seat in (2, 3):
        membership.fill(turn, seat)
    assert hosts(state) == "ccbb"
    assert node_placement.lost_nodes(state) == ["a"]


def test_a_rank_of_a_lost_node_goes_to_the_nearest_failure_domain() -> None:
    """Nodes c and a have ranks; b and d are spare, and d is in the rack of a."""
    domains = ("row1/rack1", "row1/rack2", "row2/rack3", "row1/rack2")
    placement = NodePlacement(agents=("c", "a", "b", "d"), ranks_per_node=2, domains=domains)
    turn = ControllerTurn(state_machine.initial(4, 4, Limits(), placement=placement))
    reconfiguration.start_over(turn, 0, 0)
    connect(turn, "a", "b", "c", "d")
    state = turn.state
    assert hosts(state) == "ccaa"
    state.members.agents["a"] = replace(state.members.agents["a"], connected=False, lapsed=True)
    for seat in (2, 3):
        state.members.remove(state.members.seats[seat])
    for seat in (2, 3):  # the first spares that are still starting, then new workers
        membership.fill(turn, seat)
    assert hosts(state) == "ccdd"
    levels = node_placement.nearness(state, 2)
    assert levels == {"c": 1, "a": 2, "b": 0, "d": 2}


def test_a_rank_with_a_gpu_goes_only_where_its_local_rank_is_free() -> None:
    turn = nodes(4, 2, spares=2)
    connect(turn, "a", "b", "c")
    state = turn.state
    state.members.fingerprint = dict(SHOWN)
    hello = messages.WorkerHello(pid=1, fingerprint={"cpu": "AVX2"}, address="")
    for name in ("near", "beside"):  # warm spares on the node of ranks 0 and 1
        state.members.add(
            WorkerRecord(name=name, agent="c", since_ns=1, hello=hello, is_spare=True)
        )
    state.members.agents["a"] = replace(state.members.agents["a"], connected=False, lapsed=True)
    for seat in (2, 3):
        state.members.remove(state.members.seats[seat])
    for seat in (2, 3):
        membership.fill(turn, seat)
    assert hosts(state) == "ccbb", "node c has no free GPU, though it has spares and room"
    state.members.remove(state.members.seats[1])
    assert membership.fill(turn, 1) == "near", "the GPU of local rank 1 is free there"


def test_ranks_with_gpus_wait_where_no_node_has_one() -> None:
    turn = nodes(4, 2)
    connect(turn, "a", "b", "c")
    state = turn.state
    state.members.fingerprint = dict(SHOWN)
    for lost in ("a", "b"):
        state.members.agents[lost] = replace(
            state.members.agents[lost], connected=False, lapsed=True
        )
    for seat in (2, 3):
        state.members.remove(state.members.seats[seat])
        assert membership.fill(turn, seat) == ""
    assert state.members.seats[2:] == ["", ""]
    state.members.fingerprint = {"cpu": "AVX2"}
    assert membership.fill(turn, 2), "ranks without GPUs share a node that has room"


@pytest.mark.parametrize(("gpus", "stops"), [(0, False), (1, True), (2, False), (8, False)])
def test_a_node_with_fewer_gpus_than_ranks_is_named(gpus: int, stops: bool) -> None:
    turn = nodes(4, 2)
    connect(turn, "a", "b", "c")
    state = turn.state
    worker = next(iter(state.members.workers.values()))
    body = messages.WorkerHello(pid=1, fingerprint={}, address="", devices=gpus)
    membership.on_hello(turn, worker, body)
    assert (state.mode == "stopping") == stops
    if stops and (end := state.ending.result) and end.cause:
        assert "sees 1 GPUs for 2 ranks of a node" in end.cause.detail


def test_a_spare_of_the_same_host_takes_the_seat_first() -> None:
    turn = two_hosts(4)
    reconfiguration.gather_members(turn)
    state = turn.state
    hello = messages.WorkerHello(pid=1, fingerprint={}, address="")
    for name, agent in (("s1", "a"), ("s2", "b")):
        state.members.add(
            WorkerRecord(name=name, agent=agent, since_ns=1, hello=hello, is_spare=True)
        )
    state.members.remove(state.members.seats[3])
    assert membership.fill(turn, 3) == "s2" and hosts(state) == "aabb"


SHOWN = {"cpu": "AVX2", "gpu": "H100", "arithmetic": "0f"}


def seated_spare_without_a_device() -> ControllerDriver:
    desk = ControllerDriver(world=2, spares=1).begin()
    desk.agent()
    for worker in ("w1-0", "w1-1"):
        desk.hello(worker, **SHOWN)
    desk.hello("w1-2", cpu="AVX2")
    desk.heal(0)
    assert desk.state.mode == "open" and not desk.sent(messages.Kill)
    desk.lose("w1-1", 5, slots={"before:5": b"x", "after:5": b"y"})
    desk.status("w1-0", 5, "running")
    assert desk.seats() == ("w1-0", "w1-2")
    return desk


def test_a_spare_without_a_device_takes_a_seat_and_shows_the_rest_there() -> None:
    desk = seated_spare_without_a_device()
    desk.hello("w1-2", **SHOWN)
    assert not desk.sent(messages.Kill)
    desk.heal(5)
    assert desk.state.mode == "open" and desk.seats() == ("w1-0", "w1-2")


def test_a_spare_whose_device_computes_otherwise_loses_its_seat() -> None:
    desk = seated_spare_without_a_device()
    desk.hello("w1-2", **{**SHOWN, "arithmetic": "10"})
    assert "w1-2" in str(desk.sent(messages.Kill))
    assert "w1-2 computes differently (arithmetic: 10 against 0f)" in notes(desk)


def test_a_spare_without_a_device_is_unfit_by_all_that_it_shows() -> None:
    desk = ControllerDriver(world=2, spares=1).begin()
    desk.agent()
    for worker in ("w1-0", "w1-1"):
        desk.hello(worker, **SHOWN)
    desk.hello("w1-2", cpu="AVX512")
    assert "cpu: AVX512 against AVX2" in notes(desk)


def hello(desk: ControllerDriver, agent: str, incarnation: int = 1, **body: Any) -> None:
    own = messages.AgentHello(host=agent, address="", capacity=2, lease_s=10, **body)
    desk.say("", own, agent=agent, incarnation=incarnation, seq=1)


def test_a_node_that_comes_back_gets_a_spare_although_another_host_has_one() -> None:
    """Nodes a and b have a rank each, c is spare."""
    desk = ControllerDriver(world=2, spares=1, lease_s=10)
    desk.state.placement = NodePlacement(agents=("a", "b", "c"), ranks_per_node=1)
    desk.begin()
    for agent in ("a", "b", "c"):
        hello(desk, agent)
    state = desk.state
    assert [state.members.workers[name].agent for name in state.members.seats] == ["a", "b"]
    state.members.agents["b"] = replace(state.members.agents["b"], connected=False, lapsed=True)
    spare = next(iter(state.members.unseated))
    moved = state.members.seats[1]
    state.members.remove(moved)
    state.members.change(spare, seat=1)
    state.members.assign(1, spare)
    turn = ControllerTurn(state)
    membership.keep_spares(turn)
    (makeshift,) = state.members.unseated
    assert state.members.workers[makeshift].agent in ("a", "c")
    assert node_placement.spares_missing(state) == 0
    hello(desk, "b", incarnation=2)
    assert desk.state.members.refill_due
    membership.keep_spares(ControllerTurn(desk.state))
    unseated = {desk.state.members.workers[name].agent for name in desk.state.members.unseated}
    assert "b" in unseated and len(unseated) == 2
    assert node_placement.spares_missing(desk.state) == 0


def test_a_node_that_came_later_is_the_last_of_the_placement() -> None:
    desk = ControllerDriver(world=2, spares=1, lease_s=10)
    desk.state.placement = NodePlacement(
        agents=("a", "b"), ranks_per_node=1, domains=("rack1", "rack2")
    )
    desk.begin()
    for agent in ("a", "b"):
        hello(desk, agent)
    hello(desk, "d", domain="rack2")
    placement = desk.state.placement
    assert placement.agents == ("a", "b", "d") and placement.domains[2] == "rack2"
    assert [placement.home(seat) for seat in (0, 1)] == ["a", "b"]
    assert node_placement.nearness(desk.state, 1)["d"] == 1
