"""Pseudonyms: consistent, complete, and valid in host lists."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.fleet import host_lists
from outlast.fleet.lake import Lake, read_manifest
from outlast.fleet.pseudonyms import Pseudonyms, load_pseudonyms

WORD = st.text("ghijklmnqrstuvwxyz", min_size=6, max_size=12)
WHO = ("user", "account", "name", "partition", "qos", "cluster")
JOBS = "\n".join(
    ['rows = "jobs"', "[columns]"]
    + [f'{one} = "{one}"' for one in (*WHO, "job", "state", "end", "hosts", "failed_node")]
)
FINDINGS = """rows = "events"
[columns]
time = "end"
node = "failed_node"
detail = "name"
device = "device"
[constants]
symptom = "pcie"
severity = "now"
check = "probe"
"""


def ingest(*words: str | Path) -> int:
    return main(["fleet", "ingest", *map(str, words)])


def log(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys((*WHO, "host", "job"), WORD)), min_size=1,
             max_size=4),
    st.integers(1, 12),
)  # fmt: skip
def test_no_name_is_left_anywhere(
    tmp_path_factory: pytest.TempPathFactory, people: list[dict[str, str]], nodes: int
) -> None:
    path = tmp_path_factory.mktemp("names")
    rows = [
        {
            **one, "state": "FAILED", "end": f"2024-05-1{i % 10}", "device": f"/home/{one['user']}",
            "hosts": f"{one['host']}[01-{nodes:02d}]", "failed_node": f"{one['host']}01",
        }
        for i, one in enumerate(people)
    ]  # fmt: skip
    bad = {**rows[0], "state": f"lost by {rows[0]['user']}"}
    (path / "jobs.toml").write_text(JOBS)
    (path / "findings.toml").write_text(FINDINGS)
    lake, key = path / "lake", path / "key"
    for mapping in ("jobs.toml", "findings.toml"):
        copy = log(path / f"{people[0]['user']}-{mapping}l", [*rows, bad, {}])
        assert ingest(lake, copy, "--mapping", path / mapping, "--anonymize", key) == 0
    names = {one[key].lower() for one in people for key in one}
    tables = Lake.open(lake).tables()
    said = [str(file.relative_to(lake)) for file in lake.rglob("*")]
    said += [file.read_text() for file in lake.rglob("*.json*")]
    said += [frame.collect().write_ndjson() for frame in tables[:6]]
    text = "\n".join(said).lower()
    assert [name for name in names if name in text] == []
    raw = b"\n".join(file.read_bytes().lower() for file in lake.rglob("*") if file.is_file())
    assert [name for name in names if name.encode() in raw] == []
    jobs = tables.jobs.collect()
    assert [host_lists.count(one) for one in jobs["hosts"]] == [nodes] * jobs.height
    held = pl.col("failed_node").is_in(pl.col("hosts").str.split(","))
    assert jobs.filter(~held).is_empty()
    assert set(tables.findings.collect()["node"]) <= set(jobs["failed_node"])


def test_the_same_key_gives_the_same_names_later(tmp_path: Path) -> None:
    first = load_pseudonyms(tmp_path / "key", tmp_path / "lake")
    again = load_pseudonyms(tmp_path / "key", tmp_path / "lake")
    other = load_pseudonyms(tmp_path / "other", tmp_path / "lake")
    assert first.replaced("user", "ada") == again.replaced("user", "ada")
    assert first.replaced("user", "ada") != other.replaced("user", "ada")
    assert first.replaced("user", "ada") != first.replaced("account", "ada")
    assert (first.mark, first.mark == other.mark) == (again.mark, False)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_lake_has_names_of_one_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"end": "2024-05-17", "failed_node": "n1", "name": "", "device": ""}
    one, two = log(tmp_path / "1", [row]), log(tmp_path / "2", [{**row, "end": "2024-05-18"}])
    (tmp_path / "m.toml").write_text(FINDINGS)
    how = ("--mapping", tmp_path / "m.toml")
    plain, hidden = tmp_path / "plain", tmp_path / "hidden"
    assert ingest(plain, one, *how) == 0
    assert ingest(plain, two, *how, "--anonymize", tmp_path / "key") == 2
    assert "names as they are" in capsys.readouterr().err
    assert ingest(hidden, one, *how, "--anonymize", tmp_path / "key") == 0
    assert ingest(hidden, two, *how) == 2
    assert "another key replaced" in capsys.readouterr().err
    assert ingest(hidden, two, *how, "--anonymize", tmp_path / "key2") == 2
    assert ingest(hidden, two, *how, "--anonymize", tmp_path / "key") == 0
    assert Lake.open(hidden).tables().findings.collect()["node"].n_unique() == 1


def test_notes_on_missing_records_are_kept_with_pseudonyms(tmp_path: Path) -> None:
    """That each NODE_FAIL which was requeued is missing matters most to others."""
    header = "JobID|State|Start|End|Restarts\n"
    row = "1|COMPLETED|2024-05-17T00:00:00|2024-05-17T10:00:00|3\n"
    (tmp_path / "sacct").write_text(header + row)
    (tmp_path / "found.json").write_text('{"jobs": [], "errors": ["ask ada"]}')
    how = ("--anonymize", tmp_path / "key")
    assert ingest(tmp_path / "lake", tmp_path / "sacct", tmp_path / "found.json", *how) == 0
    manifest = read_manifest(tmp_path / "lake")
    assert manifest is not None
    notes = [note for source in manifest.sources for note in source.notes]
    assert any("without --duplicates: 3 earlier attempts" in note for note in notes)
    assert "sacct found no jobs" in notes and not any("ada" in note for note in notes)


def test_a_key_that_is_none_or_lies_in_the_lake_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    with pytest.raises(UsageError, match="is no key"):
        load_pseudonyms(tmp_path / "short", tmp_path / "lake")
    with pytest.raises(UsageError, match="lies in the lake"):
        load_pseudonyms(tmp_path / "lake" / "key", tmp_path / "lake")
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("name", ["0000:3b:00.0", "PCI:0000:3b:00", "mlx5_0/1", "GPU 3", "nvme0"])
def test_common_device_names_are_kept(name: str) -> None:
    names = Pseudonyms(b"k" * 32)
    frame = pl.DataFrame({
        "cluster": ["c", "c"], "node": ["n", "n"], "device": [name, "/home/ada"],
        "detail": ["a", "b"],
    })  # fmt: skip
    kept = names.table("findings", frame)
    assert kept["device"][0] == name and "ada" not in kept["device"][1]
    assert kept["detail"].to_list() == ["", ""]


def test_every_kind_of_record_has_its_names_replaced() -> None:
    """Records of runs had none, and a run could not be read with --anonymize."""
    from outlast.fleet.pseudonyms import _COLUMNS
    from outlast.fleet.record_tables import KIND_OF

    assert _COLUMNS.keys() == KIND_OF.keys()
    for kind, record in KIND_OF.items():
        named = {"cluster", "node", "job", "user", "hosts", "failed_node", "detail"}
        assert named & set(record.__struct_fields__) <= _COLUMNS[kind].keys(), kind


def test_a_name_with_a_domain_stays_one_of_the_short_name() -> None:
    """With other words for both, nobody could join n1 and n1.example.org."""
    import polars as pl

    from outlast.fleet.pseudonyms import Pseudonyms

    names = Pseudonyms(b"k" * 32)
    nodes = ["n1", "n1.example.org", "n1.example.net", "10.0.0.1"]
    told = names.table("outages", pl.DataFrame({"cluster": ["c"] * 4, "node": nodes,
                                                "detail": [""] * 4}))["node"].to_list()  # fmt: skip
    assert [one.partition(".")[0] == told[0] for one in told] == [True, True, True, False]
    assert len(set(told)) == 4 and not any("example" in one for one in told)
