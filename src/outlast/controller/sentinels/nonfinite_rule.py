"""Rule for a gradient that is not finite: what all ranks do next.

Each rank gives its word at the vote of such a phase; all ranks get all words, and come to the same
decision. `tries` counts the attempts at the phase that ended so, on the rank that counts most:

| tries before | decision |
|---|---|
| 0 | rerun: the same batch, state and random numbers, on the same device |
| 1, and some but not all ranks brought it | move: these ranks go on on other devices |
| 1 or 2 | the data or the model: skip the batch (--nan skip:K), else stop |

After a skipped batch the next one is not moved: a device has just been ruled out.

What the script handles itself (a GradScaler's skipped step, cleaned gradients, a masked loss) is
accepted after one attempt in place, whatever that gives: only a transient error ends by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from outlast.errors import UsageError

NonFiniteCourse = Literal["rerun", "move", "skip", "apply", "stop", "accept"]
SKIPS_MAX = 10**6
NO_STEP = "no optimizer has stepped, as one has before"  # what a script handles may only show so


class NanPolicy(msgspec.Struct, frozen=True):
    """Parsed `--nan`. `reruns`: before anything else. `skips_max`: batches in a row that may be
    skipped. `is_default`: the flag was not given, and an optimizer with a `step` of its own, which
    may handle such gradients, decides by itself in the end."""

    watches: bool = True
    reruns: bool = True
    skips_max: int = 0
    is_default: bool = False


def parse_nan(text: str) -> NanPolicy:
    """Return the policy of `--nan`; "" is the default. Raises UsageError with what is possible."""
    known = {
        "": NanPolicy(is_default=True),
        "rerun": NanPolicy(),
        "stop": NanPolicy(reruns=False),
        "off": NanPolicy(watches=False),
    }
    if text in known:
        return known[text]
    number = re.fullmatch(r"skip:([0-9]{1,9})", text)
    if number is None or not 1 <= int(number[1]) <= SKIPS_MAX:
        raise UsageError(
            f"--nan {text}: give rerun, stop, off, or skip: and how many batches in a row may be"
            f" skipped, from 1 to {SKIPS_MAX}, as in --nan skip:3; nothing was started"
        )
    return NanPolicy(skips_max=int(number[1]))


class NonFiniteWord(msgspec.Struct, frozen=True, array_like=True):
    """One rank's word on its attempt. `found`: its gradient that is not finite. `is_own`: its own
    contribution is not finite, before the reduction over ranks, by `evidence`. `course`: already
    decided for this phase. `skipped`: batches in a row before it. `is_custom`: its optimizer has a
    `step` of its own. `places` that had it, and ranks that were `moved`, which a new worker does
    not know by itself. `handled`: what was not finite, though the gradients of the step are, or
    there is no step. `is_accepted`: the phase is run again for such a number, and counts then."""

    tries: int = 0
    found: str = ""
    is_own: bool = False
    evidence: str = ""
    course: Literal["", "skip", "apply"] = ""
    skipped: int = 0
    is_custom: bool = False
    worker: str = ""
    host: str = ""
    device: str = ""
    places: tuple[str, ...] = ()
    moved: tuple[int, ...] = ()
    backward: int = 0
    handled: str = ""
    is_accepted: bool = False

    @property
    def place(self) -> str:
        """Place of the rank's computation: `GPU 2 of node-7 (w1-2)`."""
        return f"{self.device} of {self.host} ({self.worker})"


class NonFiniteDecision(msgspec.Struct, frozen=True):
    """Decision of all ranks. `tries`: attempts that ended so, with this one. `culprits`: ranks that
    brought it. `skipped`: batches in a row before this one."""

    course: NonFiniteCourse
    tries: int
    skipped: int
    culprits: tuple[int, ...]
    reporter: int  # rank that reports it
    detail: str


