"""Crash loops: equal failures in a row, early in each attempt."""

from __future__ import annotations

from outlast.events import Fault
from outlast.launch.torchrun.crash_loop import EARLY_S, CrashLoopGuard


def fault(line: str = "", code: int = 1, signal: int = 0) -> Fault:
    kind = "killed" if signal else "exited"
    return Fault(kind=kind, detail="", exit_code=code, signal=signal, traceback=f"Trace\n{line}\n")


def objections(*failures: tuple[Fault, float], most: int = 3) -> list[bool]:
    guard = CrashLoopGuard(most)
    return [bool(guard.objection(cause, lived_s)) for cause, lived_s in failures]


def test_the_same_failure_is_given_up() -> None:
    same = [(fault(f"RuntimeError: port {port} at 0x{port:x}"), 2.0) for port in (1, 22, 333)]
    assert objections(*same) == [False, False, True]
    assert objections(*same, most=2) == [False, True, True]
    assert objections((fault(code=0, signal=11), 1.0), (fault(code=0, signal=11), 1.0), most=2)[-1]


def test_other_failures_and_long_attempts_begin_anew() -> None:
    a, b = fault("KeyError: 'a'"), fault("KeyError: 'b'")
    assert objections((a, 1.0), (a, 1.0), (b, 1.0), (a, 1.0), (a, 1.0)) == [False] * 5
    assert objections((a, 1.0), (a, 1.0), (a, EARLY_S), (a, 1.0), (a, 1.0)) == [False] * 5
    assert objections((a, 1.0), (fault("KeyError: 'a'", code=2), 1.0), (a, 1.0)) == [False] * 3
