"""Targets of `--otlp`: URLs, headers from variables, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.launch.otlp.otlp_target import read_otlp_target

VARIABLES = {"TOKEN": "s3cret", "KEY": "k3y", "WHERE": "https://otlp.example.com/otlp/"}


def test_headers_come_from_variables() -> None:
    target = read_otlp_target("env:WHERE bearer=env:TOKEN header=x-api-key=env:KEY", VARIABLES)
    assert target.headers == {"Authorization": "Bearer s3cret", "x-api-key": "k3y"}
    assert target.metrics_url == "https://otlp.example.com/otlp/v1/metrics"
    assert target.traces_url == "https://otlp.example.com/otlp/v1/traces"
    assert read_otlp_target("http://[::1]:4318", {}).traces_url == "http://[::1]:4318/v1/traces"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an empty target"),
        ("collector:4318", "no URL of a server"),
        ("grpc://collector:4317", "no URL of a server"),
        ("http://user:s3cret@collector", "a user before its host"),
        ("http://collector/v1/traces", "leave /v1/metrics and /v1/traces out"),
        ("http://collector/?token=s3cret", "has a query"),
        ("http://collector bearer=s3cret", "may be a secret"),
        ("http://collector header=x-api-key=s3cret", "may be a secret"),
        ("http://collector header=a:b=env:KEY", "header= takes NAME=env:NAME"),
        ("http://collector header=env:KEY", "header= takes NAME=env:NAME"),
        ("http://collector bearer=env:KEY header=authorization=env:KEY", "given twice"),
        ("http://collector timeout=5", "unknown option 'timeout'"),
        ("http://collector bearer=env:NO", "the variable NO is not set"),
    ],
)
def test_other_targets_are_refused_without_showing_secrets(text: str, why: str) -> None:
    with pytest.raises(UsageError, match="nothing was started") as caught:
        read_otlp_target(text, VARIABLES)
    assert why in str(caught.value) and "s3cret" not in str(caught.value)


def test_the_command_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    for target in ("collector:4318", "http://collector bearer=env:NO_SUCH_VARIABLE"):
        assert main(["run", "--run-dir=new", "--otlp", target, "x.py"]) == 2
        assert "--otlp" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
