"""sacct records torn by line breaks and delimiters in their fields."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.whole_log import read_whole

from outlast.fleet.formats import sacct
from outlast.fleet.formats.log_reading import ReadTotals, Reject

HEADER = "JobID|JobName|State|Start|End|Comment|NNodes|SubmitLine"


def line(job: int, name: str = "train", comment: str = "", submit: str = "sbatch run.sh") -> str:
    middle = "FAILED|2024-05-17T10:00:00|2024-05-17T11:00:00"
    return f"{job}|{name}|{middle}|{comment}|1|{submit}"


def read(
    folder: Path, text: str, block_bytes: int = 1 << 20
) -> tuple[list, list[Reject], ReadTotals]:
    """Jobs and their names; rejects."""
    path = folder / "sacct.txt"
    path.write_text(f"{HEADER}\n{text}\n")
    reading = sacct.read_sacct(path, sacct.SacctOptions(block_bytes=block_bytes))
    part = read_whole(reading)
    rows = part.tables["jobs"].select("job", "name").rows() if part.tables else []
    return rows, part.rejects, reading.totals


@pytest.mark.parametrize(
    ("torn", "name"),
    [
        (line(2, submit="sbatch --wrap 'a\nb || c\n\nd'"), "train"),
        (line(2, comment="one\ntwo"), "train"),
        (line(2, name="x\ny"), "x y"),
        (line(2, name="a|b"), "a|b"),
        (line(2, name="a||b|"), "a||b|"),
        (line(2, submit="cat x | tee y || exit"), "train"),
        (line(2, comment="[p100|v100]", submit="a | b"), "train"),
        (line(2, name="a|b", comment="c\nd", submit="e\nf|g\nh"), "a|b"),
        (line(2, comment="c|d\ne"), "train"),
    ],
)
def test_a_record_that_can_be_put_together_in_one_way_is(
    tmp_path: Path, torn: str, name: str
) -> None:
    rows, rejects, totals = read(tmp_path, "\n".join([line(1), torn, line(3)]))
    assert rows == [("1", "train"), ("2", name), ("3", "train")]
    assert (rejects, totals.rows) == ([], 3)
    assert totals.odd == {"records put together from several lines": 1}


@pytest.mark.parametrize(
    ("torn", "reasons"),
    [
        (["4|train|FAILED"], ["too few fields"]),
        (["4|train|FAILED", "5|train"], ["too few fields"] * 2),
        # enough fields together, but the break would be in a time
        (
            ["4|train|FAILED|2024-05-17T10:00", ":00|2024-05-17T11:00:00||1|x"],
            ["too few fields"] * 2,
        ),
        ([line(4).replace("FAILED", "FAI|LED")], ["too many fields"]),
        (["sacct: error: slurmdbd: lost"], ["a message of sacct"]),
    ],
)
def test_unrepairable_records_are_rejected_line_by_line(
    tmp_path: Path, torn: list[str], reasons: list[str]
) -> None:
    rows, rejects, totals = read(tmp_path, "\n".join([line(1), *torn, line(3)]))
    assert [job for job, _ in rows] == ["1", "3"]
    assert [(one.line, one.text) for one in rejects] == list(enumerate(torn, 3))
    assert all(one.reason.startswith(why) for one, why in zip(rejects, reasons, strict=True))
    assert totals.rows == 2 + len(torn)


def test_a_log_that_was_cut_off_loses_its_last_row_alone(tmp_path: Path) -> None:
    rows, rejects, _ = read(tmp_path, f"{line(1)}\n{line(2)[:30]}")
    assert rows == [("1", "train")]
    assert [(one.line, one.text) for one in rejects] == [(3, line(2)[:30])]


wild = st.text(st.sampled_from("ab |\n"), max_size=8).map(str.strip)


@settings(max_examples=15)
@given(st.lists(wild, min_size=1, max_size=6), st.integers(200, 900))
def test_wild_comments_never_lose_a_job(
    tmp_path_factory: pytest.TempPathFactory, comments: list[str], block_bytes: int
) -> None:
    """Only one column is wild here, so there is always one way to put a record together."""
    text = "\n".join(line(job, comment=comment) for job, comment in enumerate(comments))
    rows, rejects, _ = read(tmp_path_factory.mktemp("wild"), text, block_bytes)
    assert [job for job, _ in rows] == [str(job) for job in range(len(comments))]
    assert rejects == []
