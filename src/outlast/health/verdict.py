"""What a report is worth as an exit code, for Slurm and for Nagios."""

from __future__ import annotations

from outlast.health.report import Report, first_line
from outlast.log_records import Severity

EXIT_SEVERITY: dict[Severity, int] = {"now": 1, "drain": 1, "unknown": 3, "warn": 0, "healthy": 0}
NAGIOS: dict[Severity, int] = {"now": 2, "drain": 2, "unknown": 3, "warn": 1, "healthy": 0}
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


def exit_code(report: Report, *, unknown_passes: bool) -> int:
    """For Slurm and for hands. A report that is unknown because nothing at all was checked does not
    pass in any case."""
    if report.severity == "unknown" and unknown_passes and report.findings:
        return 0
    return EXIT_SEVERITY[report.severity]


def nagios(report: Report) -> tuple[int, str]:
    """The code, and the plugin's line: text, and figures after a bar."""
    code = NAGIOS[report.severity]
    said = first_line(report.findings, report.severity).replace("|", "/").replace("\n", " ")
    figures = " ".join(
        f"{severity}={sum(one.severity == severity for one in report.findings)}"
        for severity in ("now", "drain", "unknown", "warn", "healthy")
    )
    return code, f"{WORDS[code]} - {report.node}: {said} | {figures}"
