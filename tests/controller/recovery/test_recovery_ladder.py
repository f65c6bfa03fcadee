"""Recovery ladder: the cheapest sufficient rung, and the root cause."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.controller.recovery.recovery_ladder import (
    Situation,
    choose,
)
from outlast.controller.recovery.root_fault import failure_identity, is_user_error, root_fault
from outlast.events import Fault

KILLED = Fault(kind="killed", detail="w1 was killed")
BASE = {"cause": KILLED, "donors": 3, "spares": 1, "respawns": 100, "world": 4, "attempts": 0}


@pytest.mark.parametrize(
    ("changes", "rung", "says"),
    [
        ({}, "retry", "is retried"),
        ({"lost": (2,)}, "replace", "rank 2 lost (killed: w1 was killed): warm spares"),
        ({"lost": (2, 3)}, "respawn", "ranks 2, 3 lost"),
        ({"lost": (2,), "spares": 0}, "respawn", "1 worker(s) are started anew"),
        ({"lost": (2,), "stateless": (2,)}, "restart", "own state of rank 2"),
        ({"donors": 0, "lost": (0, 1, 2, 3)}, "restart", "no worker is left"),
        ({"donors": 0}, "restart", "no worker is left that holds the whole state"),
        ({"stateless": (1,)}, "retry", ""),
        ({"lost": (2,), "unreplicated": (2,)}, "restart", "no other rank holds the shards of rank"),
        ({"lost": (2,), "unreplicated": (2,), "copy_step": 4}, "rebuild", "the copy of step 4"),
        ({"unreplicated": (2,), "copy_step": 4}, "rebuild", "the other ranks stay"),
        (
            {"lost": (2, 3), "unreplicated": (2,), "copy_step": 4, "stateless": (2,)},
            "restart",
            "own state of rank 2",
        ),
        ({"lost": (2,), "unreplicated": (2,), "no_copy": "of step 3"}, "restart", "; of step 3"),
        (
            {
                "lost": (2,),
                "unreplicated": (2,),
                "checkpoint_n": 9,
                "in_memory": True,
                "steps_lost": 1,
            },
            "rollback",
            "copy in memory at phase 9; steps that a rank has completed and all redo: 1",
        ),
        ({"unreplicated": (1,)}, "restart", "shards of rank 1"),
        ({"donors": 0, "steps_lost": 7, "checkpoint_n": 40}, "restart", "all redo: 7"),
        ({"donors": 0, "restarts": 3}, "stop", "ended at the same place"),
        ({"donors": 0, "respawns": 0}, "restart", "the beginning"),
        ({"lost": (2,), "spares": 0, "respawns": 0}, "stop", "respawns_max"),
        ({"lost": (2,), "spares": 0, "respawns": 0, "checkpoint_n": 9}, "restart", "respawns_max"),
        ({"attempts": 3}, "stop", "3 generations ended in the same fault"),
        ({"attempts": 1, "attempts_all": 12}, "stop", "12 generations failed, each with another"),
        ({"attempts": 2, "attempts_all": 11}, "retry", ""),
        ({"attempts": 2, "lost": (1,)}, "replace", ""),
    ],
)
def test_the_cheapest_rung_that_works(changes: dict[str, Any], rung: str, says: str) -> None:
    choice = choose(Situation(**{**BASE, **changes}))
    assert choice.rung == rung
    assert says in choice.reason


def test_a_traceback_tells_more_than_a_death_than_a_broken_connection() -> None:
    raised = Fault(kind="raised", detail="r", traceback="T")
    transport = Fault(kind="transport", detail="t")
    assert root_fault((transport, KILLED, raised)) is raised
    assert root_fault((transport, KILLED)) is KILLED
    assert root_fault((transport,)) is transport
    assert root_fault(()) is None


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        (KILLED, ""),
        (Fault(kind="killed", detail="", signal=9), ""),
        (Fault(kind="killed", detail="", signal=11, seat=2), "killed at rank 2"),
        (Fault(kind="agent_lost", detail=""), ""),
        (Fault(kind="stopped", detail=""), ""),
        (Fault(kind="raised", detail="", seat=1, traceback="T\n  E: x\n"), "raised:   E: x"),
        (Fault(kind="transport", detail="", seat=1), "transport"),
        (Fault(kind="hung", detail="", seat=1), "hung at rank 1"),
    ],
)
def test_only_what_lies_in_the_run_itself_can_recur(fault: Fault, key: str) -> None:
    torn = Fault(kind="torn", detail="cut by another's end", seat=3)
    assert failure_identity((torn, fault)) == key
    assert failure_identity((torn,)) == "torn at rank 3"


def test_only_the_users_own_code_is_the_users_error() -> None:
    assert is_user_error(Fault(kind="raised", detail=""))
    assert is_user_error(Fault(kind="exited", detail="", exit_code=1, traceback="T"))
    assert not is_user_error(Fault(kind="exited", detail="", exit_code=1))
    assert not is_user_error(KILLED)
    assert not is_user_error(None)
