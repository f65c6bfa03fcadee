"""Findings from `dcgmi diag -j` and `dcgmi health -c -j`.

The root is "DCGM Diagnostic" in DCGM 4 and "DCGM GPU Diagnostic" before. DCGM 4 merged the
deployment tests into "software" and renamed other tests. Severity unknown: a skipped test, an
unknown status, a truncated output, and a test of the level that is missing from the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from outlast.log_records import SEVERITIES, Finding, Severity, Symptom
from outlast.node_logs.log_readings import Reading, UnreadText, cut_text

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
CHECK = "dcgm.diag"
HEALTH = "dcgm.health"
TEXT_MAX = 16 << 20  # characters

OTHER_NAMES = {
    "blacklist": "denylist",
    "memory": "gpumemory",
    "smstress": "diagnostic",
    "pageretirement": "pageretirementrowremap",
    "pci": "pcie",
    "pcienvlink": "pcie",
    "memorybandwith": "memorybandwidth",
    "pulsetest": "pulse",
}
DEPLOYMENT = (
    "denylist",
    "nvmllibrary",
    "cudamainlibrary",
    "permissionsandosblocks",
    "persistencemode",
    "environmentvariables",
    "pageretirementrowremap",
    "graphicsprocesses",
    "inforom",
)
SYMPTOMS: dict[str, Symptom] = {
    "software": "gpu-driver", "denylist": "gpu-driver", "nvmllibrary": "gpu-driver",
    "cudamainlibrary": "gpu-driver", "cudatoolkitlibrary": "gpu-driver",
    "permissionsandosblocks": "services", "persistencemode": "gpu-driver",
    "environmentvariables": "services", "pageretirementrowremap": "gpu-memory",
    "graphicsprocesses": "services", "inforom": "gpu-driver", "fabricmanager": "nvlink",
    "pcie": "pcie", "nvbandwidth": "pcie", "gpumemory": "gpu-memory",
    "memorybandwidth": "gpu-memory", "memtest": "gpu-memory", "targetedpower": "thermal",
    "contextcreate": "gpu-unavailable", "eudtest": "other",
}  # fmt: skip
OF_LEVEL: dict[int, tuple[str, ...]] = {
    1: (), 2: ("pcie", "gpumemory"),
    3: ("pcie", "gpumemory", "diagnostic", "targetedstress", "targetedpower", "memorybandwidth"),
    4: ("pcie", "gpumemory", "diagnostic", "targetedstress", "targetedpower", "memorybandwidth",
        "memtest", "pulse"),
}  # fmt: skip
STATUSES: dict[str, Severity] = {"pass": "healthy", "fail": "drain", "warn": "warn"}
ERRORS: dict[int, Severity] = {1: "warn", 2: "now", 6: "drain"}  # DCGM's severity of an error
OVERALL: dict[str, Severity] = {"healthy": "healthy", "warning": "warn", "failure": "now"}


class DcgmResult(NamedTuple):
    """Result of one test on one device."""

    test: str
    device: str
    severity: Severity
    detail: str


def findings(
    text: str,
    *,
    cluster: str,
    node: str,
    t_ns: int,
    level: int | None = None,
    without: Collection[str] = (),
) -> Iterator[Reading]:
    """Yield failed, warning and missing tests, or one healthy finding if all tests passed.

    `t_ns`: time of the run, which the output does not contain. `level`: the N of -r, to find
    missing tests. `without`: names of tests that may be skipped ("EUD Test").
    """

    def found(check: str, symptom: Symptom, one: DcgmResult) -> Finding:
        return Finding(
            t_ns=t_ns,
            cluster=cluster,
            node=node,
            check=check,
            symptom=symptom,
            severity=one.severity,
            code="",
            device=one.device,
            detail=cut_text(one.detail),
        )

    answer = _decode(text)
    if isinstance(answer, UnreadText):
        yield answer
        yield found(CHECK, "other", DcgmResult("", "", "unknown", answer.reason))
        return
    if "body" in answer:
        yield from (found(HEALTH, "other", one) for one in _health(answer["body"]))
        return
    tested, odd = _tests(answer)
    yield from (UnreadText(0, reason, "") for reason in odd)
    tested += _missing_tests(tested, level)
    spared = {canonical_name(name) for name in without}
    tested = [one for one in tested if one.severity != "unknown" or one.test not in spared]
    if not tested:
        tested = [DcgmResult("", "", "unknown", "the answer holds no test")]
    for one in tested:
        if one.severity != "healthy":
            yield found(CHECK, SYMPTOMS.get(one.test, "other"), one)
    if not odd and all(one.severity == "healthy" for one in tested):
        yield found(
            CHECK, "other", DcgmResult("", "", "healthy", f"{len(tested)} results, all passed")
        )


def _decode(text: str) -> dict[str, Any] | UnreadText:
    """Decode the output of a diagnostic or a health check.

    Some versions print lines before the JSON object.
    """
    begin = text.find("{")
    try:
        if begin < 0 or len(text) > TEXT_MAX:
            raise ValueError("no JSON" if begin < 0 else f"longer than {TEXT_MAX:,} characters")
        answer = msgspec.json.decode(text[begin:].encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        return UnreadText(0, f"no complete answer of dcgmi: {error}", cut_text(text[:1000]))
    if not isinstance(answer, dict) or not (any(r in answer for r in ROOTS) or "body" in answer):
        return UnreadText(
            0, f"no answer of dcgmi: neither {' nor '.join(ROOTS)}", cut_text(text[:1000])
        )
    return answer


def _tests(answer: dict[str, Any]) -> tuple[list[DcgmResult], list[str]]:
    """Return all results, and the anomalies of the output's structure."""
    root = next(answer[name] for name in ROOTS if name in answer)
    odd: list[str] = []
    tested: list[DcgmResult] = []
    if isinstance(root, dict):
        failed = root.get("runtime_error") or answer.get("runtime_error")
        if failed:
            tested.append(DcgmResult("", "", "unknown", f"the diagnostic did not run: {failed}"))
        categories = root.get("test_categories")
    else:
        categories = root
        odd.append("no test_categories: the tests were read directly")
    for category in _objects(categories, "categories", odd):
        for test in _objects(category.get("tests"), "tests", odd):
            tested += _results(test, odd)
    return tested, odd


