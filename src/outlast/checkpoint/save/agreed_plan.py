"""The plan of a save that all ranks agree on: one exchange whenever it changes.

Ranks with equal tables of plain tensors count as replicas (which separates pipeline stages). Ranks
that divide boxes must agree on them, and on a sample of their values: values that differ by rank
are neither a replica nor a shard, and are refused, not mixed. The same holds for values that are no
tensors, and for tensors of one name on ranks with other tables or meshes: if there are any, all
ranks compare names in a second exchange. Shared values are compared again at every save
(value_samples.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch
import xxhash

from outlast.checkpoint.save.shard_plan import HeldBox, LocalTensor, ShardShare, divide_boxes
from outlast.checkpoint.save.staging import ArenaLayout
from outlast.checkpoint.save.value_samples import SharedHolders, digests_of
from outlast.errors import GroupError, UsageError

Exchange = Callable[[bytes], list[bytes]]
VALUES = "values"  # prefix of keys of values that are no tensors
_NAMES_MAX = 5  # names in a message


class SavePlan(NamedTuple):
    """The agreed plan of one rank's saves.

    `held`: with the holders of plain tensors filled in. `shares`: the elements that this rank
    writes. `digest`: of all ranks' tables; equal on all of them. `shared_holders`: the holders of
    tensors and values that this rank shares with others.
    """

    boxes: tuple[HeldBox, ...]
    shares: tuple[ShardShare, ...]
    digest: str
    shared_holders: tuple[SharedHolders, ...] = ()


class PlannedSave(NamedTuple):
    """The present plan, valid as long as the table and the names of values stay the same.

    The `layout` is valid only as long as parameters of these names are `frozen`.
    """

    table: dict[str, LocalTensor]
    plan: SavePlan
    layout: ArenaLayout
    values: frozenset[str]
    frozen: frozenset[str]


class _SharedBoxes(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of the same holders, as one of them sees them.

    `holders`: the number of holders; 0 for plain tensors, where it is unknown.
    """

    holders: int
    boxes: bytes
    values: bytes


class _RankStatement(msgspec.Struct, frozen=True, array_like=True):
    """One rank's message.

    `plain`: the key of its plain tensors among `sets`. `meshes`: a digest of the ranks of its
    tensors' meshes. `values`: digests by name.
    """

    error: str = ""
    everything: bytes = b""
    plain: bytes = b""
    sets: dict[bytes, _SharedBoxes] = {}
    meshes: bytes = b""
    values: dict[str, bytes] = {}


