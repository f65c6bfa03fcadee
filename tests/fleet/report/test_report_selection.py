"""Reports and rates of one partition, and of jobs above a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.main import main
from outlast.errors import EXIT_USAGE

WINDOW = ("--since=2024-06-01", "--until=2024-06-07")
PARTITION_COLUMN = "Partition"


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A lake of two partitions, and one of the jobs of the first alone."""
    root = tmp_path_factory.mktemp("lakes")
    logs = root / "logs"
    flags = ("--shape=rsc1", "--days=6", "--nodes=48", "--seed=4")
    assert main(["fleet", "synth", str(logs), *flags]) == 0
    header, *lines = (logs / "sacct.txt").read_text().splitlines()
    at = header.split("|").index(PARTITION_COLUMN)
    rows = [line.split("|") for line in lines]
    rows = [row for row in rows if row[0].isdecimal() and len(row) == header.count("|") + 1]
    for row in rows:  # jobs of both partitions share the nodes
        row[at] = "odd" if int(row[0]) % 2 else "even"
    others = [path for path in sorted(logs.iterdir()) if path.suffix in (".jsonl", ".csv")]
    found = []
    for name, wanted in (("both", ("odd", "even")), ("one", ("odd",))):
        sacct = logs / f"{name}.txt"
        kept = ["|".join(row) for row in rows if row[at] in wanted]
        sacct.write_text("\n".join([header, *kept, ""]))
        assert main(["fleet", "ingest", str(root / name), *map(str, [sacct, *others])]) == 0
        found.append(root / name)
    return found[0], found[1]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["fleet", *words, "--json", *WINDOW]) == 0
    return json.loads(capsys.readouterr().out, parse_float=lambda text: f"{float(text):.9g}")


@pytest.mark.parametrize("command", ["report", "fit"])
def test_a_partition_is_as_a_log_of_it_alone(
    command: str, lakes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    both, one = (
        answer(capsys, command, str(lakes[0]), "--partition=odd", "--above-gpus=16"),
        answer(capsys, command, str(lakes[1]), "--above-gpus=16"),
    )
    notes = [note for note in both.pop("notes") if note not in one["notes"]]
    assert any("only jobs of partition odd" in note for note in notes)
    for each in (both, one):
        for name in ("notes", "source"):
            each.pop(name, None)
    assert both == one
    assert both != answer(capsys, command, str(lakes[0]), "--above-gpus=16")


def test_a_size_is_of_the_failure_rate(
    lakes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for above in (0, 16):
        found = answer(capsys, "report", str(lakes[0]), f"--above-gpus={above}")
        rate = next(one for one in found["headlines"] if one["key"] == "r_f")
        assert f"of jobs above {above} GPUs" in rate["rests_on"]
        (mttf,) = (one for one in found["sections"] if one["key"] == "mttf")
        assert f"of jobs above {above} GPUs to each size" in mttf["said"]
        texts.append(rate["rests_on"])
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--partition=x<y", "no job of it is in the window, which has even, odd"),
        ("--partition=", "no job of it is in the window"),
        ("--above-gpus=-1", "--above-gpus -1: give a number of GPUs from 0"),
        ("--above-gpus=999999999999", "give a number of GPUs from 0"),
    ],
)
@pytest.mark.parametrize("command", ["report", "fit"])
def test_impossible_selections_are_refused(
    command: str,
    flag: str,
    why: str,
    lakes: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fleet", command, str(lakes[0]), "--json", *WINDOW, flag]) == EXIT_USAGE
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
