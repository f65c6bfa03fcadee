"""Host lists as Slurm, PBS and LSF write them: `node[0201-0272,0281],gpu7`.

Brackets expand from left to right, the last one fastest, and a bound with leading zeros (`[08-11]`)
pads its whole range. A list names at most HOSTS_MAX hosts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import polars as pl

from outlast.errors import UsageError

HOSTS_MAX = 262_144  # more than any cluster has: larger lists are damaged or malicious

_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,18})")

_SEVERAL = r"\][^,]*\["  # brackets in one item: their sizes multiply
_SIZES = (pl.col("size").min().alias("least"), pl.col("size").sum().alias("hosts_in"))
_WRONG = (pl.col("least") < 1) | (pl.col("hosts_in") > HOSTS_MAX)

NODE_GPUS_MAX = 1024  # of a node, slices of GPUs counted

TOO_LARGE = "more nodes or GPUs than any cluster has: a damaged record"
FAR_MORE = "a list of far more nodes than their number: the number counts, the list is left out"
FAR_MORE_TIMES = 4
OTHER_NODES = "a number of nodes that is not how many its list names: the list counts"
# Values of a list for a job without hosts.
NOBODY = ("", "None assigned", "None", "(null)", "Unknown", "N/A")
# Lists that `expand` accepts, apart from descending or too large ranges.
SHAPE = r"^(?:(?:[^,\[\]\s]|\[\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*\])+(?:,|$))+$"


def expand(text: str) -> list[str]:
    """Return all hosts of a list, in order and with duplicates.

    An empty list has none. Raises UsageError for an invalid list, and for over HOSTS_MAX hosts.
    """
    count(text)  # first: the names may need more memory than there is
    found: list[str] = []
    for item in _items(text):
        parts = [_names(piece, text) for piece in _PIECE.finditer(item)]
        found += map("".join, itertools.product(*parts))
    return found


def count(text: str) -> int:
    """Return the number of hosts of a list without expanding it. Raises UsageError as `expand`."""
    total = 0
    for item in _items(text):
        several = 1
        for piece in _PIECE.finditer(item):
            several *= sum(last - first + 1 for first, last, _ in _bracket_ranges(piece, text))
            _bound(total + several, text)
        total += several
    return total


def too_large(nodes: pl.Expr, gpus: pl.Expr) -> pl.Expr:
    """Return whether a job has more nodes or GPUs than any cluster.

    One such damaged record would outweigh all others in every rate.
    """
    most = NODE_GPUS_MAX * nodes.clip(lower_bound=1)
    return (nodes > HOSTS_MAX) | (nodes < 0) | (gpus > most) | (gpus < 0)


def compress(names: Iterable[str]) -> str:
    """Return the sorted list of these hosts without duplicates, which `expand` inverts.

    A name is compressed by its last digits. Raises UsageError for a name with a bracket or comma.
    """
    endings = [(name, _NUMBERED.fullmatch(name)) for name in set(names)]
    # 9 and 10 belong together, and so do 09 and 10, by their width
    padded = {(m[1], len(m[2])) for _, m in endings if m and m[2][0] == "0" and len(m[2]) > 1}
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name, match in endings:
        if not name or re.search(r"[,\[\]\s]", name):
            raise UsageError(f"{name!r} is no name of a host")
        if match is None:
            plain.append(name)
            continue
        width = len(match[2]) if (match[1], len(match[2])) in padded else 0
        groups.setdefault((match[1], width), []).append(int(match[2]))
    found = sorted(plain)
    for (stem, width), numbers in sorted(groups.items()):
        runs = [
            f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}"
            for a, b in _runs(sorted(numbers))
        ]
        is_single = len(runs) == 1 and "-" not in runs[0]
        found.append(f"{stem}{runs[0]}" if is_single else f"{stem}[{','.join(runs)}]")
    return ",".join(found)


def explode_hosts(jobs: pl.LazyFrame, column: str = "hosts") -> pl.LazyFrame:
    """Return one row per row of `jobs` and host of its list, with the host as `node`.

    Rows with an empty list are dropped. Each distinct list is expanded once. Raises UsageError.
    """
    return jobs.join(nodes_of(jobs, column), on=column, how="inner")


def nodes_of(jobs: pl.LazyFrame, column: str = "hosts") -> pl.LazyFrame:
    """Return every distinct list with each `node` of it. Raises UsageError."""
    lists = jobs.select(pl.col(column).unique()).filter(pl.col(column) != "")
    return lists.map_batches(_nodes, schema={column: pl.String(), "node": pl.String()})


def expand_distinct(lists: pl.Series) -> pl.DataFrame:
    """Return distinct host lists with each `node` of them, in order. Raises UsageError."""
    return _nodes(pl.DataFrame({"hosts": lists}))


def count_hosts(lists: pl.Series) -> pl.Series:
    """Return the number of hosts of each list, 0 if empty; null for one that `expand` refuses."""
    text = pl.col("list")
    shaped = pl.DataFrame({"list": lists.unique()}).filter(text.str.contains(SHAPE))
    several = text.str.contains(_SEVERAL)
    plain = _parts(shaped.filter(~several), "list").group_by("list").agg(*_SIZES).filter(~_WRONG)
    multiplied = [(text, _count(text)) for text in shaped.filter(several)["list"]]
    shape = {"list": pl.String(), "hosts_in": pl.Int64()}
    known = pl.concat(
        [
            plain.select("list", pl.col("hosts_in").cast(pl.Int64)),
            pl.DataFrame(multiplied, schema=shape, orient="row"),
        ]
    )
    table = lists.alias("list").to_frame()
    found = table.join(known, on="list", how="left", maintain_order="left")["hosts_in"]
    return found.set(lists == "", 0)


def _nodes(lists: pl.DataFrame) -> pl.DataFrame:
    """Expand lists by columns if they have at most one bracket an item, else one by one."""
    (column,) = lists.columns
    text = pl.col(column)
    single = lists.filter(~text.str.contains(r"[,\[\]\s]")).with_columns(text.alias("node"))
    several = lists.filter(text.str.contains(r"[,\[\]\s]"))
    odd = text.str.contains(_SEVERAL) | ~text.str.contains(SHAPE)
    spelled = [(text, expand(text)) for text in several.filter(odd)[column]]
    shape = {column: pl.String, "node": pl.List(pl.String)}
    slow = pl.DataFrame(spelled, schema=shape, orient="row").explode("node")
    return pl.concat([single, _ranges(several.filter(~odd), column), slow])


def _ranges(lists: pl.DataFrame, column: str) -> pl.DataFrame:
    """Expand lists in SHAPE with at most one bracket an item."""
    found = _parts(lists, column)
    wrong = found.group_by(column).agg(*_SIZES).filter(_WRONG)
    for text in wrong[column]:
        expand(text)  # raises an error with the reason
    assert wrong.is_empty()
    number = pl.col("number").cast(pl.String).str.zfill(pl.col("first").str.len_bytes())
    bracket = pl.concat_str("front", number, "rear")
    return (
        found.with_columns(number=pl.int_ranges("first_n", pl.col("last_n") + 1))
        .explode("number")
        .select(column, node=pl.when(pl.col("number").is_null()).then("item").otherwise(bracket))
    )


def _parts(lists: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return a row for each name and for each range in a bracket, with its number of hosts."""
    item = pl.col("item")
    part = pl.col("part")
    return (
        lists.with_columns(pl.col(column).str.extract_all(_ITEM.pattern).alias("item"))
        .explode("item")
        .with_columns(
            item.str.extract(r"^([^\[]*)").alias("front"),
            item.str.extract(r"\]([^\]]*)$").fill_null("").alias("rear"),
            item.str.extract(r"\[([^\]]*)\]").str.split(",").alias("part"),
        )
        .explode("part")
        .with_columns(part.str.split_exact("-", 1).struct.rename_fields(["first", "last"]))
        .unnest("part")
        .with_columns(pl.col("last").fill_null(pl.col("first")))
        .with_columns(pl.col("first", "last").cast(pl.Int64).name.suffix("_n"))
        .with_columns(size=(pl.col("last_n") - pl.col("first_n") + 1).fill_null(1))
        .with_columns(pl.col("size").clip(upper_bound=HOSTS_MAX + 1))  # a sum that stays a number
    )