class _NamedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as one rank has it. `sample`: empty where it may differ by rank."""

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    sample: bytes


def agree(
    boxes: Iterable[HeldBox],
    sources: Mapping[str, torch.Tensor],
    *,
    rank: int,
    world: int,
    exchange: Exchange,
    rank_specific: Collection[str] = (),
    values: Mapping[str, bytes] | None = None,
) -> SavePlan:
    """Return the plan of this rank; every rank calls this (or `refuse`) at the same save.

    `exchange` returns all ranks' messages, in order of rank, and has a deadline of its own.
    `rank_specific`: names of tensors that may differ by rank, since each rank saves its own, too.
    `values`: digests of values that are no tensors. Raises UsageError on all ranks when replicas
    contradict each other or a rank refused.
    """
    boxes = list(boxes)
    digests = _digests(boxes, sources, rank, world, rank_specific)
    plain = _digest(_line(item) for item in boxes if not item.holders)
    sets: dict[bytes, list[HeldBox]] = {plain: []}
    for item in boxes:
        if len(item.holders) != 1:
            key = _digest([str(item.holders)]) if item.holders else plain
            sets.setdefault(key, []).append(item)
    message = _RankStatement(
        error=_check_meshes(boxes, rank, world),
        everything=_digest(map(_line, boxes)),
        plain=plain,
        sets={key: _shared_boxes(items, digests) for key, items in sets.items()},
        meshes=_digest(sorted({str(item.mesh) for item in boxes if item.holders})),
        values=dict(values or {}),
    )
    messages = exchange(msgspec.msgpack.encode(message))
    statements = [msgspec.msgpack.decode(message, type=_RankStatement) for message in messages]
    if len(statements) != world or statements[rank] != message:
        raise UsageError(
            f"exchange gave rank {rank} {len(statements)} messages that are not the {world} ranks'"
            " in order; nothing was saved"
        )
    _check_errors(statements)
    disputed = _find_conflict(statements)
    if disputed:
        raise _conflict(sets.get(disputed, []), digests, exchange)
    _check_values(statements)
    replicas = tuple(other for other in range(world) if statements[other].plain == plain)
    boxes = [item if item.holders else item._replace(holders=replicas) for item in boxes]
    holders = {item.name: item.holders for item in boxes}
    if len({(statement.plain, statement.meshes) for statement in statements}) > 1:
        alone = {i.name: sources[i.name] for i in boxes if not digests[i.name] and world > 1}
        compared = {name: t for name, t in alone.items() if name not in rank_specific}
        samples = digests | digests_of(compared, 0)
        holders = _holders_by_name(boxes, samples, exchange)
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(messages))
    shared = _shared_tensors(boxes, holders, rank_specific) + _shared_values(statements, rank)
    return SavePlan(tuple(boxes), tuple(divide_boxes(boxes, rank)), digest, tuple(shared))


def refuse(error: str, exchange: Exchange) -> None:
    """Send an error instead of a table in the exchange, so that no rank waits."""
    with suppress(GroupError):  # the caller raises this rank's error
        exchange(msgspec.msgpack.encode(_RankStatement(error=error)))


def _check_errors(statements: list[_RankStatement]) -> None:
    errors = [
        f"rank {rank}: {statement.error}"
        for rank, statement in enumerate(statements)
        if statement.error
    ]
    if errors:
        raise UsageError("; ".join(errors))


def _check_meshes(boxes: list[HeldBox], rank: int, world: int) -> str:
    """Return an error where meshes include ranks outside of this job; "" for none."""
    for item in boxes:
        if item.holders and (rank not in item.holders or item.holders[-1] >= world):
            return (
                f"{item.name} lies on rank {item.holders[-1]} of its mesh, where rank {rank} of"
                f" {world} saves it; nothing was saved; save with all ranks of torch.distributed"
            )
    return ""


def _digests(
    boxes: list[HeldBox],
    sources: Mapping[str, torch.Tensor],
    rank: int,
    world: int,
    rank_specific: Collection[str],
) -> dict[str, bytes]:
    """Return a sample of all tensors that must be equal on other ranks; b"" of others."""
    if world == 1:
        return dict.fromkeys((item.name for item in boxes), b"")
    alone = (rank,)
    looked_at = [i.name for i in boxes if i.name not in rank_specific and i.holders != alone]
    sampled = digests_of({name: sources[name] for name in looked_at}, 0)
    return {item.name: sampled.get(item.name, b"") for item in boxes}


def _shared_boxes(items: list[HeldBox], digests: Mapping[str, bytes]) -> _SharedBoxes:
    values = _digest(digests[item.name] for item in items)
    count = len(items[0].holders) if items else 0
    return _SharedBoxes(count, _digest(map(_line, items)), values)


def _find_conflict(statements: list[_RankStatement]) -> bytes | None:
    """Return the first set on which its holders disagree, the same on all ranks; or None."""
    views_by_key: dict[bytes, list[_SharedBoxes]] = {}
    for statement in statements:
        for key, items in statement.sets.items():
            views_by_key.setdefault(key, []).append(items)
    for key, views in views_by_key.items():
        missing = views[0].holders and len(views) != views[0].holders
        if missing or any(view != views[0] for view in views):
            return key
    return None


def _conflict(items: list[HeldBox], digests: Mapping[str, bytes], exchange: Exchange) -> UsageError:
    """Return the error that names the tensors that differ. All ranks call it together."""
    mine = {item.name: _digest([_line(item), digests[item.name]]) for item in items}
    answers = exchange(msgspec.msgpack.encode(mine))
    tables = [msgspec.msgpack.decode(answer, type=dict[str, bytes]) for answer in answers]
    ranks = [rank for rank, table in enumerate(tables) if table]
    names = sorted({name for table in tables for name in table})
    differing = [name for name in names if len({tables[rank].get(name) for rank in ranks}) > 1]
    return UsageError(
        f"ranks {', '.join(map(str, ranks))} are replicas by the names, shapes and placements of"
        f" their tensors, but do not hold the same: {brief(differing)};"
        " nothing was saved; give what differs by rank names that differ by rank, or save it as"
        " this rank's own"
    )


def _check_values(statements: list[_RankStatement]) -> None:
    by_name: dict[str, set[bytes]] = {}
    for statement in statements:
        for name, digest in statement.values.items():
            by_name.setdefault(name, set()).add(digest)
    differing = [name for name, digests in by_name.items() if len(digests) > 1]
    if differing:
        raise UsageError(
            "values that are no tensors differ by rank, and only rank 0's would be saved:"
            f" {brief(differing)}; nothing was saved; pass values of one rank alone in own={{...}}"
        )


def _holders_by_name(
    boxes: list[HeldBox], digests: Mapping[str, bytes], exchange: Exchange
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold the same box, by name, across tables and meshes.

    Raises UsageError on all ranks where samples or types differ.
    """
    table = {
        item.name: _NamedTensor(
            str(item.dtype), item.shape, item.box.start, item.box.size, digests[item.name]
        )
        for item in boxes
    }
    answers = exchange(msgspec.msgpack.encode(table))
    by_name: dict[str, dict[int, _NamedTensor]] = {}
    for other, answer in enumerate(answers):
        for name, named in msgspec.msgpack.decode(answer, type=dict[str, _NamedTensor]).items():
            by_name.setdefault(name, {})[other] = named
    wrong = [
        f"{name} ({why})"
        for name in sorted(by_name)
        if (why := _describe_difference(by_name[name]))
    ]
    if wrong:
        raise UsageError(
            f"ranks hold tensors of one name that are not the same: {brief(wrong)}; nothing was"
            " saved; give what differs by rank names that differ by rank (a stage's number, say)"
        )

    def same(name: str) -> tuple[int, ...]:
        box = table[name].start, table[name].size
        return tuple(r for r, each in by_name[name].items() if (each.start, each.size) == box)

    return {item.name: same(item.name) for item in boxes}


