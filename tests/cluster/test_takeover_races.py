"""A long run whose controller's node is stopped or cut off again and again, at random moments.

Each round breaks the node of the newest term's owner, waits for a newer term, and heals the node.
No term has two owners, and no order of an older term counts after a newer one has read the journal.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.cluster.cluster import Cluster, on_one_host
from tests.cluster.conftest import ON_HOSTS
from tests.cluster.switch_terms import SwitchTerms, etcd_on_the_switch
from tests.cluster.takeover_strikes import stop_launcher, wake_launcher
from tests.cluster.test_host_faults import must_be_equal
from tests.end_to_end.conftest import wait_for

from outlast.controller.inputs import AnyEntry, DecisionMade, Opened, TermBegan
from outlast.controller.lifecycle.journal_segments import count_entries
from outlast.controller.recovery.recovery_ladder import FROM_A_COPY
from outlast.errors import EXIT_DONE
from outlast.events import AnyEvent, Decided, GenerationOpened, Note, PhaseDone
from outlast.launch.run_journal import read_segments
from outlast.launch.terms.run_identity import RunningJob
from outlast.launch.terms.term_records import TermRecord
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.segment_files import segment_paths

pytestmark = [
    *ON_HOSTS,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed"),
]
HOSTS = 4
STEPS_OF_ROUND = 16  # more than a round takes, at its pace
RANKS = 2
WITHIN_S = 90.0


class Strike(NamedTuple):
    """A fault of a controller's node, and its end."""

    begin: Callable[[Cluster, str], None]
    end: Callable[[Cluster, str], None]


STRIKES = {
    "stopped": Strike(stop_launcher, wake_launcher),
    "silent": Strike(
        lambda cluster, host: cluster.hosts.set_silent(host, silent=True),
        lambda cluster, host: cluster.hosts.set_silent(host, silent=False),
    ),
    "mute": Strike(
        lambda cluster, host: cluster.hosts.set_mute(host, mute=True),
        lambda cluster, host: cluster.hosts.set_mute(host, mute=False),
    ),
    "deaf": Strike(
        lambda cluster, host: cluster.hosts.set_deaf(host, deaf=True),
        lambda cluster, host: cluster.hosts.set_deaf(host, deaf=False),
    ),
}


class RacedRun:
    """A live run, as its events and its terms show it."""

    def __init__(self, cluster: Cluster, terms: SwitchTerms) -> None:
        self._cluster, self._terms = cluster, terms
        self._reader = EventReader(cluster.run_dir, lambda _damage: None)
        self.events: list[AnyEvent] = []
        self.newest: TermRecord

    def open(self) -> None:
        """Read the record of the first term."""
        self.wait(lambda: any(isinstance(one, PhaseDone) for one in self.events), "a first step")
        path = self._cluster.run_dir / "run.json"
        self._terms.open(msgspec.json.decode(path.read_bytes(), type=RunningJob).run)
        first = self._terms.newest(0)
        assert first is not None and first.term == 1
        self.newest = first

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until new events or terms fulfil a condition."""

        def is_there() -> bool:
            self.events += self._reader.poll()
            ended = [
                name for name, one in self._cluster.launchers.items() if one.poll() is not None
            ]
            found = condition()
            assert found or not ended, f"{what}: launchers have ended: {ended}"
            return found

        wait_for(is_there, what, WITHIN_S)

    def is_overtaken(self) -> bool:
        """Read the newest term; return whether it is newer than the one known before."""
        if (found := self._terms.newest(self.newest.term)) is not None:
            self.newest = found
        return found is not None

    def note_after(self, index: int, *texts: str) -> bool:
        """Return whether a note with one of these texts is among the events from `index` on."""
        notes = [one.text for one in self.events[index:] if isinstance(one, Note)]
        return any(text in note for note in notes for text in texts)

    def is_settled(self, index: int, struck: str) -> bool:
        """Return whether, in the events from `index` on, the newest term's controller has all ranks
        train, and the struck node follows it, or one of a term between."""
        self.is_overtaken()
        began = [
            position
            for position, one in enumerate(self.events[index:], start=index)
            if isinstance(one, Note)
            and f"takes over as controller, term {self.newest.term}:" in one.text
        ]
        if not began or not self.note_after(index, f"{struck} follows ", f"{struck} takes over "):
            return False
        after = self.events[began[0] :]
        generation = max(one.generation for one in self.events if isinstance(one, GenerationOpened))
        opened = any(isinstance(one, GenerationOpened) for one in after)
        adopted = self.note_after(began[0], "train on in generation")
        done = {
            one.seat for one in after if isinstance(one, PhaseDone) and one.generation == generation
        }
        return (opened or adopted) and len(done) == RANKS


class Series(NamedTuple):
    """Rounds of one run: at most so many, begun within so many seconds, and at least `least`."""

    rounds: int
    least: int
    lease_s: float
    within_s: float
    pace_s: float  # of a step

    @property
    def steps(self) -> int:
        """Return how many steps the job needs so that it is not done before the last round."""
        return int(min(self.rounds * STEPS_OF_ROUND, self.within_s / self.pace_s)) + 100


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "series",
    [
        Series(3, 3, 2.0, 600.0, 0.25),
        pytest.param(Series(40, 40, 2.0, 600.0, 0.25), marks=pytest.mark.extended),
        pytest.param(
            Series(240, 60, 1.0, 520.0, 0.5), marks=[pytest.mark.extended, pytest.mark.long]
        ),
    ],
)
def test_no_order_of_an_overtaken_controller_counts(
    series: Series, cluster: Cluster, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    hold = tmp_path / "hold"
    hold.touch()
    with etcd_on_the_switch(cluster.hosts, tmp_path) as terms:
        lease = f"--limit=lease_s={series.lease_s:g}"
        job = (str(series.steps), "ddp", str(hold), str(series.pace_s))
        cluster.start("2:4", 1, lease, terms.flag, "--checkpoint-every=20", job=job)
        run = RacedRun(cluster, terms)
        run.open()
        until_s, rounds = time.monotonic() + series.within_s, 0
        while rounds < series.rounds and time.monotonic() < until_s:
            race(cluster, run, moments, series.lease_s)
            rounds += 1
            print(f"round {rounds}", flush=True)
        assert rounds >= series.least
        hold.unlink()
        assert set(cluster.codes().values()) == {EXIT_DONE}
        records = [terms.read(term) for term in range(1, run.newest.term + 2)]
    owners = [record.host for record in records if record is not None]
    print(f"{len(owners)} terms: {' '.join(owners)}")
    assert records[-1] is None and len(owners) == len(records) - 1 > rounds
    one_host = tmp_path / "one"
    one_host.mkdir()
    must_be_equal(
        cluster, on_one_host(one_host, RANKS, str(series.steps), "ddp", str(tmp_path / "absent"))
    )
    must_have_one_owner_each(cluster, owners)
    must_obey_what_counts(cluster)


def race(cluster: Cluster, run: RacedRun, moments: random.Random, lease_s: float) -> None:
    """Break the controller's node at a random moment, and heal it when it has been overtaken."""
    pause = threading.Event().wait
    pause(moments.uniform(0, lease_s))  # any moment of a beat may be that of the fault
    run.is_overtaken()
    kind, struck, index = moments.choice(list(STRIKES)), run.newest.host, len(run.events)
    print(f"term {run.newest.term} on {struck}: {kind}", flush=True)
    STRIKES[kind].begin(cluster, struck)
    run.wait(run.is_overtaken, f"a term after that of {struck}, {kind}")
    pause(moments.choice((0, moments.uniform(0, 2 * lease_s))))  # within its lease, or beyond
    STRIKES[kind].end(cluster, struck)
    run.wait(lambda: run.is_settled(index, struck), f"steps after {struck} was {kind}")


