"""Stress test that binds local variables of running frames: `python frame_writes.py ROUNDS`.

Local variables are bound thousands of times, in all places where scripts have them.
Only the interpreter is needed; the process ends with its name.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from outlast.worker.script.value_paths import bind_local, names_in, own_frames

ROUNDS = int(sys.argv[1])


class Falls:
    """Object that reads frames in its destructor, during a write."""

    def __del__(self) -> None:
        for frame in own_frames():
            names_in(frame)


def bind(function: str, **values: Any) -> None:
    """Bind as the worker does: from a call that the frame waits for."""
    frame = next(f for f in own_frames() if f.f_code.co_name == function)
    for name, value in values.items():
        bind_local(frame, name, value)
    assert names_in(frame) >= values.keys()


def plain() -> None:
    best, count, late = 1.5, 0, Falls()
    for index in range(ROUNDS):
        bind("plain", best=best / 2 + index, count=count + 1, late=Falls())
        assert best >= index and count == index + 1
    assert isinstance(late, Falls)


def shared_with_inner_functions() -> None:
    total, history = 0, list[int]()

    def inner() -> int:
        nonlocal total
        bind("shared_with_inner_functions", total=total + 1, history=[*history[-3:], total])
        total += 1
        return total

    for index in range(ROUNDS):
        assert inner() == 2 * index + 2 == total
    assert len(history) == 4


def bound_in_a_branch() -> None:
    for index in range(ROUNDS):
        seen = index
        if index % 2:
            del seen
        bind("bound_in_a_branch", seen=-index)
        assert names_in(sys._getframe()) >= {"seen"}


def in_comprehensions_and_handlers() -> None:
    kept: list[int] = []
    for index in range(ROUNDS):
        try:
            kept = [bind("in_comprehensions_and_handlers", index=index) or each for each in (1, 2)]
            raise KeyError(index)
        except KeyError:
            bind("in_comprehensions_and_handlers", kept=[index])
        assert kept == [index]


def generating() -> Iterator[int]:
    position = 0
    for index in range(ROUNDS):
        bind("generating", position=index)
        yield position


def through_a_generator() -> None:
    assert list(generating()) == list(range(ROUNDS))


def deep(depth: int = 20) -> None:
    level = depth
    if depth:
        deep(depth - 1)
    bind("deep", level=-depth)
    assert level == -depth


def recursing() -> None:
    for _ in range(ROUNDS // 20):
        deep()


def in_threads() -> None:
    failed: list[BaseException] = []

    def one(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failed.append(error)

    ways = (plain, shared_with_inner_functions, through_a_generator)
    threads = [threading.Thread(target=one, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


gc.set_threshold(7)
for way in (
    plain, shared_with_inner_functions, bound_in_a_branch, in_comprehensions_and_handlers,
    through_a_generator, recursing, in_threads,
):  # fmt: skip
    way()
print("frame_writes")
