"""Severed connections: blocked operations return, foreign groups are untouched."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from outlast.errors import GroupError, StepRefused
from outlast.worker.groups import is_transport_error
from outlast.worker.worker_process import STUCK_S

pytestmark = pytest.mark.process


def _blocked(kind: str, member: Any) -> None:
    """Wait for rank 0, which never comes."""
    one, many = torch.ones(2), [torch.ones(2) for _ in range(member.world)]
    match kind:
        case "all_reduce":
            dist.all_reduce(one)
        case "barrier":
            dist.barrier()
        case "all_gather":
            dist.all_gather(many, one)
        case "reduce_scatter":
            dist.reduce_scatter(one, many)
        case "broadcast":
            dist.broadcast(torch.ones(4_000_000), 0)
        case "recv":
            dist.recv(one, 0)
        case "recv_anysource":
            dist.recv(one)
        case "send":
            dist.send(torch.ones(8_000_000), 0)
        case "vote":
            member.groups.vote("1")


def _say_when_under_way(member: Any) -> None:
    hand_out = member.groups.handed_out

    def handed_out(*args: Any) -> Any:
        given = hand_out(*args)
        member.say("blocked")
        return given

    member.groups.handed_out = handed_out


KINDS = ("all_reduce", "barrier", "all_gather", "reduce_scatter", "broadcast", "recv",
         "recv_anysource", "send", "vote")  # fmt: skip


def _say_when_stuck(member: Any) -> None:
    """gloo forgets to wake a sender, once in dozens of times: the process must then know."""
    assert member.told.get(timeout=60) == "severed"
    threading.Event().wait(STUCK_S)
    if member.groups.stuck(1):
        member.say("ended")
        member.line.write("result", "stuck")
        os._exit(0)


def _wake(member: Any, kind: str) -> str:
    member.init()
    if member.rank == 0:
        member.say("blocked")
        assert member.told.get(timeout=60) == "ended"  # its own end would wake the others too
        try:
            dist.all_reduce(torch.ones(2))
        except StepRefused as refused:
            return f"refused: {refused}"
        return "went through"
    _say_when_under_way(member)
    threading.Thread(target=_say_when_stuck, args=(member,), daemon=True).start()
    if kind == "vote":
        member.say("blocked")
    try:
        _blocked(kind, member)
    except (RuntimeError, GroupError) as error:
        member.say("ended")
        left = member.groups.reap()
        if not is_transport_error(error):
            return repr(error)
        # A reduce-scatter's wait can raise while another of its parts waits for ever in gloo, and a
        # vote looks up by itself: the process goes on, and the group is dropped when gloo lets go.
        kept = left and kind in ("reduce_scatter", "vote")
        return "kept" if kept else "woken" if left == 0 else repr(left)
    return "went through"


@pytest.mark.parametrize("kind", KINDS)
def test_sever_wakes_every_blocked_operation(cluster: Any, kind: str) -> None:
    cluster.fork(3, _wake, kind)
    cluster.expect("blocked", 3)
    cluster.sever(1)
    cluster.tell("severed", [1, 2])
    cluster.expect("ended", 2)
    cluster.tell("ended", [0])
    first, *others = cluster.join(timeout_s=60)
    assert first.startswith("refused")
    # A broadcast's leaf may have been answered before it was cut; it must then be the right bytes.
    assert "woken" in others
    assert set(others) <= ({"woken", "kept"} if kind == "vote" else {"woken", "stuck", "kept"})


def _forgotten(member: Any) -> str:
    """gloo does not let go of a vote that was cut: nothing is shut down here, and rank 0 never
    votes."""
    member.init()
    if member.rank == 0:
        assert member.told.get(timeout=60) == "ended"
        return "told"
    control = member.groups._control
    threading.Thread(target=_close_when_busy, args=(member, control), daemon=True).start()
    with pytest.raises(GroupError, match="did not let go") as held:
        member.groups.vote("1")
    left = member.groups.reap()
    del control, held
    member.say("ended")  # and now nobody does
    return f"{left} left"


def _close_when_busy(member: Any, control: Any) -> None:
    pause = threading.Event()
    while not control.busy:
        pause.wait(0.01)
    member.groups._close(1)


def test_a_vote_that_gloo_forgets_holds_nobody_up(cluster: Any) -> None:
    """Its group is dropped by a thread that waits for gloo; the ranks go on."""
    cluster.fork(3, _forgotten)
    cluster.expect("ended", 2)
    cluster.tell("ended", [0])
    assert cluster.join(timeout_s=60) == ["told", "1 left", "1 left"]


def _wake_alone(member: Any) -> str:
    member.init()
    if member.rank == 2:
        member.say("blocked")
        assert member.told.get(timeout=30) == "go"
        return "told"
    _say_when_under_way(member)
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return "woken" if is_transport_error(error) else repr(error)
    return "went through"


def test_one_severed_rank_frees_its_neighbours(cluster: Any) -> None:
    """Nobody tells rank 1: the cut connection itself does, as after a lost process."""
    cluster.fork(3, _wake_alone)
    cluster.expect("blocked", 3)
    cluster.sever(1, [0])
    cluster.sever(1, [2])
    cluster.tell("go", [2])
    assert cluster.join(timeout_s=60) == ["woken", "woken", "told"]


def _with_sockets(member: Any) -> tuple[int, int]:
    member.init()
    server = socket.create_server(("127.0.0.1", 0))
    pairs: list[tuple[socket.socket, socket.socket]] = []
    stop, some = threading.Event(), threading.Event()

    def open_more() -> None:
        while not stop.is_set() and len(pairs) < 300:
            client = socket.create_connection(server.getsockname())
            pairs.append((client, server.accept()[0]))
            some.set()

    opener = threading.Thread(target=open_more)
    opener.start()
    assert some.wait(10)
    member.groups.sever(1)
    stop.set()
    opener.join(10)
    whole = 0
    for client, served in pairs:
        client.sendall(b"x")
        served.settimeout(5)
        whole += served.recv(1) == b"x"
        client.close()
        served.close()
    server.close()
    return whole, len(pairs)


def test_the_scripts_own_sockets_stay_whole(cluster: Any) -> None:
    for whole, opened in cluster.run(2, _with_sockets):
        assert whole == opened > 0


def _connect_alone(member: Any) -> str:
    member.groups.take_seat(member.rank, member.world, dry=False)
    if member.rank == 0:
        member.say("connecting")
        return "absent"
    try:
        member.groups._mailbox._publish = lambda *_: member.say("connecting")
        member.groups.connect(1, 60)
    except GroupError as error:
        return "closed" if "closed" in str(error) else repr(error)
    return "connected"


def test_sever_ends_a_connect_in_progress(cluster: Any) -> None:
    cluster.fork(3, _connect_alone)
    cluster.expect("connecting", 3)
    cluster.sever(1, [1, 2])
    assert cluster.join(timeout_s=60) == ["absent", "closed", "closed"]


def _half_connected(member: Any) -> str:
    """Rank 0 publishes its address and is lost before it connects."""
    member.groups.take_seat(member.rank, member.world, dry=False)
    if member.rank == 0:
        member.groups._mailbox.get = lambda *_: os._exit(member.line.write("result", "lost") or 0)
    else:
        publish = member.groups._mailbox._publish

        def publish_and_say(body: Any) -> None:
            publish(body)
            member.say("published")

        member.groups._mailbox._publish = publish_and_say
    try:
        member.connect(1, 60.0)
    except GroupError:
        return "freed"
    return "connected"  # the lost rank's kernel had accepted before it was gone


def test_sever_frees_who_waits_for_a_lost_ranks_connection(cluster: Any) -> None:
    cluster.fork(4, _half_connected)
    cluster.expect("published", 3)
    cluster.sever(1, [1, 2, 3])
    assert set(cluster.join(timeout_s=60)[1:]) <= {"freed", "connected"}


def _late(member: Any) -> list[str]:
    member.groups.take_seat(member.rank, member.world, dry=False)
    said = []
    member.groups.sever(2)  # the news is faster than the order to connect
    for generation in (1, 2):
        try:
            member.groups.connect(generation, ["127.0.0.1:1"] * 2, 0.1)
        except GroupError as error:
            said.append(str(error))
    return said


def test_a_generation_closed_before_it_connects_is_refused(cluster: Any) -> None:
    for said in cluster.run(2, _late):
        assert len(said) == 2
        assert all("closed" in text for text in said)


def _counts() -> tuple[int, int, int]:
    process = Path("/proc/self")
    return (
        len(list((process / "fd").iterdir())),
        len(list((process / "task").iterdir())),
        len((process / "maps").read_text().splitlines()),
    )


def _generations(member: Any, count: int) -> tuple[list[int], list[int]]:
    member.init()
    group = dist.new_group(list(range(member.world)))
    early, late = (0, 0, 0), (0, 0, 0)
    for generation in range(1, count + 1):
        if generation > 1:
            member.connect(generation)
        total = torch.ones(3)
        dist.all_reduce(total)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [member.world**2] * 3
        if member.rank:  # rank 0 does not come: an operation in flight is cut
            works = [dist.all_reduce(torch.ones(100_000), group=g, async_op=True)
                     for g in (group, None)]  # fmt: skip
        else:
            works = []
        member.groups.vote(str(generation))
        member.groups.sever(generation)
        for work in works:
            with pytest.raises(RuntimeError):
                work.wait()
        works.clear()
        del total
        assert member.groups.reap() == 0
        if generation == 10:
            early = _counts()
    late = _counts()
    return list(early), list(late)


def test_fifty_generations_leave_nothing_behind(cluster: Any) -> None:
    for early, late in cluster.run(3, _generations, 50):
        assert late[0] <= early[0], "descriptors grow"
        assert late[1] <= early[1] + 1, "threads grow"  # one that ends may still be listed
        assert late[2] <= early[2] + 8, "memory mappings grow"


def _trouble(member: Any) -> list[str]:
    member.init()
    if member.rank == 0:
        assert member.told.get(timeout=30) == "go"
        groups = member.groups
        groups._device.cut(groups._mailbox.listeners(1))  # connections break, nobody was told
        with pytest.raises(GroupError):
            member.groups.vote("1")
        return [type(error).__name__ for error in member.troubles]
    member.say("ready")
    with pytest.raises(RuntimeError) as broken:
        dist.all_reduce(torch.ones(3))
    assert is_transport_error(broken.value)
    with pytest.raises(StepRefused):
        dist.all_reduce(torch.ones(3))
    return [type(error).__name__ for error in member.troubles]


def test_a_broken_connection_is_reported_once(cluster: Any) -> None:
    cluster.fork(2, _trouble)
    cluster.expect("ready", 1)
    cluster.tell("go", [0])
    first, second = cluster.join(timeout_s=60)
    assert first == []
    assert second == ["RuntimeError"]


@pytest.mark.parametrize("error", [RuntimeError("Connection refused by my database"),
    ValueError("Connection closed by peer"), RuntimeError("mat1 and mat2 shapes"),
    RuntimeError("ProcessGroupGloo::allgather: invalid tensor size"),
    RuntimeError("[gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4."
                 " Received data size doesn't match expected size."),
    TimeoutError("timed out")])  # fmt: skip
def test_other_errors_are_no_lost_peers(error: BaseException) -> None:
    assert not is_transport_error(error)
