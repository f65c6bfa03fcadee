"""Sharded jobs that lose ranks inside FSDP2's collectives, and while shards move."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner

from outlast import events

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "sharded_job.py"


def run(folder: Path, *flags: str, job: tuple[str, ...] = ()) -> Outcome:
    folder.mkdir()
    outcome = Runner(folder).run(*flags, job=job, script=JOB)
    assert outcome.code == 0, outcome.output
    assert "did not strike" not in outcome.output, outcome.output
    return outcome


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("sharded") / "undisturbed").ranks


def test_ranks_die_in_collectives_and_in_the_transfer_of_a_shard(
    tmp_path: Path, digests: list[dict[str, str]]
) -> None:
    outcome = run(
        tmp_path / "killed",
        "--spares=1",
        "--fault=kill:rank=2,phase=receive",
        job=("--die", "gather:1:3", "scatter:2:5", "gather:0:8"),
    )
    assert outcome.ranks == digests
    assert outcome.summary["committed_steps_lost"] == 0
    assert len(list((tmp_path / "killed").glob("died-*"))) == 3


@pytest.mark.long
def test_the_only_replica_of_a_shard_dies_while_it_sends(
    tmp_path: Path, digests: list[dict[str, str]]
) -> None:
    outcome = run(
        tmp_path / "killed",
        "--spares=1",
        "--checkpoint-every=3",
        "--fault=kill:phase=transfer",
        job=("--die", "scatter:1:5"),
    )
    assert outcome.ranks == digests
    assert 0 < outcome.summary["committed_steps_lost"] <= 3


@pytest.mark.extended
def test_a_shard_without_a_replica_is_rebuilt_from_keepers_memory(tmp_path: Path) -> None:
    flags = ("--spares=1", "--snapshot-every=1", "--copies=2")
    expected = run(tmp_path / "undisturbed", *flags, job=("--one-dimensional",)).ranks
    outcome = run(tmp_path / "killed", *flags, job=("--one-dimensional", "--die", "scatter:1:7"))
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] == 0
    decided = [e.rung for e in outcome.events if isinstance(e, events.Decided)]
    assert decided == ["rebuild"]
    seated = [e.worker for e in outcome.events if isinstance(e, events.WorkerSeated)]
    assert len(seated) == 5  # the first four, and one replacement: the others stayed


@pytest.mark.extended
def test_a_shard_that_the_loop_changes_after_its_copy_is_not_rebuilt_from_it(
    tmp_path: Path,
) -> None:
    """A write through `.data` passes over version counters, and no other shard changes."""
    flags = ("--spares=1", "--snapshot-every=1", "--copies=2")
    job = ("--one-dimensional", "--clamp", "1")
    expected = run(tmp_path / "undisturbed", *flags, job=job).ranks
    outcome = run(tmp_path / "killed", *flags, job=(*job, "--die", "scatter:1:7"))
    assert outcome.ranks == expected


@pytest.mark.extended
def test_a_shard_without_a_replica_comes_from_the_newest_copy(tmp_path: Path) -> None:
    expected = run(tmp_path / "undisturbed", job=("--one-dimensional",)).ranks
    outcome = run(
        tmp_path / "killed",
        "--checkpoint-every=3",
        job=("--one-dimensional", "--die", "scatter:1:7"),
    )
    assert outcome.ranks == expected
    assert outcome.summary["committed_steps_lost"] == 1
