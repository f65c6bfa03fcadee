"""`outlast check` on this machine: reports, exit codes, state, recordings, Nagios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli.main import main
from outlast.errors import StorageError
from outlast.health.node_report import WORST_FIRST, NodeReport, exit_code, nagios, worst_severity
from outlast.log_records import SEVERITIES, Finding, Severity

OWN = """
from outlast.health.check_contract import Check, Probe, Observation as Said, Sample

class Weather(Sample, frozen=True):
    said: str

def take():
    return Weather(said=SAID)

def judge(sample, about):
    yield Said(sample.said, "as told")

CHECK = Check("weather", "other", Weather, lambda _: [Probe("", take)], judge)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A check of one's own that finds what it is told to."""

    def settings(severity: str, **more: object) -> list[str]:
        name = f"weather_{severity}_of_test"
        (tmp_path / f"{name}.py").write_text(OWN.replace("SAID", repr(severity)))
        monkeypatch.syspath_prepend(str(tmp_path))
        path = tmp_path / "check.toml"
        lines = [f'own = ["{name}:CHECK"]', 'node = "n7"']
        lines += [f"{key} = {json.dumps(value)}" for key, value in more.items()]
        path.write_text("\n".join(lines))
        return ["check", "--only", "weather", "--settings", str(path)]

    return settings


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it lacks: every check of the profile has said something, and nothing is healthy
    that was not seen."""
    code = main(["check", "--profile", "periodic", "--state", str(tmp_path), "--json"])
    report = msgspec.json.decode(capsys.readouterr().out, type=NodeReport)
    assert code == exit_code(report, unknown_passes=False)
    heard = {one.check.partition(".")[0] for one in report.findings}
    heard |= {one.check for one in report.not_applicable}
    assert heard >= {
        "kernel", "mount", "memory", "link", "gpu", "disk", "smart", "clock", "service",
    }  # fmt: skip
    assert "healthy" in {one.severity for one in report.findings if one.check == "memory"}
    assert (tmp_path / "check.json").exists()
    main(["check", "--profile", "periodic", "--state", str(tmp_path), "--json"])
    again = msgspec.json.decode(capsys.readouterr().out, type=NodeReport)
    assert any("does not exist yet" in note for note in report.notes) and again.notes == ()


@pytest.mark.parametrize(
    ("severity", "code", "critical"),
    [("now", 1, 2), ("drain", 1, 2), ("unknown", 3, 3), ("warn", 0, 1), ("healthy", 0, 0)],
)
def test_exit_codes(
    own: Any, severity: str, code: int, critical: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(own(severity)) == code
    text = capsys.readouterr().out
    assert text.startswith(f"n7: {severity}")
    assert main([*own(severity), "--format", "nagios"]) == critical
    line = capsys.readouterr().out
    words = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
    assert line.startswith(f"{words[critical]} - n7: ") and line.count("\n") == 1
    assert f"{severity}=1" in line.partition("|")[2]


def test_unknown_passes_only_with_unknown_passes(
    own: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(own("unknown", unknown_passes=True)) == 0
    assert main(own("drain", unknown_passes=True)) == 1
    assert "unknown" in capsys.readouterr().out


def test_a_recording_is_judged_the_same_again(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    assert main([*own("drain"), "--json", "--record", str(record)]) == 1
    first = json.loads(capsys.readouterr().out)
    assert main(["check", "--replay", str(record), "--json"]) == 1
    again = json.loads(capsys.readouterr().out)
    assert again["findings"] == first["findings"] and again["node"] == "n7"
    assert again["notes"] == ["replayed"]


def test_a_recording_of_this_machine_is_judged_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, state = tmp_path / "record.jsonl", str(tmp_path / "state")
    main(["check", "--json", "--state", state])
    capsys.readouterr()
    code = main(["check", "--json", "--state", state, "--record", str(record)])
    first = json.loads(capsys.readouterr().out)
    assert main(["check", "--json", "--replay", str(record)]) == code
    again = json.loads(capsys.readouterr().out)
    assert again["findings"] == first["findings"]
    assert again["not_applicable"] == first["not_applicable"]


def test_a_recording_by_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, settings = tmp_path / "record.jsonl", tmp_path / "s.toml"
    main(["check", "--only", "memory", "--record", str(record)])
    settings.write_text("[memory]\ntotal_gib = 1e6\n")
    assert main(["check", "--replay", str(record), "--settings", str(settings)]) == 1
    assert "1e+06 are expected" in capsys.readouterr().out


def test_expectations_without_a_recorded_sample_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, settings = tmp_path / "record.jsonl", tmp_path / "s.toml"
    monkeypatch.setenv("PATH", str(tmp_path))  # without systemctl
    main(["check", "--only", "service", "mount", "--record", str(record)])
    settings.write_text(
        '[services]\nactive = ["munge"]\n[mounts.expected."/none"]\n[mounts.expected."/"]\n'
    )
    capsys.readouterr()
    main(["check", "--replay", str(record), "--settings", str(settings), "--json"])
    report = msgspec.json.decode(capsys.readouterr().out, type=NodeReport)
    unseen = {(one.check, one.device) for one in report.findings if "not probed" in one.detail}
    assert unseen == {("service", ""), ("mount", "/none")} and report.not_applicable == ()
    assert {one.severity for one in report.findings if one.check == "service"} == {"unknown"}
    assert main(["check", "--replay", str(record)]) == 0


def test_damaged_samples_are_unknown_and_damaged_recordings_refused(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    main([*own("healthy"), "--record", str(record)])
    good = record.read_text()
    record.write_text(good.replace('{"said":"healthy"}', '{"said":7}'))
    capsys.readouterr()
    assert main(["check", "--replay", str(record)]) == 3
    assert "unreadable sample" in capsys.readouterr().out
    for damage in ("", "{}\n", good[:-20], good.replace('"version":1', '"version":9', 1)):
        record.write_text(damage)
        assert main(["check", "--replay", str(record)]) == 1
        assert "record.jsonl" in capsys.readouterr().err


def test_a_recording_that_lacks_samples_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    main(["check", "--only", "memory", "disk", "--record", str(record)])
    head, *samples = record.read_text().splitlines()
    record.write_text("\n".join([head, samples[0], ""]))
    assert main(["check", "--replay", str(record)]) == 1
    assert f"1 of {len(samples)} recorded samples" in capsys.readouterr().err
    old = json.loads(head)
    del old["samples"]
    record.write_text("\n".join([json.dumps(old), *samples]))
    main(["check", "--replay", str(record), "--json"])
    assert "may be incomplete" in json.loads(capsys.readouterr().out)["notes"][1]


def test_a_replay_judges_the_requested_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    main(["check", "--only", "memory", "disk", "--record", str(record)])
    capsys.readouterr()
    main(["check", "--replay", str(record), "--only", "memory", "--json"])
    assert {one["check"] for one in json.loads(capsys.readouterr().out)["findings"]} == {"memory"}
    for flags, said in (
        (("--only", "gup"), "did you mean gpu?"),
        (("--only", "gpu"), "no sample of gpu"),
        (("--profile", "prolog"), "recorded with --profile periodic"),
        (("--rank", "1"), "omit --ring"),
    ):
        assert main(["check", "--replay", str(record), *flags]) == 2
        assert said in capsys.readouterr().err


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "gpus"]) == 2
    assert "did you mean gpu?" in capsys.readouterr().err
    assert main(["check", "--profile", "prolog", "--drain"]) == 2
    assert main(["check", "--replay", "x", "--state", str(tmp_path)]) == 2
    assert main(["check", "--settings", str(tmp_path / "none")]) == 2
    capsys.readouterr()
    assert main(["check", "--settings", str(tmp_path / "none"), "--format", "nagios"]) == 3
    assert capsys.readouterr().out.startswith("UNKNOWN - nothing was checked")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--json", "--format", "nagios"), "exclude each other"),
        (("--rank", "1"), "need --ring"),
        (("--ring", "a:1", "--world", "2"), "--only neighbour"),
        (("--learn", "NEW", "--drain"), "excludes all flags but --json"),
        (("--learn", "NEW", "--settings", "x"), "excludes all flags but --json"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "new") if flag == "NEW" else flag for flag in flags]
    assert main(["check", *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["x = (", "raise RuntimeError('a mistake')", "import nowhere"])
def test_a_custom_check_module_that_cannot_be_imported_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unfit_checks_of_test.py").write_text(text)
    settings = tmp_path / "check.toml"
    settings.write_text('own = ["unfit_checks_of_test:CHECKS"]\n')
    assert main(["check", "--settings", str(settings)]) == 2
    assert "own: unfit_checks_of_test:CHECKS" in capsys.readouterr().err


def test_root_runs_no_check_that_others_can_name(
    own: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = own("healthy")
    Path(command[-1]).chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert main(command) == 2
    assert "other users can write to it" in capsys.readouterr().err


BROKEN = """
from outlast.health.check_contract import Check, Probe, Sample