def _objects(value: object, what: str, odd: list[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        odd.append(f"no list of {what}")
        return []
    objects = [one for one in value if isinstance(one, dict)]
    if len(objects) < len(value):
        odd.append(f"something else among the {what}")
    return objects


def _results(test: dict[str, Any], odd: list[str]) -> list[DcgmResult]:
    title = str(test.get("name", ""))
    name = canonical_name(title)
    results = test.get("results")
    if results is None and isinstance(test.get("test_summary"), dict):
        results = [test["test_summary"]]
    found = [_result(name, title, one) for one in _objects(results, f"results of {title}", odd)]
    return found or [DcgmResult(name, "", "unknown", f"{title}: no result")]


def _result(name: str, title: str, result: dict[str, Any]) -> DcgmResult:
    status = str(result.get("status", "no status"))
    severity: Severity = STATUSES.get(status.lower(), "unknown")
    warnings = result.get("warnings") or result.get("warning") or result.get("info") or ""
    if isinstance(warnings, list):
        objects = [one for one in warnings if isinstance(one, dict)]
        errors = {_severity(one) for one in objects}
        if severity == "drain" and errors:
            severity = next(one for one in SEVERITIES if one in errors)
        texts = [one.get("warning", "") if isinstance(one, dict) else one for one in warnings]
        warnings = "; ".join(str(one) for one in texts)
    return DcgmResult(name, _device(result), severity, f"{title}: {status}. {warnings}".strip(". "))


def _severity(warning: dict[str, Any]) -> Severity:
    code = warning.get("error_severity")
    return ERRORS.get(code, "drain") if isinstance(code, int) else "drain"


def _device(result: dict[str, Any]) -> str:
    if "entity_id" in result:
        return f"{result.get('entity_group', 'entity')} {result['entity_id']}"
    ids = result.get("gpu_ids", result.get("gpu_id"))
    return "" if ids is None else f"GPU {ids}"


def canonical_name(title: str) -> str:
    """Return a test's name independent of the DCGM version."""
    name = "".join(letter for letter in title.lower() if letter.isalnum())
    return OTHER_NAMES.get(name, name)


def _missing_tests(tested: list[DcgmResult], level: int | None) -> list[DcgmResult]:
    if level is None:
        return []
    ran = {one.test for one in tested}
    wanted = OF_LEVEL.get(level, OF_LEVEL[1])
    wanted = wanted if "software" in ran else (*DEPLOYMENT, *wanted)
    return [
        DcgmResult(name, "", "unknown", f"{name}: not in the answer of level {level}")
        for name in wanted
        if name not in ran
    ]


def _health(body: object) -> Iterator[DcgmResult]:
    overall = body.get("Overall Health") if isinstance(body, dict) else None
    word = overall.get("value") if isinstance(overall, dict) else overall
    severity = OVERALL.get(str(word).lower(), "unknown")
    yield DcgmResult("", "", severity, f"overall health: {word}")