def _describe_difference(named: Mapping[int, _NamedTensor]) -> str:
    """Return why these cannot be parts of one tensor; "" where they can."""
    first, one = next(iter(named.items()))
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, bytes]] = {}
    for rank, each in named.items():
        if (each.dtype, each.shape) != (one.dtype, one.shape):
            return f"{one.dtype} {one.shape} on rank {first}, {each.dtype} {each.shape} on {rank}"
        holder, sample = boxes.setdefault((each.start, each.size), (rank, each.sample))
        if sample != each.sample:
            return f"ranks {holder} and {rank} differ"
    if sum(math.prod(size) for _, size in boxes) > math.prod(one.shape):
        return f"ranks {', '.join(map(str, named))} hold pieces that overlap"
    return ""


def _shared_tensors(
    boxes: list[HeldBox], holders: Mapping[str, tuple[int, ...]], rank_specific: Collection[str]
) -> list[SharedHolders]:
    together: dict[tuple[int, ...], list[HeldBox]] = {}
    for item in boxes:
        if len(holders[item.name]) > 1 and item.name not in rank_specific and item.size_bytes:
            together.setdefault(holders[item.name], []).append(item)
    return [
        SharedHolders(
            _digest([str(ranks), *map(_line, items)]).hex(), ranks, tuple(i.name for i in items)
        )
        for ranks, items in together.items()
    ]


def _shared_values(statements: Sequence[_RankStatement], rank: int) -> list[SharedHolders]:
    together: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(statements[rank].values):
        ranks = tuple(
            other for other, statement in enumerate(statements) if name in statement.values
        )
        if len(ranks) > 1:
            together.setdefault(ranks, []).append(name)
    return [
        SharedHolders(f"{VALUES} {ranks}", ranks, tuple(names)) for ranks, names in together.items()
    ]


def brief(names: Sequence[str]) -> str:
    """Return the first few of many names."""
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return f"{', '.join(names[:_NAMES_MAX])}{more}"


def _line(item: HeldBox) -> str:
    return f"{item.name!r} {item.dtype} {item.shape} {item.box.start} {item.box.size}"


def _digest(parts: Iterable[str | bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()
