"""`--fault` specifications: what to break, on which rank, at which step, in which phase.

    kill:rank=2,step=10,phase=backward     SIGKILL inside backward of step 10
    stop:rank=1,step=5                     SIGSTOP; `for=3` sends SIGCONT after 3 s
    raise:rank=0,step=7,phase=forward      an exception, once; `times=9` raises it nine times
    reset:rank=3,step=12                   the rank's own sockets to its peers are shut down
    hang:rank=1,step=8                     the main thread sleeps without end
    slow:rank=1,step=8,for=2               the main thread sleeps 2 s (1 s without `for`)
    slow:rank=1,step=20,factor=1.3         from step 20 on its own part of a step takes 1.3 times as
                                           long, in the worker that has the rank then
    full:step=10                           the next checkpoint write from there on fails: ENOSPC
    nan:rank=1,step=6                      the rank's gradients of one attempt are NaN
    nan:rank=1,step=6,cause=device         those of every attempt from there on in this process
    nan:rank=1,step=6,cause=data           those of every attempt at this step, wherever it runs
    oom:rank=1,step=6,times=2              an allocation fails, at two attempts
    flip:rank=1,step=6,tensor=model.0.*    one bit of a replicated tensor flips after the commit
    flip:rank=1,phase=reduced,bit=30       one bit of a gradient flips after its reduction
    flip:rank=1,phase=backward             one bit of a gradient flips before its reduction
    flip:rank=1,step=6,phase=backward,cause=device   likewise from step 6 on, in this process
    kill:spare=0                           the first spare, as soon as it is warm
    kill:random=3,steps=5-50               three kills at seeded places of steps 5 to 50
    kill:rank=1,after=30                   SIGKILL (or stop) 30 s after the start, in any script

`step=10` means: in the phase that would commit step 10 (the tenth step; steps count from 1); with
`between`, `eval` and `checkpoint`, what follows step 10. Without `step`: the first time. Without
`rank`: the first rank that reaches the place.
A fault fires once in a run unless `times` is larger, or it has a `factor`. It fires inside the
worker that has the seat, at exactly the named instruction. A fault with `after` is sent by the
launcher and works in any script.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from outlast.errors import ConfigError

Kind = Literal["kill", "stop", "raise", "reset", "hang", "slow", "full", "flip", "nan", "oom"]
Cause = Literal["once", "device", "data"]
Where = Literal[
    "setup",  # between init() and the first phase
    "forward",  # at the first collective or module call of the attempt
    "backward",  # inside autograd
    "reduced",  # all gradients are reduced, no vote is cast
    "vote",  # after this rank's vote is sent
    "apply",  # inside optimizer.step, some parameters changed
    "done",  # after the phase is complete, before `run` returns
    "committed",  # the same, of a step alone, before its audit
    "between",  # in the script's own code, after `run` has returned
    "eval",  # inside a phase without an optimizer
    "heal",  # after the generation closed, before the next one opens
    "transfer",  # in the middle of sending state
    "receive",  # in the middle of receiving state
    "checkpoint",  # while a checkpoint is written
]
_KINDS, _PLACES = get_args(Kind), get_args(Where)
_LEAST = {"rank": 0, "step": 1, "spare": 0, "times": 1, "random": 1, "bit": 0}
_WORDS = ("after", "cause", "factor", "for", "phase", "steps", "tensor")  # keys of other values
# Keys allowed beside the key that selects the form of a fault, and the kinds of the form.
_FORMS: dict[str, tuple[set[str], tuple[Kind, ...]]] = {
    "spare": ({"for"}, ("kill", "stop")),
    "after": ({"rank", "for"}, ("kill", "stop")),
    "random": ({"rank", "phase", "steps", "for"}, _KINDS),
    "cause": ({"rank", "step", "phase", "tensor", "bit"}, ("nan", "flip")),
    "factor": ({"rank", "step", "phase"}, ("slow",)),
    "tensor": ({"rank", "step", "phase", "times", "bit"}, ("flip",)),
    "bit": ({"rank", "step", "phase", "times"}, ("flip",)),
    "": ({"rank", "step", "phase", "times", "for"}, _KINDS),
}
_LASTING: tuple[Kind, ...] = ("stop", "slow")
_STEPS = (2, 20)
_DRAWN: dict[str, tuple[Where, ...]] = {
    "kill": ("forward", "backward", "vote", "apply", "done", "between"),
    "stop": ("forward", "backward", "vote"),
    "slow": ("forward",),
    "full": ("checkpoint",),
    "flip": ("committed",),
}
_USUALLY: dict[str, Where] = {"full": "checkpoint", "flip": "committed", "nan": "backward"}
_POISONED: tuple[Where, ...] = ("forward", "backward")  # what a model computes there


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed `--fault`."""

    text: str
    kind: Kind
    rank: int = -1  # -1: the first rank that reaches the place fires it
    step: int = -1
    where: Where = "forward"
    spare: int = -1
    times: int = 1
    for_s: float = 0.0
    factor: float = 0.0  # of slow: how many times as long a step takes from then on; 0: once
    after_s: float = 0.0
    random: int = 0
    cause: Cause = "once"  # of nan
    tensor: str = "*"  # tensor that flip changes: its name in audits, with * and ?
    bit: int = 0  # that flip changes, in the order of the tensor's memory
    steps: tuple[int, int] = _STEPS  # that `random` draws from
    places: tuple[Where, ...] = ()  # likewise

    def marker(self, count: int) -> str:
        """Return the name of the file that records firing number `count`, counted from 0."""
        return f"{hashlib.sha256(self.text.encode()).hexdigest()[:16]}-{count}"


