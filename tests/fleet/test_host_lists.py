"""Host lists: expansion, order and refusals."""

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import UsageError
from outlast.fleet import host_lists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("gpu7", ["gpu7"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("a[0-1][3,5]", ["a0" + "3", "a05", "a13", "a15"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("r[1-2]n[01-02]-x,c[3]", ["r1n01-x", "r1n02-x", "r2n01-x", "r2n02-x", "c3"]),
        ("cpn-f13-03-[01-02],cpn-f13-04-[01-02]",
         ["cpn-f13-03-01", "cpn-f13-03-02", "cpn-f13-04-01", "cpn-f13-04-02"]),
        ("d09n08s[01-02],d13n[03,05,07-08,16]",
         ["d09n08s01", "d09n08s02", "d13n03", "d13n05", "d13n07", "d13n08", "d13n16"]),
        ("n1,n1", ["n1", "n1"]),
        ("n1,", ["n1"]),
        ("[1-2]", ["1", "2"]),
    ],
)  # fmt: skip
def test_expands(text: str, names: list[str]) -> None:
    assert host_lists.expand(text) == names
    assert host_lists.count(text) == len(names)
    assert _by_columns([text]) == {(text, name) for name in names}
    assert host_lists.count_hosts(pl.Series([text])).to_list() == [len(names)]


@pytest.mark.parametrize(
    "text",
    ["node[1-3", "node1-3]", "node[a-b]", "node[]", "node[5-3]", "node[1-2-3]", "a b",
     "node[[1-2]]", "node[1,,2]", "node[-1]", "node[1-3]]", ",,a", "a[1-2]b[3-x]"],
)  # fmt: skip
def test_refuses_invalid_lists(text: str) -> None:
    with pytest.raises(UsageError, match="is no host list"):
        host_lists.expand(text)
    with pytest.raises(UsageError, match="is no host list"):
        host_lists.count(text)
    with pytest.raises(UsageError, match="is no host list"):
        host_lists.expand_distinct(pl.Series([text]))
    assert host_lists.count_hosts(pl.Series(["a", text, "", text])).to_list() == [1, None, 0, None]


@pytest.mark.parametrize(
    "text",
    [
        "n[0-999999999999]",
        "n[" + ",".join(["0-999999999999999998"] * 19) + "]",
        "n[1-9999][1-9999]",
        "a[1-140000],b[1-140000]",
    ],
)
def test_refuses_more_hosts_than_any_cluster_has(text: str) -> None:
    for asked in (
        host_lists.expand,
        host_lists.count,
        lambda one: host_lists.expand_distinct(pl.Series([one])),
    ):
        with pytest.raises(UsageError, match="over 262,144 hosts"):
            asked(text)
    assert host_lists.count_hosts(pl.Series([text])).to_list() == [None]


names = st.from_regex(r"[a-z]([a-z0-9.-]{0,4}[a-z-])?[0-9]{0,3}", fullmatch=True)


@settings(max_examples=60)
@given(st.sets(names, max_size=30))
def test_compressing_is_undone_by_expanding(found: set[str]) -> None:
    text = host_lists.compress(found)
    assert sorted(host_lists.expand(text)) == sorted(found)
    assert host_lists.count(text) == len(found)
    assert host_lists.compress(host_lists.expand(text)) == text


def test_compresses_as_slurm_writes() -> None:
    names = [f"node{n:04d}" for n in (*range(201, 273), 281)] + ["gpu", "n9", "n10"]
    assert host_lists.compress(names) == "gpu,n[9-10],node[0201-0272,0281]"
    assert host_lists.compress(["n7"]) == "n7"
    assert host_lists.compress(["n09", "n10", "n010"]) == "n[09-10],n010"
    with pytest.raises(UsageError, match="no name of a host"):
        host_lists.compress(["a,b"])


ranges = st.builds(
    lambda low, more, width: f"{low:0{width}d}" + (f"-{low + more:0{width}d}" if more else ""),
    st.integers(0, 120), st.integers(0, 12), st.integers(1, 4),
)  # fmt: skip
brackets = st.lists(ranges, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
items = st.builds(
    lambda parts, end: "".join(parts) + end,
    st.lists(st.one_of(names, brackets), min_size=1, max_size=3), st.sampled_from(["", "-ib", "x"]),
)  # fmt: skip


@settings(max_examples=20)
@given(st.lists(st.lists(items, min_size=1, max_size=4).map(",".join), max_size=6))
def test_columns_expand_as_single_lists_do(lists: list[str]) -> None:
    told = {(text, name) for text in lists for name in host_lists.expand(text)}
    assert _by_columns(lists) == told
    for text in lists:
        assert host_lists.count(text) == len(host_lists.expand(text))


def test_every_job_is_joined_with_its_nodes() -> None:
    jobs = pl.LazyFrame({"job": ["1", "2", "3", "4"], "hosts": ["n[1-2]", "", "n[1-2]", "m"]})
    rows = host_lists.explode_hosts(jobs).select("job", "node").collect().sort("job", "node").rows()
    assert rows == [("1", "n1"), ("1", "n2"), ("3", "n1"), ("3", "n2"), ("4", "m")]


def _by_columns(lists: list[str]) -> set[tuple[str, str]]:
    jobs = pl.LazyFrame({"hosts": lists}, schema={"hosts": pl.String})
    table = host_lists.explode_hosts(jobs).collect()
    assert table.height == sum(host_lists.count(text) for text in lists)
    return set(table.select("hosts", "node").rows())
