"""Contracts of checkpoint stores and node checks: subclass one and give it the object to test.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path: Path) -> Store:
            return MyStore(tmp_path)

    class TestMyCheck(CheckContract):
        ...  # with the fixtures `check` and `samples`

Needs pytest. Each test of a store gets an empty store of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from outlast.checkpoint.format.manifests import COMMIT
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import CorruptionError
from outlast.health.check_contract import AnyCheck, JudgeContext, Sample
from outlast.health.check_memory import CheckMemory, FlapRule, updated_memory
from outlast.health.check_settings import CheckSettings
from outlast.health.probe_runner import NOTHING, ProbeRequest, run_probes
from outlast.log_records import SEVERITIES, SYMPTOMS, Finding

PLACE = "step-000000001-n1-a"
OTHER = "step-000000002-n2-b"
ESCAPES = ["..", ".", "", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "a\nb", "x" * 300]


class StoreContract:
    """Tests of the promises of `outlast.checkpoint.stores.store_interfaces.Store`."""

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store; subclasses override it."""
        pytest.fail("a subclass of StoreContract must have a fixture `store`")

    def test_an_empty_store_has_nothing(self, store: Store) -> None:
        """An empty store has no directories and no files."""
        assert store.where
        assert store.directories() == []
        assert store.files(PLACE) == {}

    def test_what_was_put_is_there_whole(self, store: Store) -> None:
        """A put file has all its bytes; an empty file is possible."""
        data = bytes(range(256)) * 100
        store.put(PLACE, "shard-00000", [data[:1000], memoryview(data)[1000:]], len(data))
        store.put(OTHER, "empty", [], 0)
        assert sorted(store.directories()) == [PLACE, OTHER]
        assert store.files(PLACE) == {"shard-00000": len(data)}
        assert store.files(OTHER) == {"empty": 0}
        assert store.get(PLACE, "shard-00000") == data
        assert store.get(OTHER, "empty") == b""

    def test_parts_may_share_one_buffer(self, store: Store) -> None:
        """Each part is consumed before the next one is taken."""
        buffer = bytearray(100_000)

        def parts() -> Iterator[memoryview]:
            for k in range(5):
                buffer[:] = bytes([k]) * len(buffer)
                yield memoryview(buffer)

        store.put(PLACE, "shard-00000", parts(), 5 * len(buffer))
        data = store.get(PLACE, "shard-00000")
        assert data == b"".join(bytes([k]) * len(buffer) for k in range(5))

    def test_any_range_can_be_read(self, store: Store) -> None:
        """Reads work at any offset and length."""
        data = bytes(k * 7 % 251 for k in range(20_000))
        store.put(PLACE, "shard-00000", [data], len(data))
        for at, size in ((0, 20_000), (0, 4096), (8192, 8192), (1, 4096), (19_999, 1), (777, 0)):
            into = bytearray(size)
            store.read(PLACE, "shard-00000", at, memoryview(into))
            assert bytes(into) == data[at : at + size]

    @pytest.mark.parametrize(("at", "size"), [(0, 8193), (4096, 8192), (8192, 1), (1 << 40, 4096)])
    def test_a_file_that_ends_early_is_damage(self, store: Store, at: int, size: int) -> None:
        """A read past the end raises CorruptionError."""
        store.put(PLACE, "shard-00000", [bytes(8192)], 8192)
        with pytest.raises(CorruptionError, match="shard-00000"):
            store.read(PLACE, "shard-00000", at, memoryview(bytearray(size)))

    def test_what_is_missing_is_damage(self, store: Store) -> None:
        """Missing files raise CorruptionError."""
        with pytest.raises(CorruptionError, match="missing"):
            store.get(PLACE, COMMIT)
        store.put(PLACE, "shard-00000", [b"x"], 1)
        with pytest.raises(CorruptionError, match="missing"):
            store.get(PLACE, COMMIT)
        with pytest.raises(CorruptionError, match="missing"):
            store.read(PLACE, "shard-00001", 0, memoryview(bytearray(1)))

    def test_a_put_replaces_what_was_there(self, store: Store) -> None:
        """A put replaces an older file."""
        store.put(PLACE, "shard-00000", [b"older and longer"], 16)
        store.put(PLACE, "shard-00000", [b"newer"], 5)
        assert store.get(PLACE, "shard-00000") == b"newer"

    @pytest.mark.parametrize("data", [b"too short", b"longer than was said"])
    def test_a_put_of_another_size_leaves_nothing(self, store: Store, data: bytes) -> None:
        """A put of a wrong size raises and leaves no file."""
        with pytest.raises(Exception, match="bytes"):
            store.put(PLACE, "shard-00000", [data], 15)
        assert "shard-00000" not in store.files(PLACE)

    def test_a_put_that_is_broken_off_leaves_what_was_there(self, store: Store) -> None:
        """An interrupted put changes nothing."""

        def parts() -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("the source is gone")

        store.put(PLACE, "shard-00000", [b"whole"], 5)
        with pytest.raises(Exception, match="the source is gone"):
            store.put(PLACE, "shard-00000", parts(), 8)
        assert store.get(PLACE, "shard-00000") == b"whole"
        with pytest.raises(Exception, match="the source is gone"):
            store.put(OTHER, "shard-00000", parts(), 8)
        assert "shard-00000" not in store.files(OTHER)

    def test_create_never_replaces(self, store: Store) -> None:
        """A second `create` returns False and changes nothing."""
        assert store.create(PLACE, COMMIT, b"first") is True
        assert store.create(PLACE, COMMIT, b"second") is False
        assert store.get(PLACE, COMMIT) == b"first"
        assert set(store.files(PLACE)) == {COMMIT}

    def test_one_of_many_creates_it(self, store: Store) -> None:
        """One of several concurrent callers of `create` gets True."""
        data = [f"writer {k}".encode() * 1000 for k in range(8)]
        with ThreadPoolExecutor(len(data)) as pool:
            created = list(pool.map(lambda content: store.create(PLACE, COMMIT, content), data))
        assert created.count(True) == 1
        assert store.get(PLACE, COMMIT) == data[created.index(True)]

    def test_latest_is_no_checkpoint(self, store: Store) -> None:
        """The `latest` pointer is no directory."""
        store.create(PLACE, COMMIT, b"x")
        store.point(PLACE)
        store.point(OTHER)
        assert store.directories() == [PLACE]

    def test_removal_is_whole_and_only_of_one(self, store: Store) -> None:
        """`remove` deletes one checkpoint and is idempotent."""
        for directory in (PLACE, OTHER):
            store.put(directory, "shard-00000", [b"x"], 1)
            store.create(directory, COMMIT, b"x")
        store.remove(PLACE)
        store.remove(PLACE)
        assert store.directories() == [OTHER]
        assert store.files(PLACE) == {}
        assert set(store.files(OTHER)) == {"shard-00000", COMMIT}

    @pytest.mark.parametrize("name", ESCAPES)
    def test_no_name_leads_out(self, store: Store, name: str) -> None:
        """Names that might leave the root raise CorruptionError."""
        store.put(PLACE, "shard-00000", [b"x"], 1)
        into = memoryview(bytearray(1))
        for attempt in (
            lambda: store.get(PLACE, name),
            lambda: store.get(name, "shard-00000"),
            lambda: store.files(name),
            lambda: store.read(PLACE, name, 0, into),
            lambda: store.put(PLACE, name, [b"y"], 1),
            lambda: store.put(name, "shard-00000", [b"y"], 1),
            lambda: store.create(PLACE, name, b"y"),
            lambda: store.create(name, COMMIT, b"y"),
            lambda: store.point(name),
            lambda: store.remove(name),
        ):
            with pytest.raises(CorruptionError, match="no name"):
                attempt()
        assert store.files(PLACE) == {"shard-00000": 1}

    def test_threads_may_share_it(self, store: Store) -> None:
        """Several threads may write and read at once."""
        data = {f"shard-{k:05d}": bytes([k]) * 50_000 for k in range(8)}

        def there_and_back(name: str) -> bytes:
            store.put(PLACE, name, [data[name]], len(data[name]))
            into = bytearray(len(data[name]))
            store.read(PLACE, name, 0, memoryview(into))
            return bytes(into)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(there_and_back, data)) == list(data.values())
        assert store.files(PLACE) == dict.fromkeys(data, 50_000)


