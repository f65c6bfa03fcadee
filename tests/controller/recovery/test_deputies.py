"""Deputies of absent ranks in saves."""

from __future__ import annotations

from tests.controller.controller_driver import ControllerDriver

from outlast.controller.recovery.deputies import DEPUTY_RANKS_MAX, deputies_of, rank_0
from outlast.transport import messages


def found(world: int, *absent: int, sets: int = 1) -> dict[int, int]:
    """Return the deputies where rank r holds shards r % sets."""
    desk = ControllerDriver(world=world, spares=0)
    desk.state.shared.holdings = {rank: b"%d" % (rank % sets) for rank in range(world)}
    desk.state.progress.let_go(absent)
    return deputies_of(desk.state)


def test_ranks_with_the_same_shards_are_deputies_in_turn() -> None:
    assert found(4) == {}
    assert found(4, 2) == {2: 0}
    assert found(4, 0, 2) == {0: 1, 2: 3}
    assert found(4, 0, 1, 3) == {0: 2, 1: 2, 3: 2}
    assert found(8, 0, 1, 2, 3, sets=4) == {0: 4, 1: 5, 2: 6, 3: 7}
    assert found(8, 0, 4, 5, sets=4) == {5: 1}, "nobody holds what rank 0 held"


def test_a_rank_writes_for_a_limited_number_of_others() -> None:
    most = range(1, DEPUTY_RANKS_MAX + 1)
    assert found(len(most) + 1, *most) == dict.fromkeys(most, 0)
    assert found(len(most) + 2, *most, len(most) + 1) == dict.fromkeys(most, 0)


def test_a_deputy_of_rank_0_gets_its_intervals_and_what_it_has_left() -> None:
    desk = ControllerDriver(world=3, spares=0).begin().open()
    assert rank_0(desk.state) == 0
    desk.state.progress.let_go((0,))
    assert rank_0(desk.state) == 1
    (frame, *_) = [body for _, body in desk.sent(messages.Connect, history=True)]
    assert frame.deputies == () and frame.slots == {}
