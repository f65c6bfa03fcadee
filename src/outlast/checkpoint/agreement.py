"""What ranks tell each other before they divide tensors: one exchange whenever a plan changes.

Ranks with equal tables of plain tensors are taken for each other's replicas (which tells pipeline
stages apart). Ranks that are to divide boxes must agree on them, and on a sample of their values:
what differs by rank is neither a replica nor a shard, and is refused, not mixed. Parameters are
sampled even where they are too small to be divided: one rank's would stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch
import xxhash

from outlast.checkpoint.plan import WHOLE_BYTES, Held, Share, divide
from outlast.checkpoint.tree import raw
from outlast.errors import GroupError, UsageError

Exchange = Callable[[bytes], list[bytes]]
_SAMPLES = 4  # about as many a dimension: enough to tell what is no replica
_NAMES_MAX = 5  # names in a message


class Plan(NamedTuple):
    """`held`: with the holders of plain tensors filled in. `shares`: what this rank writes.
    `digest`: of everything that all ranks hold; equal on all of them."""

    held: tuple[Held, ...]
    shares: tuple[Share, ...]
    digest: str


class _Set(msgspec.Struct, frozen=True, array_like=True):
    """Boxes that the same ranks hold, as one of these sees them. `holders`: how many there must
    be; 0 for plain tensors, of which nobody knows."""

    holders: int
    boxes: bytes
    values: bytes


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """One rank's message. `plain`: the key of its plain tensors among `sets`."""

    error: str = ""
    everything: bytes = b""
    plain: bytes = b""
    sets: dict[bytes, _Set] = {}


def agree(
    held: Iterable[Held],
    sources: Mapping[str, torch.Tensor],
    *,
    rank: int,
    world: int,
    exchange: Exchange,
) -> Plan:
    """The plan of this rank; every rank of the job calls this (or `refuse`) at the same save.

    `exchange` gives all ranks' messages, in order of rank, and has a deadline of its own. Raises
    UsageError on all ranks when replicas contradict each other or a rank refused.
    """
    held = list(held)
    plain = _digest(_line(item) for item in held if not item.holders)
    sets: dict[bytes, list[Held]] = {plain: []}
    for item in held:
        if len(item.holders) != 1:
            key = _digest([str(item.holders)]) if item.holders else plain
            sets.setdefault(key, []).append(item)
    message = _Said(
        error=_strangers(held, rank, world),
        everything=_digest(map(_line, held)),
        plain=plain,
        sets={key: _seen(items, sources) for key, items in sets.items()},
    )
    messages = exchange(msgspec.msgpack.encode(message))
    said = [msgspec.msgpack.decode(each, type=_Said) for each in messages]
    if len(said) != world or said[rank] != message:
        raise UsageError(
            f"exchange gave rank {rank} {len(said)} messages that are not the {world} ranks' in"
            " order; nothing was saved"
        )
    _check_errors(said)
    disputed = _disputed(said)
    if disputed:
        raise _conflict(sets.get(disputed, []), sources, exchange)
    replicas = tuple(other for other in range(world) if said[other].plain == plain)
    held = [item if item.holders else item._replace(holders=replicas) for item in held]
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(messages))
    return Plan(tuple(held), tuple(divide(held, rank)), digest)


def refuse(error: str, exchange: Exchange) -> None:
    """Take part in the exchange with an error instead of a table, so that no rank waits."""
    with suppress(GroupError):  # nobody waits: what is wrong here is what counts
        exchange(msgspec.msgpack.encode(_Said(error=error)))


def _check_errors(said: list[_Said]) -> None:
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(said) if each.error]
    if errors:
        raise UsageError("; ".join(errors))


def _strangers(held: list[Held], rank: int, world: int) -> str:
    """Why meshes and this job do not speak of the same ranks, if so."""
    for item in held:
        if item.holders and (rank not in item.holders or item.holders[-1] >= world):
            return (
                f"{item.name} lies on rank {item.holders[-1]} of its mesh, where rank {rank} of"
                f" {world} saves it; nothing was saved; save with all ranks of torch.distributed"
            )
    return ""


def _seen(items: list[Held], sources: Mapping[str, torch.Tensor]) -> _Set:
    values = _digest(_sample(item, sources[item.name]) for item in items)
    count = len(items[0].holders) if items else 0
    return _Set(count, _digest(map(_line, items)), values)


def _disputed(said: list[_Said]) -> bytes | None:
    """The first set that its holders do not see alike. All ranks find the same one."""
    seen: dict[bytes, list[_Set]] = {}
    for each in said:
        for key, items in each.sets.items():
            seen.setdefault(key, []).append(items)
    for key, views in seen.items():
        missing = views[0].holders and len(views) != views[0].holders
        if missing or any(view != views[0] for view in views):
            return key
    return None


def _conflict(
    items: list[Held], sources: Mapping[str, torch.Tensor], exchange: Exchange
) -> UsageError:
    """What to raise: who holds what differently. All ranks come here together."""
    mine = {item.name: _digest([_line(item), _sample(item, sources[item.name])]) for item in items}
    answers = exchange(msgspec.msgpack.encode(mine))
    tables = [msgspec.msgpack.decode(each, type=dict[str, bytes]) for each in answers]
    ranks = [rank for rank, table in enumerate(tables) if table]
    names = sorted({name for table in tables for name in table})
    differing = [name for name in names if len({tables[rank].get(name) for rank in ranks}) > 1]
    more = f" and {len(differing) - _NAMES_MAX} more" if len(differing) > _NAMES_MAX else ""
    return UsageError(
        f"ranks {', '.join(map(str, ranks))} are replicas by the names, shapes and placements of"
        f" their tensors, but do not hold the same: {', '.join(differing[:_NAMES_MAX])}{more};"
        " nothing was saved; give what differs by rank names that differ by rank"
    )


def _line(item: Held) -> str:
    return f"{item.name!r} {item.dtype} {item.shape} {item.box.start} {item.box.size}"


def _digest(parts: Iterable[str | bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def _sample(item: Held, tensor: torch.Tensor) -> memoryview | bytes:
    """Some of the values that must be equal; of small tensors that are no parameters none."""
    if item.size_bytes < WHOLE_BYTES and not isinstance(tensor, torch.nn.Parameter):
        return b""
    steps = tuple(slice(None, None, max(1, length // _SAMPLES)) for length in tensor.shape)
    return raw(tensor.detach()[steps].resolve_conj().resolve_neg().contiguous())
