"""Parts of a hot spare: the watch over environment variables, and a rank that is not there yet."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from outlast.config import WHOLE_ENVIRONMENT, watch_environment
from outlast.worker.groups.unseated_group import PendingRank

RANK = 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names that were read while RANK was watched."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("OTHER", "2")
    found: list[str] = []
    end = watch_environment(frozenset({"RANK"}), found.append)
    yield found
    end()


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["RANK"],
        lambda: os.environ.get("RANK"),
        lambda: os.getenv("RANK"),
        lambda: os.environb[b"RANK"],
        lambda: "RANK" in os.environ,
        lambda: os.environ.setdefault("RANK", "0"),
    ],
)
def test_a_read_of_a_watched_variable_is_reported(reads: list[str], read: object) -> None:
    assert callable(read)
    read()
    assert set(reads) == {"RANK"}


@pytest.mark.parametrize(
    "read", [lambda: dict(os.environ), os.environ.copy, lambda: list(os.environ.items())]
)
def test_a_read_of_all_variables_is_reported_as_such(reads: list[str], read: object) -> None:
    assert callable(read)
    read()
    assert WHOLE_ENVIRONMENT in reads


def test_other_variables_are_read_and_written_freely(reads: list[str]) -> None:
    assert os.environ["OTHER"] == "2"
    os.environ["OTHER"] = "3"
    assert os.environ.get("MISSING_HERE") is None
    assert reads == []


def test_the_reader_may_end_the_watch_and_gets_what_was_set_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "before")
    monkeypatch.setenv("OTHER", "")
    monkeypatch.setenv("GONE", "")

    def take_seat(name: str) -> None:
        names.append(name)
        end()
        os.environ["RANK"] = "3"

    names: list[str] = []
    end = watch_environment(frozenset({"RANK"}), take_seat)
    os.environ["OTHER"] = "kept"
    del os.environ["GONE"]
    assert os.environ["RANK"] == "3"
    assert (os.environ["RANK"], os.environ["OTHER"], names) == ("3", "kept", ["RANK"])
    assert "GONE" not in os.environ and type(vars(os.environ)["_data"]) is dict


def pending() -> tuple[Any, list[str]]:
    waits: list[str] = []

    def wait(place: str) -> int:
        waits.append(place)
        return RANK

    return PendingRank(wait), waits


def test_a_sampler_is_made_without_a_rank_and_waits_when_it_is_read() -> None:
    rank, waits = pending()
    data: Any = range(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
    assert waits == []
    assert list(sampler) == [1, 3, 5, 7]
    assert waits


def test_every_other_use_of_a_pending_rank_waits() -> None:
    rank, _ = pending()
    assert (int(rank), range(4)[rank], f"{rank}", hash(rank)) == (1, 1, "1", hash(1))
    assert rank == 1 and rank != 0 and rank > 0 and rank >= 1 and rank < 2 and rank <= 1
    assert (rank + 1, 1 + rank, rank * 3, 3 * rank) == (2, 2, 3, 3)
    assert type(copy.deepcopy(rank)) is int
    assert (rank % 2, rank - 1, rank // 2, -rank, 1 - rank, 7 % rank) == (1, 0, 0, -1, 0, 0)
    assert (rank / 2, rank**2, ~rank, rank | 2, 4 ^ rank, 2 << rank) == (0.5, 1, -2, 3, 5, 4)
    assert (float(rank), rank.bit_length(), f"{rank:03d}", str(rank)) == (1.0, 1, "001", "1")
    assert isinstance(rank, int) and {1: "one"}[rank] == "one" and [3, 1].index(rank) == 1


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_pending_rank_is_true_and_false_as_a_number(is_zero: bool) -> None:
    rank = PendingRank(lambda _place: 0 if is_zero else 1)
    assert bool(rank) is not is_zero