T_NS = 1_763_000_000 * 10**9
HOUR_NS = 3600 * 10**9
WITHIN_S = 60.0


class CheckContract:
    """Tests of the promises of `outlast.health.check_contract.Check`."""

    @pytest.fixture
    def check(self) -> AnyCheck:
        """Return the check; subclasses override it."""
        pytest.fail("a subclass of CheckContract must have a fixture `check`")

    @pytest.fixture
    def samples(self) -> list[Sample]:
        """Return samples of a sound node and of broken ones; subclasses override it."""
        pytest.fail("a subclass of CheckContract must have a fixture `samples`")

    @pytest.fixture
    def settings(self) -> CheckSettings:
        """Return the expected configuration of the node; subclasses may override it."""
        return CheckSettings()

    def test_it_has_a_name(self, check: AnyCheck) -> None:
        """The name and the symptom are valid."""
        assert re.fullmatch(r"[a-z][a-z0-9_.-]*", check.name)
        assert check.symptom in SYMPTOMS

    def test_something_is_said_of_every_sample(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """Every sample leads to at least one valid finding."""
        assert samples
        for sample in samples:
            findings = list(check.findings(sample, _about(settings)))
            assert findings, f"nothing is said of {sample}: is that healthy?"
            for finding in findings:
                assert finding.severity in SEVERITIES and finding.symptom in SYMPTOMS
                assert finding.detail and "\n" not in finding.detail
                assert (finding.cluster, finding.node) == ("c", "n")

    def test_trouble_and_health_are_not_said_of_one_thing(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """No device is both healthy and broken."""
        for sample in samples:
            findings = list(check.findings(sample, _about(settings)))
            well = {item.device for item in findings if item.severity == "healthy"}
            ill = {item.device for item in findings if item.severity not in {"healthy", "warn"}}
            assert not well & ill

    def test_judging_is_pure(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """Findings are repeatable, and the sample stays unchanged."""
        for sample in samples:
            before = msgspec.json.encode(sample)
            first = list(check.findings(sample, _about(settings)))
            assert list(check.findings(sample, _about(settings))) == first
            assert msgspec.json.encode(sample) == before

    def test_samples_survive_a_recording(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """Encoding a sample as JSON loses nothing."""
        for sample in samples:
            again = msgspec.json.decode(msgspec.json.encode(sample), type=check.sample)
            assert again == sample
            first, second = (list(check.findings(s, _about(settings))) for s in (sample, again))
            assert first == second

    def test_counters_are_told_apart(self, check: AnyCheck, samples: list[Sample]) -> None:
        """Counters have unique keys and integer values."""
        for sample in samples:
            counts = list(check.counts(sample))
            assert len({count.key for count in counts}) == len(counts)
            assert all(isinstance(count.value, int) and count.key for count in counts)

    def test_it_can_be_judged_with_a_memory(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """Any sample can follow any other one: counters are reset, devices come and go."""
        for first in samples:
            memory = _after(check, first, settings)
            for second in samples:
                later = _about(settings)._replace(memory=memory, t_ns=T_NS + HOUR_NS)
                assert list(check.findings(second, later))

    def test_its_probes_answer_here_or_say_why_not(
        self, check: AnyCheck, settings: CheckSettings
    ) -> None:
        """Each probe yields a sample or an error."""
        requests = [ProbeRequest(check, probe) for probe in check.probes(settings)]
        for result in run_probes(requests, within_s=WITHIN_S):
            if bytes(result.sample) == bytes(NOTHING):
                assert result.absent or result.failed or result.late
            else:
                sample = msgspec.json.decode(result.sample, type=check.sample)
                assert list(check.findings(sample, _about(settings)))


def _about(settings: CheckSettings) -> JudgeContext:
    return JudgeContext("c", "n", T_NS, settings, CheckMemory(), remembers=True)


def _after(check: AnyCheck, sample: Sample, settings: CheckSettings) -> CheckMemory:
    events: list[Finding] = []
    if check.lasting:
        events = list(check.findings(sample, _about(settings)))
    counts = {count.key: (count.value, count.flaps) for count in check.counts(sample)}
    return updated_memory(
        CheckMemory(),
        boot="",
        counts=counts,
        events=events,
        now_ns=T_NS,
        rule=FlapRule(3, 3600, 1800),
    )