def parse(text: str) -> FaultSpec:
    """Return one specification. Raises ConfigError with the wrong part and what is allowed."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise ConfigError(f"--fault {text!r}: unknown kind {kind!r} (known: {', '.join(_KINDS)})")
    fields: dict[str, object] = {"where": _USUALLY.get(kind, "forward")}
    keys: set[str] = set()
    for part in filter(None, rest.split(",")):
        key, found, value = part.partition("=")
        try:
            if not found:
                raise ValueError(f"{part!r} is not key=value")
            if key in keys:
                raise ValueError(f"{key} is given twice")
            fields.update(_read(key, value))
        except ValueError as error:
            raise ConfigError(f"--fault {text!r}: {error}") from None
        keys.add(key)
    if wrong := _contradiction(kind, keys, fields):
        raise ConfigError(f"--fault {text!r}: {wrong}")
    drawn_from = _DRAWN.get(kind, ("forward", "backward"))
    places = (fields["where"],) if "phase" in keys else drawn_from
    return msgspec.convert({"text": text, "kind": kind, "places": places, **fields}, FaultSpec)


def _read(key: str, value: str) -> dict[str, object]:
    """Return the field that `key=value` sets. Raises ValueError with what is allowed."""
    if key == "phase":
        if value not in _PLACES:
            raise ValueError(f"unknown phase {value!r} (known: {', '.join(_PLACES)})")
        return {"where": value}
    if key == "tensor":
        return {"tensor": value}
    if key == "cause":
        if value not in get_args(Cause):
            raise ValueError(f"unknown cause {value!r} (known: {', '.join(get_args(Cause))})")
        return {"cause": value}
    if key in ("for", "after"):
        seconds = float(_number(value, float))
        if not 0 < seconds < math.inf:
            raise ValueError(f"{key}={value} must be seconds above zero")
        return {f"{key}_s": seconds}
    if key == "factor":
        factor = float(_number(value, float))
        if not 1 < factor < math.inf:
            raise ValueError(f"factor={value} must be above 1")
        return {"factor": factor}
    if key == "steps":
        first, last = (int(_number(part, int)) for part in value.partition("-")[::2])
        if not 1 <= first <= last:
            raise ValueError(f"steps={value} must be FIRST-LAST, from 1 on")
        return {"steps": (first, last)}
    if key not in _LEAST:
        known = ", ".join(sorted([*_LEAST, *_WORDS]))
        raise ValueError(f"unknown key {key!r} (known: {known})")
    number = _number(value, int)
    if number < _LEAST[key]:
        raise ValueError(f"{key}={value} must be at least {_LEAST[key]}")
    return {key: number}


def _number(text: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def _contradiction(kind: str, keys: set[str], fields: dict[str, object]) -> str:
    """Return the parts of a specification that contradict each other; "" if none do."""
    form = next((key for key in _FORMS if key in keys), "")
    beside, kinds = _FORMS[form]
    if kind not in kinds:
        return f"{form} is only for {', '.join(kinds)}"
    if others := sorted(keys - beside - {form}):
        allowed = ", ".join(sorted(beside))
        return f"{', '.join(others)} is not allowed with {form or kind} (allowed: {allowed})"
    if "for" in keys and kind not in _LASTING:
        return f"for is only for {', '.join(_LASTING)}"
    if kind == "nan" and fields["where"] not in _POISONED:
        return f"nan is only for phase={' and phase='.join(_POISONED)}, where a model computes"
    if kind == "flip" and "cause" in keys and fields["where"] != "backward":
        return "a flip with a cause needs phase=backward, which a redo computes again"
    if kind == "nan" and (others := sorted(keys & {"tensor", "bit"})):
        return f"{', '.join(others)} is only for flip"
    if kind == "full" and fields["where"] != "checkpoint":
        return "full needs phase=checkpoint, where a checkpoint is written"
    return ""


def expand(spec: FaultSpec, world: int, spares: int, seed: int) -> list[FaultSpec]:
    """Return the concrete faults of `world` ranks: `random=K` becomes K, drawn from `seed`.

    Raises ConfigError for a rank or a spare that the run does not have."""
    if spec.rank >= world:
        raise ConfigError(f"--fault {spec.text!r}: this run has the ranks 0 to {world - 1}")
    if spec.spare >= spares:
        has = f"the spares 0 to {spares - 1}" if spares else "no spare (--spares)"
        raise ConfigError(f"--fault {spec.text!r}: this run has {has}")
    if not spec.random:
        return [spec]
    dice = random.Random(f"{seed}:{spec.text}")
    ranks = [spec.rank] if spec.rank >= 0 else range(world)
    first, last = spec.steps
    room = len(ranks) * len(spec.places) * (last - first + 1)
    if spec.random > room:
        raise ConfigError(f"--fault {spec.text!r}: only {room} places to draw from")
    lasts = f",for={spec.for_s!r}" if spec.for_s else ""
    drawn: dict[str, None] = {}
    while len(drawn) < spec.random:
        rank = dice.choice(ranks)
        step = dice.randint(first, last)
        where = dice.choice(spec.places)
        drawn[f"{spec.kind}:rank={rank},step={step},phase={where}{lasts}"] = None
    return [parse(text) for text in drawn]