def _count(text: str) -> int | None:
    try:
        return count(text)
    except UsageError:
        return None


def _items(text: str) -> Iterator[str]:
    """Yield the items between the commas outside of brackets."""
    at = 0
    for match in _ITEM.finditer(text):
        if text[at : match.start()] != ("," if at else ""):
            raise _invalid_list_error(text)
        yield match[0]
        at = match.end()
    if text[at:] not in ("", ",") or text == ",":
        raise _invalid_list_error(text)


def _names(piece: re.Match[str], text: str) -> list[str]:
    """Return the names of a bracket, or the text itself."""
    if piece[1] is None:
        return [piece[2]]
    return [
        f"{number:0{width}d}"
        for first, last, width in _bracket_ranges(piece, text)
        for number in range(first, last + 1)
    ]


def _bracket_ranges(piece: re.Match[str], text: str) -> Iterator[tuple[int, int, int]]:
    """Yield first, last and width of each range in a bracket; other text is one range."""
    if piece[1] is None:
        yield 1, 1, 0
        return
    for part in piece[1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _invalid_list_error(text)
        first = match[1]
        last = match[2] or match[1]
        low = int(first)
        high = int(last)
        if high < low:
            raise _invalid_list_error(text)
        yield low, high, len(first)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of consecutive numbers."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _bound(hosts: int, text: str) -> None:
    if hosts > HOSTS_MAX:
        raise UsageError(f"{text[:80]!r} names over {HOSTS_MAX:,} hosts, which no cluster has")


def _invalid_list_error(text: str) -> UsageError:
    return UsageError(f"{text[:80]!r} is no host list, as node[01-04,07],gpu3 is one")


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SLOTS = r"\d+(?:-\d+)?"
_PBS = re.compile(
    rf"({_NAME})/{_SLOTS}(?:[*,]{_SLOTS})*|\(({_NAME}):[^()+]*\)|({_NAME}):\w+=[^()+]*"
)
_LSF = re.compile(rf"(?:\d+\*)?({_NAME})")
_COUNTED = re.compile(rf"({_NAME}):\d+")
_FOREIGN = re.compile(r"[*+'\"{}()=]")


def to_slurm_list(text: str) -> str | None:
    """Return a list in Slurm's format, without duplicates; None for an unknown format."""
    if "[" in text:
        return None if _FOREIGN.search(text) else text
    for separator, shape in (("+", _PBS), (",", _COUNTED), (":", _LSF)):
        found = [shape.fullmatch(part) for part in text.split(separator)]
        if all(found):
            return _join_distinct([next(filter(None, match.groups())) for match in found if match])
    if _FOREIGN.search(text):
        return None
    return _join_distinct(text.split(","))


def _join_distinct(names: list[str]) -> str:
    return ",".join(dict.fromkeys(names))
