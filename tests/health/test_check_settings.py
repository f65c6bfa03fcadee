"""Settings file of checks: errors are reported before any probe."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.health.check_settings import (
    CheckSettings,
    DrainSettings,
    parse_settings,
    read_settings,
)
from outlast.health.node_examination import LOCK_S, PROFILES, SHIPPED, all_checks, checks_of_profile

WHOLE = """
cluster = "rsc"
[gpus]
count = 8
[links.expected."mlx5_0/1"]
rate_gbps = 400
[mounts.expected."/scratch"]
type = "lustre"
[services]
active = ["munge", "slurmd.service"]
[profiles]
prolog = ["gpu", "mount"]
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "check.toml"
    path.write_text(WHOLE)
    settings = read_settings(path)
    assert settings.gpus.count == 8 and settings.links.expected["mlx5_0/1"].rate_gbps == 400.0
    assert settings.mounts.expected["/scratch"].writable is True
    names = [check.name for check in checks_of_profile("prolog", settings, all_checks(settings))]
    assert names == ["gpu", "mount"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[gpu]\ncount = 8", "gpu is unknown: did you mean gpus?"),
        ("[gpus]\ncuont = 8", "did you mean gpus.count?"),
        ('[mounts.expected."/a"]\ntpye = "nfs"', 'did you mean mounts.expected."/a".type?'),
        ("[flaps]\ntimes = 0", "flaps.times must be above zero"),
        ("[flaps]\nwindow_s = nan", "flaps.window_s must be a number"),
        ("[gpus]\ncount = 'eight'", "$.gpus.count"),
        ("[gpus]\ncount = -1", "gpus.count must be a number of at least 0"),
        ("[memory]\ntotal_gib = nan", "memory.total_gib must be a number"),
        ('[links.expected."a/1"]\nrate_gbps = inf', "links.expected.a/1.rate_gbps must be"),
        ('[mounts.expected."/"]\nfull_percent = 970', "full_percent must be from 0 to 100"),
        ("[drain]\npercent = 200", "drain.percent must be from 0 to 100"),
        ('[mounts]\nignore = ["/a"]\n[mounts.expected."/a"]', "/a is expected and ignored"),
        ('[links]\nignore = ["eth0"]\n[links.expected.eth0]', "eth0 is expected and ignored"),
        ("version = 2", "version 2 is unknown"),
        ('[mounts.expected.scratch]\ntype = "nfs"', "not an absolute path"),
        ('[services]\nactive = ["--help"]', "is not a service name"),
        ("[gpus", "check.toml"),
        ("x = " + "[" * 5000, "check.toml"),
        ("\0", "check.toml"),
        ("xyz = 1", "known are version, cluster"),
    ],
)
def test_invalid_settings_are_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "check.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert word in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*; nothing was checked"):
        read_settings(tmp_path / "none")
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match=r"larger than.*; nothing was checked"):
        read_settings(tmp_path / "large")


def test_every_profile_has_checks_that_there_are() -> None:
    names = {check.name for check in SHIPPED}
    assert len(names) == len(SHIPPED)
    for profile, plan in PROFILES.items():
        assert set(plan.checks) <= names and plan.within_s > 0
        assert checks_of_profile(profile, CheckSettings(), all_checks(CheckSettings()))
    words_with_slurm_s = (
        3 * DrainSettings().deadline_s + DrainSettings().deadline_s
    )  # and the ledger
    assert PROFILES["periodic"].within_s + LOCK_S + words_with_slurm_s < 60, "Slurm kills it then"


def test_a_check_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"did you mean mount\?"):
        checks_of_profile("periodic", CheckSettings(), all_checks(CheckSettings()), ["mounts"])


def test_custom_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site_checks_of_test.py").write_text(
        "from outlast.health.check_contract import Check, Sample\n"
        "CHECKS = (Check('site', 'other', Sample, lambda _: (), lambda _s, _a: ()),)\n"
        "TWICE = Check('gpu', 'other', Sample, lambda _: (), lambda _s, _a: ())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def names(*own: str) -> list[str]:
        settings = parse_settings({"own": list(own)}, "t")
        return [check.name for check in checks_of_profile("prolog", settings, all_checks(settings))]

    assert names("site_checks_of_test:CHECKS")[-1] == "site"
    for own, word in (
        ("site_checks_of_test:TWICE", "a check 'gpu' exists already"),
        ("site_checks_of_test:NONE", "NONE"), ("no_such_module_of_test", "No module"),
        ("site_checks_of_test:Sample", "is not a Check, or several"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            names(own)
