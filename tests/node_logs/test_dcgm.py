"""Reading of dcgmi output: both roots, renamed tests, and tests that did not run."""

from __future__ import annotations

import json

import pytest
from tests.node_logs.log_samples import DEPLOYED, diagnostic, found, unread

from outlast.node_logs.dcgm import canonical_name, findings
from outlast.node_logs.log_readings import Reading

ROOTS = ["DCGM GPU Diagnostic", "DCGM Diagnostic"]


def read(text: str, level: int | None = None, without: tuple[str, ...] = ()) -> list[Reading]:
    return list(findings(text, cluster="c", node="n", t_ns=7, level=level, without=without))


def severities(readings: list[Reading]) -> list[str]:
    return [one.severity for one in found(readings)]


@pytest.mark.parametrize("root", ROOTS)
def test_all_passed(root: str) -> None:
    (one,) = found(read(diagnostic(root, *((name, "Pass") for name in DEPLOYED)), level=1))
    assert (one.severity, one.detail, one.t_ns) == ("healthy", "9 results, all passed", 7)


@pytest.mark.parametrize("root", ROOTS)
def test_a_failed_test_is_reported_with_its_device(root: str) -> None:
    text = diagnostic(root, ("GPU Memory", "Fail"), gpu_ids="0,3", warnings="it is broken")
    (one,) = found(read(text))
    assert (one.symptom, one.severity, one.device) == ("gpu-memory", "drain", "GPU 0,3")
    assert one.detail == "GPU Memory: Fail. it is broken"


def test_the_answer_of_version_4() -> None:
    """One test for the deployment, a result for each device, and DCGM's own severities."""
    warnings = [{"warning": "Persistence Mode: off", "error_id": 29, "error_severity": 5}]
    isolate = [{"warning": "dead", "error_severity": 2}, {"warning": "odd", "error_severity": 1}]
    monitor = [{"warning": "look", "error_severity": 1}]
    results = [
        {"entity_group": "GPU", "entity_id": 0, "status": "Fail", "warnings": warnings},
        {"entity_group": "GPU", "entity_id": 1, "status": "Fail", "warnings": isolate},
        {"entity_group": "GPU", "entity_id": 2, "status": "Fail", "warnings": monitor},
        {"entity_group": "GPU", "entity_id": 3, "status": "Pass"},
    ]
    tests = [{"name": "software", "results": results, "test_summary": {"status": "Fail"}}]
    text = json.dumps({"DCGM Diagnostic": {"test_categories": [{"tests": tests}]}})
    told = [(one.device, one.severity) for one in found(read(text, level=1))]
    assert told == [("GPU 0", "drain"), ("GPU 1", "now"), ("GPU 2", "warn")]


@pytest.mark.parametrize("status", ["Skip", "Not Run", "", "Weird"])
def test_a_test_that_did_not_run_is_unknown(status: str) -> None:
    readings = read(diagnostic(ROOTS[0], ("PCIe", "Pass"), ("EUD Test", status)))
    assert severities(readings) == ["unknown"]


def test_a_site_may_do_without_a_test() -> None:
    text = diagnostic(ROOTS[0], ("PCIe", "Pass"), ("EUD Test", "Skip"))
    assert severities(read(text, without=("EUD Test",))) == ["healthy"]


def test_a_test_of_the_level_that_is_not_there_is_missed() -> None:
    text = diagnostic(ROOTS[0], *((name, "Pass") for name in DEPLOYED[1:]), ("PCIe", "Pass"))
    told = [one.detail for one in found(read(text, level=2))]
    assert told == [
        "denylist: not in the answer of level 2",
        "gpumemory: not in the answer of level 2",
    ]
    assert severities(read(text, level=2)) == ["unknown", "unknown"]


def test_renamed_tests_are_the_same_tests() -> None:
    assert canonical_name("Blacklist") == canonical_name("Denylist")
    assert canonical_name("SM Stress") == canonical_name("Diagnostic")
    assert canonical_name("Memory") == canonical_name("GPU Memory")


def test_a_list_instead_of_categories_is_read_and_reported() -> None:
    whole = json.loads(diagnostic(ROOTS[0], ("CUDA Main Library", "Fail"), ("PCIe", "Pass")))
    text = json.dumps({ROOTS[0]: whole[ROOTS[0]]["test_categories"]})
    readings = read(text)
    assert severities(readings) == ["drain"] and "no test_categories" in unread(readings)[0].reason
    passed = read(text.replace("Fail", "Pass"))
    assert severities(passed) == [] and unread(passed)  # an odd answer does not make healthy


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "{", "{}", "[]", '{"DCGM Diagnostic": 3}', '{"DCGM Diagnostic": {}}',
     '{"DCGM Diagnostic": {"test_categories": [3]}}', diagnostic(ROOTS[1], ("PCIe", "Pass"))[:-9],
     '{"DCGM Diagnostic": ' + "[" * 100_000, '{"DCGM Diagnostic": {"test_categories": []}}'],
)  # fmt: skip
def test_an_answer_that_is_none_is_unknown(text: str) -> None:
    assert severities(read(text)) == ["unknown"]


def test_a_diagnostic_that_could_not_run_is_unknown() -> None:
    text = json.dumps({ROOTS[1]: {"runtime_error": "no host engine", "test_categories": []}})
    (one,) = found(read(text))
    assert one.severity == "unknown" and "no host engine" in one.detail


@pytest.mark.parametrize(
    ("word", "severity"),
    [("Healthy", "healthy"), ("Warning", "warn"), ("Failure", "now"), ("Purple", "unknown")],
)
def test_overall_health(word: str, severity: str) -> None:
    text = json.dumps({"body": {"Overall Health": {"value": word}}})
    assert severities(read(text)) == [severity]
    assert severities(read('{"body": 3}')) == ["unknown"]
