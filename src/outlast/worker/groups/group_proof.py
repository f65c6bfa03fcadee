"""Test of torch's process groups before a job runs: collectives, wake-up and refusal.

Two registries of one process form a generation of two ranks over loopback. They run a few
collectives with known results, from Python and from C++, and then sever the generation during
another one. This takes some milliseconds and runs once per host, before generation 1.

No object of the test may be left to the garbage collector. A process that the script forks could
collect gloo's objects, whose threads it does not have.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions

from outlast.errors import GroupProofError, StepRefused
from outlast.transport import messages
from outlast.transport.rendezvous_messages import MeetingRelay
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.inner_group import WAIT_TIMED_OUT, is_transport_error
from outlast.worker.groups.rendezvous import Mailbox
from outlast.worker.groups.stable_group import StableGroup

TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # docs/torch-versions.md lists what ran on each
PROOF_S = 30.0


def warn_if_untried(version: str) -> None:
    """Warn of a torch release, by name, that Outlast was never run on."""
    release = ".".join(version.split(".")[:2])
    if release not in TRIED:
        warnings.warn(
            f"Outlast is untested on torch {version} (tested: {TRIED[0]} to {TRIED[-1]}); each run"
            " verifies its process groups at the start, and nothing else",
            stacklevel=2,
        )


def prove_groups(timeout_s: float = PROOF_S) -> None:
    """Check that groups on this torch behave as recovery needs. Raises GroupProofError."""
    registries: list[GroupRegistry] = []
    meetings = MeetingRelay()
    for rank in range(2):
        registries.append(_registry(rank, registries, meetings, timeout_s))
    try:
        groups = _on_both(registries, _connect, timeout_s)
        _on_both(groups, _run_collectives, timeout_s)
        _sever(registries, groups, timeout_s)
    except GroupProofError:
        raise
    except Exception as error:
        # Any error of an unknown torch release must end the run with one message.
        raise _failure(f"raised {type(error).__name__}: {error}") from error
    finally:
        for registry in registries:
            registry.shutdown()
        registries.clear()


def _registry(
    rank: int, registries: list[GroupRegistry], meetings: MeetingRelay, timeout_s: float
) -> GroupRegistry:
    def publish(body: messages.Put | messages.Meet) -> None:
        for other, answer in meetings.relay(rank, body):
            registries[other].deliver(answer)

    return GroupRegistry(
        mailbox=Mailbox(publish),
        on_trouble=lambda _: None,
        on_collective=lambda _: None,
        timeout_s=timeout_s,
        copy_s=timeout_s,
    )


def _on_both(items: list[Any], task: Callable[[int, list[Any]], Any], timeout_s: float) -> list:
    """Run a task for each rank in a thread of its own; raise the first error."""
    results: list[Future[Any]] = [Future(), Future()]

    def run(rank: int) -> None:
        try:
            results[rank].set_result(task(rank, items))
        except BaseException as error:
            results[rank].set_exception(error)  # raised again below, in the caller's thread
            if not isinstance(error, Exception | StepRefused):
                raise

    threads = [
        threading.Thread(target=run, args=(rank,), name="outlast-proof", daemon=True)
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    wait(results, timeout_s, FIRST_EXCEPTION)  # after an error, the other rank may wait for ever
    for result in results:
        if result.done() and (error := result.exception()) is not None:
            raise error
    if not all(result.done() for result in results):
        raise _failure(f"did not end within {timeout_s:.0f} s")
    return [result.result() for result in results]


def _connect(rank: int, registries: list[GroupRegistry]) -> StableGroup:
    registry = registries[rank]
    registry.take_seat(rank, 2, dry=False)
    registry.connect(1, PROOF_S)
    return registry.adopt("proof", (0, 1), rank, 2)


def _run_collectives(rank: int, groups: list[StableGroup]) -> None:
    group, registry = groups[rank], groups[rank].registry

    def floats(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device="cpu")

    total = floats(1, 2, 3) * (rank + 1)
    group.allreduce([total], AllreduceOptions()).wait()
    _expect("all_reduce", total, floats(3, 6, 9))
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    sent = floats(5, 7) * rank
    group.broadcast([sent], options).wait()
    _expect("broadcast", sent, floats(5, 7))
    part = floats(0, 0)
    group.reduce_scatter_single(part, floats(1, 2, 3, 4) * (rank + 1)).wait()
    _expect("reduce_scatter", part, floats(3, 6) if rank == 0 else floats(9, 12))
    buffer = floats(11) * (1 - rank)  # from C++, as DDP broadcasts its buffers
    dist._broadcast_coalesced(group, [buffer], 1024, 0)  # noqa: SLF001 # pyright: ignore[reportPrivateImportUsage]
    _expect("a broadcast from C++", buffer, floats(11))
    if not registry.vote("proof"):
        raise _failure("lost a vote that both ranks won")
    if (gathered := registry.gather_bytes(bytes([rank]))) != [b"\0", b"\1"]:
        raise _failure(f"gathered {gathered} instead of one byte of each rank")


def _sever(registries: list[GroupRegistry], groups: list[StableGroup], timeout_s: float) -> None:
    """Sever both ranks while rank 0 waits in an all-reduce that rank 1 never enters."""
    tensor = torch.ones(2, dtype=torch.float32, device="cpu")
    work = groups[0].allreduce([tensor], AllreduceOptions())
    for registry in registries:
        registry.sever(1)
    try:
        work.wait(timedelta(seconds=timeout_s / 2))  # the operation itself ends at timeout_s
    except RuntimeError as error:
        if str(error).strip() == WAIT_TIMED_OUT or not is_transport_error(error):
            raise _failure(f"did not wake from a severed collective: {error}") from error
    else:
        raise _failure("completed a collective that one rank never entered")
    try:
        groups[0].allreduce([tensor], AllreduceOptions())
    except StepRefused:
        return
    raise _failure("ran a collective of a closed generation")


def _expect(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(result, expected):
        raise _failure(f"gave {result.tolist()} for {name}, not {expected.tolist()}")


def _failure(what: str) -> GroupProofError:
    return GroupProofError(
        f"process groups on torch {torch.__version__} failed their proof: torch {what}; no step"
        f" was run; install a release that Outlast was run on ({TRIED[0]} to {TRIED[-1]})"
    )
