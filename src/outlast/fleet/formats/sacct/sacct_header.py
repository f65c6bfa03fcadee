"""Options of an accounting log, and its header: column names and delimiter."""

from __future__ import annotations

import re
import zoneinfo
from typing import NamedTuple

import msgspec

from outlast.errors import SourceError, UsageError

BLOCK_BYTES = 32 << 20


class SacctOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of reading a log. Raises UsageError for invalid ones."""

    zone: str = "UTC"  # of times without one: that of the machine sacct ran on
    zone_said: bool = True  # False: it is assumed, and a note tells so
    cluster: str = ""  # if no column has it
    delimiter: str = ""  # "": from the header
    columns: tuple[str, ...] = ()  # of a log without a header, in sacct's names
    taken_ns: int | None = None  # when sacct ran; None: the latest time in the log
    block_bytes: int = BLOCK_BYTES  # of text processed at once

    def __post_init__(self) -> None:
        try:
            zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
            raise UsageError(
                f"{self.zone!r} is no time zone; say one as in Europe/Berlin"
            ) from error
        if "\n" in self.delimiter or self.delimiter.isalnum():
            raise UsageError(f"{self.delimiter!r} cannot separate fields")
        if self.block_bytes < 1:
            raise UsageError("a block has at least one byte")


# Our names of columns, and sacct's names, in order of preference.
COLUMNS: dict[str, tuple[str, ...]] = {
    "job": ("jobid", "jobidraw"),
    "state": ("state",),
    "start": ("start",),
    "end": ("end",),
    "elapsed_s": ("elapsedraw",),
    "elapsed": ("elapsed",),
    "submit": ("submit",),
    "eligible": ("eligible",),
    "cluster": ("cluster",),
    "name": ("jobname",),
    "user": ("user", "uid"),
    "account": ("account",),
    "partition": ("partition",),
    "qos": ("qos",),
    "exit": ("exitcode",),
    "nodes": ("nnodes", "allocnodes"),
    "hosts": ("nodelist",),
    "tres": ("alloctres",),
    "gres": ("allocgres",),
    "asked_tres": ("reqtres",),
    "asked_gres": ("reqgres",),
    "failed_node": ("failednode",),
    "priority": ("priority",),
    "restarts": ("restarts",),
    "line": ("submitline",),
}
# Columns of free text, by users or Slurm, which may contain `|`.
FREE = frozenset(
    "admincomment comment constraints container extra jobname licenses stderr stdin"  # noqa: SIM905
    " stdout submitline systemcomment wckey workdir".split()
)
OTHERS = frozenset(
    "alloccpus associd avecpu avecpufreq avediskread avediskwrite avepages averss avevmsize"  # noqa: SIM905
    " blockid consumedenergy consumedenergyraw cputime cputimeraw dbindex derivedexitcode"
    " flags gid group jobidraw layout maxdiskread maxdiskreadnode maxdiskreadtask maxdiskwrite"
    " maxdiskwritenode maxdiskwritetask maxpages maxpagesnode maxpagestask maxrss maxrssnode"
    " maxrsstask maxvmsize maxvmsizenode maxvmsizetask mcslabel mincpu mincpunode mincputask"
    " ncpus ntasks planned plannedcpu plannedcpuraw qosraw qosreq reason reqcpufreq"
    " reqcpufreqgov reqcpufreqmax reqcpufreqmin reqcpus reqmem reqnodes reservation"
    " reservationid reserved resvcpu resvcpuraw sluid originalsluid suspended systemcpu"
    " timelimit timelimitraw totalcpu uid usercpu wckeyid".split()
)
KNOWN = FREE | OTHERS | {name for names in COLUMNS.values() for name in names}
USUAL = "JobID,State,Submit,Eligible,Start,End,ElapsedRaw,ExitCode,NNodes,NodeList,AllocTRES"

HIDDEN = {  # information that is missing without a column
    "cluster": "which cluster a job ran on (Cluster)",
    "submit": "how long a job waited (Submit)",
    "eligible": "when a job could have begun (Eligible)",
    "user": "whose a job was (User)",
    "qos": "who may preempt whom (QOS)",
    "partition": "which nodes a job could have had (Partition)",
    "exit": "how a job's program ended (ExitCode)",
    "hosts": "on which nodes a job ran (NodeList): nothing can be said of a node",
    "failed_node": "which node failed (FailedNode)",
    "priority": "in which order jobs waited (Priority)",
    "restarts": "how often a job was requeued (Restarts)",
    "line": "which nodes a user excluded (SubmitLine)",
}


class SacctHeader(NamedTuple):
    """Header of a log.

    `at`: positions of our columns; `names`: all columns, in sacct's terms.
    """

    delimiter: str
    names: tuple[str, ...]
    at: dict[str, int]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.names)

    def free(self) -> tuple[int, ...]:
        """Return the columns that may contain a delimiter or a line break."""
        return tuple(i for i, name in enumerate(self.names) if name.lower() in FREE)

    def notes(self, cluster: str) -> list[str]:
        """Return one note on the information that these columns lack."""
        missing = {ours for ours in HIDDEN if ours not in self.at}
        if cluster:
            missing.discard("cluster")
        notes = [HIDDEN[ours] for ours in HIDDEN if ours in missing]
        if not {"tres", "gres", "asked_tres", "asked_gres"} & self.at.keys():
            notes.append("how many GPUs a job had (AllocTRES): taken as none")
        elif not {"tres", "gres"} & self.at.keys():
            notes.append("how many GPUs a job had (AllocTRES): taken as those that it asked for")
        return [f"no column says {'; '.join(notes)}"] if notes else []


def parse_header(line: str, source: str, options: SacctOptions) -> SacctHeader | None:
    """Return the header that this line is, or None.

    Raises SourceError for a header that cannot be used.
    """
    text = line.strip("\r\n ")
    delimiter = options.delimiter or _delimiter(text)
    if not delimiter:
        return None
    for_the_eye = not delimiter.strip(" ")
    split = text.split() if for_the_eye else text.split(delimiter)
    names = tuple(name.strip() for name in split)
    known = [name for name in names if name.lower() in KNOWN]
    if len(known) < 2 or len(known) < len([name for name in names if name]) / 2:
        return None
    if for_the_eye:
        raise SourceError(
            f"{source} is for the eye: its columns are cut to a width and what was cut is lost; run"
            f" sacct --parsable2 --duplicates --allusers --format={USUAL}"
        )
    return _usable(delimiter, names, source)


def header_of_options(source: str, options: SacctOptions) -> SacctHeader:
    """Return the header given by the options. Raises SourceError."""
    strange = [name for name in options.columns if name and name.lower() not in KNOWN]
    if strange:
        raise SourceError(f"sacct has no column {strange[0]!r} (of those given for {source})")
    return _usable(options.delimiter or "|", options.columns, source)


def _usable(delimiter: str, names: tuple[str, ...], source: str) -> SacctHeader:
    lower = [name.lower() for name in names]
    at = {
        ours: lower.index(next(name for name in theirs if name in lower))
        for ours, theirs in COLUMNS.items()
        if any(name in lower for name in theirs)
    }
    times = at.keys() & {"start", "end"}
    timed = times and (len(times) == 2 or at.keys() & {"elapsed", "elapsed_s"})
    lost = [name for ours, name in (("job", "JobID"), ("state", "State")) if ours not in at]
    lost += [] if timed else ["Start", "End"]
    if lost:
        raise SourceError(
            f"{source} has no column {', '.join(lost)}, and nothing can be said without; run sacct"
            f" --parsable2 --duplicates --allusers --format={USUAL}"
        )
    return SacctHeader(delimiter, names, at)


def _delimiter(text: str) -> str:
    """Return the text between the first two column names that sacct knows."""
    match = re.match(r"([A-Za-z]+)([^A-Za-z]+)(?=[A-Za-z])", text)
    if match is None or match[1].lower() not in KNOWN:
        return ""
    return match[2]
