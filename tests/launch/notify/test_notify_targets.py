"""Targets of `--notify`: what is read from them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.launch import torchrun_arguments
from outlast.launch.notify.notify_targets import read_target

VARIABLES = {
    "URL": "https://hooks.slack.com/services/T0/B0/x1\n",
    "TAIL": "T0/B0/x1",
    "KEY": "k3y",
    "EMPTY": "",
    "LINES": "https://a.example/\nb",
    "SPACE": "https://a.example/a b",
}


def test_secrets_come_from_variables() -> None:
    for text in ("slack+env:URL", "slack+https://hooks.slack.com/services/env:TAIL"):
        target = read_target(text, VARIABLES)
        assert (target.template, target.host, target.port) == ("slack", "hooks.slack.com", 443)
        assert target.path == "/services/T0/B0/x1" and target.label == "slack at hooks.slack.com"
    paged = read_target("pagerduty+http://[::1]:81/v2?a=b%20c&routing_key=env:KEY", VARIABLES)
    assert (paged.routing_key, paged.path, paged.authority) == ("k3y", "/v2?a=b+c", "[::1]:81")
    assert paged.messages == ("failure", "done")
    hook = read_target("https://a.example/x?t=env:KEY on=done,incident bearer=env:KEY", VARIABLES)
    assert (hook.path, hook.bearer, hook.messages) == ("/x?t=k3y", "k3y", ("incident", "done"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty target"),
        ("ftp://a.example", "no URL of a server"),
        ("a.example/hook", "no URL of a server"),
        ("https://a.example:99999", "no URL"),
        ("https://user:s3cret@a.example", "bearer=env:NAME"),
        ("https://a.example?api_key=s3cret", "api_key=env:NAME"),
        ("slack+https://hooks.slack.com/services/s3cret", "slack+env:NAME"),
        ("pagerduty+https://a.example?routing_key=s3cret", "routing_key=env:NAME"),
        ("pagerduty+https://a.example", "routing_key=env:NAME"),
        ("env:MISSING", "MISSING is not set"),
        ("env:EMPTY", "EMPTY is empty"),
        ("env:LINES", "LINES is empty, or has characters"),
        ("env:SPACE", "the value of SPACE has characters"),
        ("https://a.example#s3cret", "fragment"),
        ("https://ä.example", "xn--"),
        ("https://a.example on=failures", "on=failures: the messages are"),
        ("https://a.example bearer=s3cret", "takes env:NAME"),
        ("https://a.example retries=3", "unknown option 'retries'"),
    ],
)
def test_other_targets_are_refused_without_showing_secrets(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_target(text, VARIABLES)
    assert why in str(refused.value) and "nothing was started" in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_the_command_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    for text in ("env:NO_SUCH_HOOK", "https://a.example?token=s3cret"):
        assert main(["run", "--nproc-per-node=1", "--notify", text, "x.py"]) == 2
        shown = capsys.readouterr().err
        assert "notify" in shown and "s3cret" not in shown
    monkeypatch.setenv("HTTPS_PROXY", "socks5://a.example:1")
    assert main(["run", "--nproc-per-node=1", "--notify", "https://a.example", "x.py"]) == 2
    assert "HTTPS_PROXY" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


def test_the_plan_has_names_of_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://a.example/s3cret")
    (tmp_path / "x.py").touch()
    words = ["--nproc-per-node=1", "--notify", "env:HOOK", str(tmp_path / "x.py")]
    assert torchrun_arguments.parse(words).notify == ("env:HOOK",)
