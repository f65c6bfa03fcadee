"""Handlers of a worker for signals that reach every process of a job."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process
TAKE = """
import faulthandler, os, signal, subprocess, sys, threading, time
from outlast import job_signals
from outlast.job_signals import JobSignals

for number in job_signals.JOB_SIGNALS:  # a shell that runs the tests in the background ignores some
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
is_open = threading.Event()
is_open.set()

def take():
    signals = JobSignals(is_open.is_set)
    signals.take()
    return signals

def hear(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # Python calls handlers between two instructions
"""


def run(text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TAKE + text]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR2"])
def test_a_signal_ends_a_worker_whose_launcher_does_not_answer(number: str) -> None:
    text = f"""
job_signals.GRACE_S = 0.3
take()
hear(signal.{number})
print("lives on", flush=True)
for _ in range(3000):
    threading.Event().wait(0.01)
"""
    done = run(text)
    assert (done.returncode, done.stdout) == (-getattr(signal, number), "lives on\n")


def test_a_worker_lives_on_when_its_launcher_ends_the_run() -> None:
    text = """
job_signals.GRACE_S = 0.3
signals = take()
hear(signal.SIGTERM)
signals.answer()
for thread in threading.enumerate():
    if thread.name == "outlast-signal":
        thread.join()
hear(signal.SIGINT)
hear(signal.SIGUSR1)
print("ended by itself")
"""
    done = run(text)
    assert (done.returncode, done.stdout) == (0, "ended by itself\n"), done.stderr


def test_a_recovery_that_is_under_way_is_waited_for() -> None:
    text = """
job_signals.GRACE_S, job_signals.GRACE_S_MAX = 0.2, 30.0
signals = take()
is_open.clear()
hear(signal.SIGTERM)
threading.Event().wait(1.0)
signals.answer()
print("ended by itself")
"""
    assert run(text).stdout == "ended by itself\n"


def test_handlers_of_the_script_are_left_to_it() -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: print("its own", flush=True))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
faulthandler.register(signal.SIGUSR1, file=sys.stdout)
take()
hear(signal.SIGTERM)
hear(signal.SIGHUP)
hear(signal.SIGUSR1)
"""
    done = run(text)
    assert done.returncode == 0 and done.stdout.startswith("its own\n"), done.stderr
    assert "most recent call first" in done.stdout, "faulthandler's is one of C"


def test_children_of_the_script_are_ended_by_signals() -> None:
    text = """
take()
forked = os.fork()
if not forked:
    hear(signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)
started = subprocess.Popen(["sleep", "600"])
started.terminate()
print(started.wait(10))
"""
    assert run(text).stdout.split() == ["-15", "-15"]


def test_loader_processes_outlive_signals_but_not_their_worker() -> None:
    text = """
import torch
from torch.utils.data import DataLoader
take()
batches = iter(DataLoader(range(1000), num_workers=2))
next(batches)
processes = [process.pid for process in batches._workers]
for pid in processes:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(pid, number)
print(len(list(batches)), *processes, flush=True)
batches = iter(DataLoader(range(1000), num_workers=2, persistent_workers=True))
next(batches)
print(*(process.pid for process in batches._workers))
"""
    done = run(text)
    assert done.returncode == 0, done.stderr
    count, *pids = done.stdout.split()
    assert count == "999" and len(pids) == 4 and not done.stderr
    for pid in pids:
        assert subprocess.run(["kill", "-0", pid], check=False, capture_output=True).returncode


def test_a_notice_is_reported_also_from_within_a_c_extension_and_ends_nothing() -> None:
    text = """
import hashlib, json
job_signals.GRACE_S = 0.1
first, both = threading.Event(), []
def heard(number):
    both.append((number, threading.current_thread().name))
    first.set()
signals = JobSignals(is_open.is_set, ("SIGTERM", "SIGUSR1"), heard)
signals.take()

def during():
    threading.Event().wait(0.5)  # until the main thread is in the extension
    os.kill(os.getpid(), signal.SIGUSR1)
    print("in time", first.wait(5), both[0][1], flush=True)

threading.Thread(target=during).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 6_000_000)  # no signal interrupts it
hear(signal.SIGTERM)
threading.Event().wait(0.5)
print(json.dumps(sorted({number for number, _ in both})))
"""
    done = run(text)
    expected = "in time True outlast-notices\n[10, 15]\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_signals_of_children_are_no_notices() -> None:
    """Loader processes that torch ends, and processes that the script forks itself."""
    text = """
heard = []
signals = JobSignals(is_open.is_set, ("SIGTERM",), heard.append)
signals.take()
reading, writing = os.pipe()
for number in range(20):
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(writing, b".")
        while True:  # a signal just before a long sleep would be handled behind it
            time.sleep(0.01)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
threading.Event().wait(0.2)
print(heard)
"""
    done = run(text)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
