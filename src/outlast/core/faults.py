"""`--fault` specifications: what to break, on which rank, at which step, in which phase.

    kill:rank=2,step=10,phase=backward     SIGKILL inside backward of step 10
    stop:rank=1,step=5                     SIGSTOP; `for=3` sends SIGCONT after 3 s
    raise:rank=0,step=7,phase=forward      an exception, once; `times=9` raises it nine times
    reset:rank=3,step=12                   the rank's own sockets to its peers are shut down
    hang:rank=1,step=8                     the main thread sleeps for ever
    slow:rank=1,step=8,for=2               the main thread sleeps 2 s
    full:step=10                           the next checkpoint write fails with ENOSPC
    kill:spare=0                           the first spare, as soon as it is warm
    kill:random=3                          three kills at seeded places

`step=10` means: in the phase that would commit step 10 (the tenth step; steps count from 1).
A fault fires once in the run's life unless `times` says more; it fires in the worker that holds the
seat, so that it needs no help from outside and hits the very instruction that it names.
"""

from __future__ import annotations

import random
from typing import Literal, get_args

import msgspec

from outlast.errors import ConfigError

Kind = Literal["kill", "stop", "raise", "reset", "hang", "slow", "full"]
Where = Literal[
    "setup",  # between init() and the first phase
    "forward",  # at the first collective or module call of the attempt
    "backward",  # inside autograd
    "vote",  # after this rank's yes is on its way
    "apply",  # inside optimizer.step, some parameters changed
    "done",  # after the phase is complete, before `run` returns
    "between",  # in the script's own code, after `run` has returned
    "eval",  # inside a phase without an optimizer
    "heal",  # after the generation closed, before the next one opens
    "transfer",  # in the middle of sending state
    "receive",  # in the middle of receiving state
    "checkpoint",  # while a checkpoint is written
]
_KINDS, _PLACES = get_args(Kind), get_args(Where)
_NUMBERS = {"rank", "step", "spare", "times", "random", "generation"}


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed `--fault`."""

    text: str
    kind: Kind
    rank: int = -1  # -1: any rank may fire it, the first one that comes by does
    step: int = -1
    where: Where = "forward"
    spare: int = -1
    generation: int = -1
    times: int = 1
    for_s: float = 0.0
    random: int = 0


def parse(text: str) -> FaultSpec:
    """One specification. Raises ConfigError naming the part that is wrong."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise ConfigError(f"--fault {text!r}: {kind!r} is none of {', '.join(_KINDS)}")
    fields: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, found, value = part.partition("=")
        if not found:
            raise ConfigError(f"--fault {text!r}: {part!r} is not key=value")
        if key == "phase":
            if value not in _PLACES:
                raise ConfigError(f"--fault {text!r}: phase {value!r} is none of {_PLACES}")
            fields["where"] = value
        elif key in _NUMBERS or key == "for":
            try:
                fields["for_s" if key == "for" else key] = (
                    float(value) if key == "for" else int(value)
                )
            except ValueError:
                raise ConfigError(f"--fault {text!r}: {value!r} is not a number") from None
        else:
            known = ", ".join(sorted([*_NUMBERS, "for", "phase"]))
            raise ConfigError(f"--fault {text!r}: unknown key {key!r} (known: {known})")
    return msgspec.convert({"text": text, "kind": kind, **fields}, FaultSpec)


def expand(spec: FaultSpec, world: int, steps: tuple[int, int], seed: int) -> list[FaultSpec]:
    """`random=K` becomes K concrete faults, drawn from `seed`; anything else stays as it is."""
    if not spec.random:
        return [spec]
    dice = random.Random(f"{seed}:{spec.text}")
    places: tuple[Where, ...] = ("forward", "backward", "vote", "apply", "done", "between")
    drawn = []
    for _ in range(spec.random):
        rank, step, where = dice.randrange(world), dice.randint(*steps), dice.choice(places)
        text = f"{spec.kind}:rank={rank},step={step},phase={where}"
        drawn.append(
            FaultSpec(
                text=text, kind=spec.kind, rank=rank, step=step, where=where, for_s=spec.for_s
            )
        )
    return drawn
