"""Rule for replays: who replays whose batch, and which rank is wrong where the results differ.

A *contribution* is what a rank gives to the reductions of a phase. In a round each rank computes
the contribution of its own batch (`first` of a subject) and that of the rank before it in its ring
(`first` of a witness). Where these differ, a jury computes the subject's once more (`second`):

| second results | wrong | outcome |
|---|---|---|
| all equal | whose first result was another | transient |
| more than half are equal | the others | lasting if also wrong the first time, else transient |
| two ranks, each repeats its own | one of them | pair: nobody is blamed |
| anything else | unknown | unrepeatable: nobody is blamed |

A wrong rank that has never given an equal result cannot be told from code that depends on the
rank: the outcome is *unproved*, and nobody is blamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

BLOCK = 32  # ranks among which batches are exchanged: a block of the control tree
JURY_MAX = 5
CONTRIBUTIONS = "contributions"  # kind of what is compared, as audits name it
FIRST_STEP = 2  # replayed first: it proves that a function can be replayed

ReplayOutcome = Literal["transient", "lasting", "pair", "unproved", "unrepeatable"]


class ReplayStanding(msgspec.Struct, frozen=True, array_like=True):
    """Knowledge that all ranks of a generation have alike: the phase and step of the newest round,
    and functions that are not replayed any more."""

    n: int = -1
    step: int = 0
    without: tuple[str, ...] = ()


class ReplayWord(msgspec.Struct, frozen=True, array_like=True):
    """Word of one rank before a round. `unfit`: why it takes no part, "" if it does. `is_proved`:
    it was in an equal replay of this function before. `since_n`: complete phases at the newest
    round in which its ring was equal; -1: none."""

    rank: int
    replica_set: bytes
    host: str
    unfit: str = ""
    is_proved: bool = False
    since_n: int = -1
    since_step: int = -1


class ReplayResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one rank in a round: digests of its own contribution, and of the one that it
    replayed; b"" for none. `unfit`: why it could not replay that."""

    rank: int
    own: bytes = b""
    replayed: bytes = b""
    unfit: str = ""


class ReplayVerdict(msgspec.Struct, frozen=True):
    """Verdict of a jury. `digests`: of each juror, the result that counts."""

    outcome: ReplayOutcome
    wrong: tuple[int, ...]
    digests: dict[int, bytes]


def rings(words: Iterable[ReplayWord]) -> list[tuple[int, ...]]:
    """Return the rings of ranks, in each of which a rank replays the one before it.

    A ring has replicas of one block; neighbours are on different hosts where that is possible.
    """
    members: dict[tuple[int, bytes], dict[str, list[int]]] = {}
    for word in sorted(words, key=lambda word: word.rank):
        if not word.unfit:
            hosts = members.setdefault((word.rank // BLOCK, word.replica_set), {})
            hosts.setdefault(word.host, []).append(word.rank)
    found = []
    for hosts in members.values():
        longest = max(map(len, hosts.values()))
        places = [(place, host) for place in range(longest) for host in hosts]
        ring = [hosts[host][place] for place, host in places if place < len(hosts[host])]
        if len(ring) > 1:
            found.append(tuple(ring))
    return found


def ring_of(rank: int, found: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ring of a rank, from this rank on; () for none."""
    for ring in found:
        if rank in ring:
            at = ring.index(rank)
            return ring[at:] + ring[:at]
    return ()


def disputed(ring: Sequence[int], results: Mapping[int, ReplayResult]) -> int:
    """Return the rank whose contribution its witness did not get; -1 if all are equal. A rank that
    differs both as a subject and as a witness comes first, since it is the common one."""
    wrong = [
        subject
        for at, subject in enumerate(ring)
        if results[subject].own != results[ring[(at + 1) % len(ring)]].replayed
    ]
    both = [rank for rank in wrong if ring[ring.index(rank) - 1] in wrong]
    return (both or wrong or [-1])[0]


def jury(ring: Sequence[int], subject: int) -> tuple[int, ...]:
    """Return the ranks that compute a disputed contribution again: the subject, its witness, and
    others."""
    at = ring.index(subject)
    return tuple((*ring[at:], *ring[:at])[:JURY_MAX])


def decide(
    jurors: Sequence[int],
    first: Mapping[int, bytes],
    second: Mapping[int, bytes],
    proved: Collection[int],
) -> ReplayVerdict:
    """Return the verdict. `first`: results of the subject and its witness in the round; `second`:
    of all jurors; b"" for a juror that could not compute it."""
    counts = Counter(second.values())
    right, votes = counts.most_common(1)[0]
    if not right or 2 * votes <= len(jurors):
        repeats = all(first[rank] == second[rank] for rank in first)
        outcome: ReplayOutcome = "pair" if len(jurors) == 2 and repeats else "unrepeatable"
        return ReplayVerdict(outcome, tuple(sorted(first)), {**second})
    if votes == len(jurors):
        digests = {**second, **first}
        wrong = tuple(sorted(rank for rank in first if first[rank] != right))
        outcome = "transient"
    else:
        digests = {**second}
        wrong = tuple(sorted(rank for rank in jurors if second[rank] != right))
        was_wrong = all(first.get(rank, right) != right for rank in wrong)
        outcome = "lasting" if was_wrong else "transient"
    if len(wrong) > max(1, (len(jurors) - 1) // 2):  # no majority is left to compare with
        return ReplayVerdict("unrepeatable", wrong, {**second})
    if not set(wrong) <= set(proved):
        return ReplayVerdict("unproved", wrong, digests)
    return ReplayVerdict(outcome, wrong, digests)


def describe(verdict: ReplayVerdict, jurors: Sequence[int], step: int) -> str:
    """Return why nobody is blamed for a difference."""
    among = ", ".join(map(str, sorted(jurors)))
    text = f"the batch of rank {jurors[0]} in step {step} gives other contributions"
    if verdict.outcome == "pair":
        return f"{text} on rank {jurors[0]} than on rank {jurors[1]}, and two have no majority"
    if verdict.outcome == "unproved":
        wrong = ", ".join(map(str, verdict.wrong))
        return (
            f"{text} on ranks {wrong} than on the others of {among}, and was never equal before:"
            " code that depends on the rank, or a device that was wrong from the start"
        )
    return (
        f"{text} on ranks {among}, without a majority: code that depends on the rank, data that it"
        " draws itself, or kernels that do not repeat"
    )