def must_have_one_owner_each(cluster: Cluster, owners: list[str]) -> None:
    """Compare the owners in the store with notes of takeovers and segments of the journal."""
    events = cluster.events()
    notes = [one.text for one in events if isinstance(one, Note)]
    for term, host in enumerate(owners[1:], start=2):
        began = [text for text in notes if f"takes over as controller, term {term}:" in text]
        assert len(began) <= 1 and all(text.startswith(f"{host} ") for text in began)
    files = [path.name.split(".")[0] for path in segment_paths(cluster.run_dir / "journal")]
    assert len(files) == len(set(files)), "a term has the journal of two processes"
    for host in cluster.hosts.names:
        words = [text.split() for text in notes if text.startswith(f"{host} follows ")]
        followed = [int(each[-1]) for each in words]
        assert followed == sorted(set(followed)), f"{host} went back to an older term"


def must_obey_what_counts(cluster: Cluster) -> None:
    """Find each announced decision, and each opened generation, among the entries that count."""
    segments = read_segments(cluster.run_dir / "journal", lambda damage: pytest.fail(damage))
    counts = count_entries(segments)
    spare = {term: len(segments[term]) - counts[term] for term in segments}
    print(f"entries that no later term has read: { {k: v for k, v in spare.items() if v} }")
    counted: list[AnyEntry] = []
    read: dict[int, int] = {}
    for term, entries in sorted(segments.items()):
        first, *others = entries
        assert isinstance(first, TermBegan)
        assert not any(isinstance(one, TermBegan) for one in others)
        assert all(first.read.get(each, 0) >= number for each, number in read.items())
        read = dict(first.read)
        counted += entries[: counts[term]]
    decided = {(one.generation, one.n) for one in counted if isinstance(one, DecisionMade)}
    starts = [
        (one.generation, one.n)
        for one in counted
        if isinstance(one, DecisionMade) and one.verdict == "start"
    ]
    opened = {(one.generation, one.n) for one in counted if isinstance(one, Opened)}
    assert len(decided) == len({generation for generation, _ in decided})
    for event in cluster.events():
        if isinstance(event, Decided) and event.rung in FROM_A_COPY:
            # Then all ranks start again, from this checkpoint or a newer one that was found later.
            later = [n for generation, n in starts if generation > event.generation]
            assert any(n >= event.n for n in later), event
        elif isinstance(event, Decided):
            assert (event.generation, event.n) in decided, event
        elif isinstance(event, GenerationOpened):
            assert (event.generation, event.n) in opened, event