def fails(*_):
    raise RuntimeError("a mistake in it")

def one(_):
    return [Probe("", Sample)]

CHECKS = (
    Check("judges-badly", "other", Sample, one, fails),
    Check("counts-badly", "other", Sample, one, lambda _s, _a: (), fails),
    Check("probes-badly", "other", Sample, fails, lambda _s, _a: ()),
    Check("says-nothing", "other", Sample, one, lambda _s, _a: ()),
    Check("has-no-probe", "other", Sample, lambda _: (), fails),
)
"""


def test_an_error_in_a_custom_check_ends_no_other_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_checks_of_test.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = tmp_path / "check.toml"
    settings.write_text('own = ["broken_checks_of_test:CHECKS"]\n[profiles]\nprolog = ["memory"]\n')
    names = ["judges-badly", "counts-badly", "probes-badly", "says-nothing", "memory"]
    asked = [*names, "has-no-probe"]
    assert main(["check", "--json", "--settings", str(settings), "--only", *asked]) == 3
    report = msgspec.json.decode(capsys.readouterr().out, type=NodeReport)
    told = {one.check: (one.severity, one.detail) for one in report.findings}
    assert told.keys() == set(names) and told["memory"][0] == "healthy"
    assert {told[name][0] for name in names[:4]} == {"unknown"}
    assert all("a mistake in it" in told[name][1] for name in names[:3])
    assert [one.check for one in report.not_applicable] == ["has-no-probe"], "it does not vanish"


def test_a_state_directory_that_cannot_be_used_ends_nothing(
    own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    state = ["--state", str(tmp_path / "file" / "state"), "--json"]
    assert main([*own("healthy"), *state]) == 3
    report = msgspec.json.decode(capsys.readouterr().out, type=NodeReport)
    assert [(one.check, one.severity) for one in report.findings] == [
        ("state", "unknown"), ("weather", "healthy"),
    ]  # fmt: skip
    assert main([*own("drain"), *state]) == 1


def test_nothing_checked_is_unknown() -> None:
    report = NodeReport(
        cluster="", node="n", profile="prolog", t_ns=0, took_s=0.0, severity=worst_severity([]),
        findings=(), not_applicable=(),
    )  # fmt: skip
    assert exit_code(report, unknown_passes=True) == 3
    assert nagios(report)[0] == 3


def test_the_worst_counts_and_unknown_is_above_a_warning() -> None:
    def finding(severity: Severity) -> Finding:
        return Finding(
            t_ns=0, cluster="", node="", check="", symptom="other", severity=severity, code="",
            device="", detail="",
        )  # fmt: skip

    assert set(WORST_FIRST) == set(SEVERITIES)
    for k, severity in enumerate(WORST_FIRST):
        assert worst_severity(map(finding, WORST_FIRST[k:])) == severity


@pytest.mark.process
def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom outlast.cli.main import main\nmain(['check', '--profile', 'prolog'])\n"
        "heavy = {'torch', 'numpy', 'polars', 'pynvml', 'scipy', 'ctypes'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_metrics_of_a_report_have_its_verdict(own: Any, tmp_path: Path) -> None:
    file = tmp_path / "check.prom"
    assert main([*own("drain"), "--metrics-file", str(file)]) == 1
    text = file.read_text()
    profile = 'profile="periodic only weather"'
    assert f'outlast_check_severity{{{profile},severity="drain"}} 1.0' in text
    assert f'outlast_check_severity{{{profile},severity="healthy"}} 0.0' in text
    assert f'outlast_check_findings{{check="weather",{profile},severity="drain"}} 1.0' in text
    assert 'outlast_check_node{cluster="",node="n7",profile="periodic only weather"} 1.0' in text


def test_metrics_that_cannot_be_written_change_no_verdict(
    own: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(path: Path, families: object) -> None:
        raise StorageError("check.prom: metrics not written: No space left on device")

    asked = [*own("healthy"), "--metrics-file", str(tmp_path / "check.prom")]
    monkeypatch.setattr("outlast.telemetry.metrics.metrics_file.write_metrics", full)
    assert main(asked) == 0
    assert "metrics not written: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--metrics-file=no/such/check.prom"], "its directory is missing; nothing was checked"),
        (["--metrics-file=."], "is no plain file now (a directory, a device, a link)"),
        (["--metrics-file=/dev/stdout"], "is no plain file now"),
        (["--metrics-file=x.prom", "--replay=x"], "does not examine this machine"),
        (["--metrics-file=x.prom", "--learn=x"], "excludes all flags"),
    ],
)
def test_metrics_files_that_cannot_be(
    flags: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", *flags]) == 2
    assert why in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_a_recording_replaces_no_pipe(tmp_path: Path, own: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main([*own("healthy"), "--record", str(tmp_path / "pipe")]) == 1
    assert (tmp_path / "pipe").is_fifo()
