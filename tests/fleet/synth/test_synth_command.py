"""`outlast fleet synth`: written logs are read back unchanged."""

import signal
from pathlib import Path
from types import FrameType

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import outlast
from outlast.cli.fleet.log_commands import SynthReport, synth
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, StorageError, UsageError
from outlast.fleet.formats.format_detection import LogOptions
from outlast.fleet.ingestion import ingest
from outlast.fleet.lake import Lake
from outlast.fleet.record_tables import Tables
from outlast.fleet.synth.synthetic_cluster import GroundTruth, make_cluster, write_files

OWN = str(Path(outlast.__file__).parent)
LISTED = ("findings", "outages", "repairs", "nodes", "checks")


@pytest.fixture(scope="module")
def made() -> tuple[Tables, GroundTruth]:
    return make_cluster("rsc2", 4, seed=5, nodes=256)


@pytest.fixture(scope="module")
def site(made: tuple[Tables, GroundTruth], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "site"
    write_files(*made, folder)
    return folder


def test_written_logs_can_be_ingested(
    made: tuple[Tables, GroundTruth], site: Path, tmp_path: Path
) -> None:
    tables, truth = made
    lake = tmp_path / "lake"
    done = ingest(lake, [site / "sacct.txt"], LogOptions(), None)
    assert not any(one.source.rejects for one in done.read)
    for log in ("health.jsonl", "nodes.csv", "repairs.csv", "outages.csv", "checks.csv"):
        mapping = (site / log).with_suffix(".toml")
        done = ingest(lake, [site / log], LogOptions(mapping=mapping), None)
        assert not any(one.source.rejects for one in done.read)
    found = Lake.open(lake).tables(truth.since_ns, truth.until_ns + 1)
    keys = ["job", "attempt"]
    assert_frame_equal(found.jobs.collect().sort(keys), tables.jobs.collect().sort(keys))
    for name in LISTED:
        mine, theirs = getattr(tables, name).collect(), getattr(found, name).collect()
        order = ["t_ns", *(column for column in mine.columns if column != "t_ns")]
        assert len(mine) > 0
        assert_frame_equal(theirs.sort(order), mine.sort(order))


def test_accounting_is_as_awkward_as_it_is(site: Path) -> None:
    lines = (site / "sacct.txt").read_text().splitlines()
    columns = lines[0].count("|")
    assert any(line.count("|") > columns for line in lines)
    assert any("|CANCELLED by 5" in line for line in lines)
    assert any("|Unknown|" in line and "|RUNNING|" in line for line in lines)
    assert any(".batch|batch|" in line for line in lines)
    assert any("--exclude=rsc2-" in line for line in lines)


def test_the_truth_is_beside_it(made: tuple[Tables, GroundTruth], site: Path) -> None:
    assert msgspec.json.decode((site / "truth.json").read_bytes(), type=GroundTruth) == made[1]


def test_the_output_directory_appears_complete_or_not_at_all(
    made: tuple[Tables, GroundTruth], tmp_path: Path
) -> None:
    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_files(*made, tmp_path / "site", stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="is no directory"):
        write_files(*made, tmp_path / "missing" / "site")
    blocked = tmp_path / ("n" * 250)  # its draft has a name that is too long
    with pytest.raises(StorageError, match="nothing was kept"):
        write_files(*made, blocked)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    with pytest.raises(UsageError, match="nothing was overwritten"):
        synth(tmp_path)
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [kept]


def test_the_command_reports_files_and_truth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site"
    assert synth(site, days=1, nodes=64, seed=2, json=True) == EXIT_DONE
    said = msgspec.json.decode(capsys.readouterr().out, type=SynthReport)
    assert said.files == sorted(path.name for path in site.iterdir())
    tables, truth = make_cluster("rsc1", 1, 2, 64)
    assert said.jobs == tables.jobs.select(pl.len()).collect().item()
    assert said.truth["r_f"] == truth.r_f
    assert said.truth["lemons"] == len(truth.lemons)
    assert synth(tmp_path / "again", days=1, nodes=64, seed=2) == EXIT_DONE
    assert "true failure rate" in capsys.readouterr().out
    for path in site.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_ctrl_c_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if frame is None or OWN not in frame.f_code.co_filename:  # callbacks drop all exceptions
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)  # months of a large cluster take much longer
        assert synth(tmp_path / "site", days=300) == EXIT_INTERRUPTED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
