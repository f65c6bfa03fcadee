"""Contract of a node check: subclass CheckContract and give it a `check` and `samples`.

    class TestMine(CheckContract):
        @pytest.fixture
        def check(self) -> AnyCheck:
            return MINE

        @pytest.fixture
        def samples(self) -> list[Sample]:
            return [GOOD, BROKEN]

Needs pytest.
"""

from __future__ import annotations

import re

import msgspec
import pytest

from outlast.health.check_contract import AnyCheck, JudgeContext, Sample
from outlast.health.check_memory import CheckMemory, FlapRule, updated_memory
from outlast.health.check_settings import CheckSettings
from outlast.health.probe_runner import NOTHING, ProbeRequest, run_probes
from outlast.log_records import SEVERITIES, SYMPTOMS, Finding

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
            found = list(check.findings(sample, _about(settings)))
            assert found, f"nothing is said of {sample}: is that healthy?"
            for one in found:
                assert one.severity in SEVERITIES and one.symptom in SYMPTOMS
                assert one.detail and "\n" not in one.detail
                assert (one.cluster, one.node) == ("c", "n")

    def test_trouble_and_health_are_not_said_of_one_thing(
        self, check: AnyCheck, samples: list[Sample], settings: CheckSettings
    ) -> None:
        """No device is both healthy and broken."""
        for sample in samples:
            found = list(check.findings(sample, _about(settings)))
            well = {one.device for one in found if one.severity == "healthy"}
            ill = {one.device for one in found if one.severity not in {"healthy", "warn"}}
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
            assert len({one.key for one in counts}) == len(counts)
            assert all(isinstance(one.value, int) and one.key for one in counts)

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
        for one in run_probes(requests, within_s=WITHIN_S):
            if bytes(one.sample) == bytes(NOTHING):
                assert one.absent or one.failed or one.late
            else:
                sample = msgspec.json.decode(one.sample, type=check.sample)
                assert list(check.findings(sample, _about(settings)))


def _about(settings: CheckSettings) -> JudgeContext:
    return JudgeContext("c", "n", T_NS, settings, CheckMemory(), remembers=True)


def _after(check: AnyCheck, sample: Sample, settings: CheckSettings) -> CheckMemory:
    events: list[Finding] = []
    if check.lasting:
        events = list(check.findings(sample, _about(settings)))
    counts = {one.key: (one.value, one.flaps) for one in check.counts(sample)}
    return updated_memory(
        CheckMemory(),
        boot="",
        counts=counts,
        events=events,
        now_ns=T_NS,
        rule=FlapRule(3, 3600, 1800),
    )