def decide(words: Mapping[int, NonFiniteWord], policy: NanPolicy) -> NonFiniteDecision | None:
    """Return the decision by the words of all present ranks; None if no gradient is concerned."""
    found = {seat: word for seat, word in words.items() if word.found}
    decided = {word.course for word in words.values()} - {""}
    if not (found or decided):
        return _accept(words)
    tries = max(word.tries for word in words.values())
    skipped = max(word.skipped for word in words.values())
    culprits = tuple(sorted(_brought(found)))
    if decided:
        course: NonFiniteCourse = "skip" if "skip" in decided else "apply"
        tries -= 1  # the decision stands, and a rank that joined learns it
    else:
        is_elsewhere = 0 < len(culprits) < len(words) and not skipped
        course = _course(policy, tries, skipped, is_elsewhere=is_elsewhere, words=found)
    reporter = min(culprits or found or words)
    return NonFiniteDecision(course, tries + 1, skipped, culprits, reporter, _detail(words))


def _accept(words: Mapping[int, NonFiniteWord]) -> NonFiniteDecision | None:
    """Return the decision on what the script handles itself; None if there is nothing."""
    handled = {seat: word for seat, word in words.items() if word.handled}
    if not handled:
        return None
    culprits = tuple(sorted(_brought(handled)))
    reporter = min(culprits or handled)
    return NonFiniteDecision("accept", 1, 0, culprits, reporter, _detail(words))


def _brought(found: Mapping[int, NonFiniteWord]) -> dict[int, NonFiniteWord]:
    """Return the ranks whose own contribution was not finite, before any other's."""
    own = {seat: word for seat, word in found.items() if word.is_own}
    first = min((word.backward for word in own.values()), default=0)
    return {seat: word for seat, word in own.items() if word.backward == first}


def _course(
    policy: NanPolicy,
    tries: int,
    skipped: int,
    *,
    is_elsewhere: bool,
    words: Mapping[int, NonFiniteWord],
) -> NonFiniteCourse:
    if policy.reruns and tries == 0:
        return "rerun"
    if policy.reruns and tries == 1 and is_elsewhere:
        return "move"
    if policy.is_default and any(word.is_custom for word in words.values()):
        return "apply"
    return "skip" if skipped < policy.skips_max else "stop"


def _detail(words: Mapping[int, NonFiniteWord]) -> str:
    """Return what is not finite, where, and which ranks brought it."""
    whats = {seat: word.found or word.handled for seat, word in words.items()}
    found = {seat: word for seat, word in words.items() if whats[seat]}
    if not found:
        return ""
    names = dict.fromkeys(whats[seat] for seat in found)
    if set(names) == {NO_STEP}:
        return NO_STEP
    where = "every rank" if len(found) == len(words) > 1 else ranks(found)
    own = _brought(found)
    names.pop(NO_STEP, None)
    text = f"the {next(iter(names))} is not finite on {where}"
    if len(words) == 1:
        return text + (f" ({found[min(found)].evidence})" if found[min(found)].evidence else "")
    if not own:
        return f"{text}; which rank brought it is unknown"
    if len(own) == len(words):
        return f"{text}, by the own contribution of each"
    evidence = own[min(own)].evidence
    return f"{text}; {ranks(own)} brought it{f' ({evidence})' if evidence else ''}"


def ranks(seats: Mapping[int, object] | tuple[int, ...]) -> str:
    """Format ranks: `rank 1`, `ranks 1, 3`."""
    listed = ", ".join(map(str, sorted(seats)))
    return f"rank {listed}" if len(seats) == 1 else f"ranks {listed}"


NEXT = {
    "rerun": "the step is run again in place",
    "move": "the same again, so that another device is tried",
    "skip": "the batch is skipped",
    "apply": "the optimizer steps",
    "stop": "the run stops",
    "accept": "the step is run again in place, and counts",
}


def advice(policy: NanPolicy) -> str:
    """Return what to do after a stop."""
    if policy.skips_max:
        return "; look at these batches, or at the model"
    return "; look at the batch, or at the model, or skip such batches with --nan skip:K"
