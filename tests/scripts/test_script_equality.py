"""Scripts of the catalogue: equal to plain torchrun, or refused by name at the start."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scripts.plain_ranks import PlainRanks
from tests.scripts.script_catalogue import IN_THE_SUITE, Script, read_catalogue
from tests.scripts.script_runs import (
    Digests,
    assert_refused,
    differences,
    digests_of_run,
    reference_key,
    run_outlast,
    run_plainly,
    run_under_torchrun,
    summary_of,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(700)]
SINGLE_FAULTS = ("kill", "stop", "raise")


def _cases() -> list[object]:
    return [case for script in read_catalogue() for case in _cases_of(script)]


def _cases_of(script: Script) -> Iterator[object]:
    for way in script.ways():
        marks = []
        if way in SINGLE_FAULTS:
            marks.append(pytest.mark.long)
        elif script.name not in IN_THE_SUITE:
            marks.append(pytest.mark.catalogue)
        if script.unmeasured:
            marks.append(pytest.mark.xfail(reason=script.unmeasured, strict=False))
        elif item := script.unmended_item(way):
            marks.append(pytest.mark.xfail(reason=item, strict=way not in SINGLE_FAULTS))
        yield pytest.param(script, way, id=f"{script.name}-{way}", marks=marks)


@pytest.fixture(scope="session")
def plain_ranks() -> Iterator[PlainRanks]:
    ranks = PlainRanks()
    yield ranks
    ranks.close()


def reference(
    script: Script, cache: pytest.Cache, tmp_path: Path, plain_ranks: PlainRanks
) -> Digests:
    """Digests on plain ranks, made once for all ways and kept while nothing changes them."""
    path = cache.mkdir("scripts") / f"{script.name}-{reference_key(script)}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(run_plainly(script, tmp_path / "plain", plain_ranks)))
        return json.loads(path.read_text())


@pytest.mark.parametrize(("script", "way"), _cases())
def test_a_script_is_equal_to_plain_torchrun_or_refused(
    script: Script,
    way: str,
    tmp_path: Path,
    plain_ranks: PlainRanks,
    request: pytest.FixtureRequest,
    record_property: pytest.RecordProperty,
) -> None:
    for name, value in (("script", script.name), ("kind", script.kind), ("way", way)):
        record_property(name, value)
    expected = reference(script, request.config.cache, tmp_path, plain_ranks)
    faults = script.faults(way)
    ended = run_outlast(script, tmp_path / "outlast", *faults)
    if script.refused:
        assert_refused(script, ended)
        record_property("holds", f"refused: {script.refused}")
        return
    assert ended.code == 0, f"exit code {ended.code} with {faults}\n{ended.output}"
    assert "did not strike" not in ended.output, ended.output
    wrong = differences(digests_of_run(ended, script.ranks), expected)
    assert wrong == [], "\n".join([f"with {faults}", *wrong, ended.output])
    incidents = summary_of(ended)["incidents"]
    assert bool(incidents) == bool(faults), f"{len(incidents)} incidents\n{ended.output}"
    assert "corruption" not in str(summary_of(ended)["notes"]), ended.output
    record_property("holds", "equal")


@pytest.mark.long
@pytest.mark.parametrize("script", read_catalogue(), ids=lambda script: script.name)
def test_plain_ranks_are_those_of_torchrun(
    script: Script, tmp_path: Path, plain_ranks: PlainRanks, request: pytest.FixtureRequest
) -> None:
    expected = reference(script, request.config.cache, tmp_path, plain_ranks)
    assert differences(run_under_torchrun(script, tmp_path / "torchrun"), expected) == []
