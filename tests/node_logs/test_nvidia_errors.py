"""XID policy: coverage, versions, sources and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.node_logs.nvidia_errors import XidPolicy, disagreements, load_policy, shipped_policy


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_it_covers_the_catalogue() -> None:
    policy = shipped_policy()
    assert set(policy.xid) == set(range(1, 173)) and policy.version
    silent = [code for code, entry in policy.xid.items() if "nvidia" not in entry.says]
    assert silent == list(range(162, 173))  # for these the catalogue names no action


@pytest.mark.parametrize(
    ("code", "severity", "action"),
    [(79, "now", "reboot"), (48, "now", "workflow"), (63, "drain", "reset-gpu"),
     (13, "warn", "restart-app"), (119, "now", "reset-gpu"), (5, "unknown", "contact")],
)  # fmt: skip
def test_severity_and_action_are_two_answers(code: int, severity: str, action: str) -> None:
    judged = shipped_policy().judge("xid", code)
    assert (judged.severity, judged.action) == (severity, action)


def test_an_unknown_code_is_never_healthy() -> None:
    assert shipped_policy().judge("xid", 99_999).severity == "unknown"
    assert shipped_policy().judge("sxid", 99_999).severity == "unknown"
    healthy = [
        code for code in range(1000) if shipped_policy().judge("xid", code).severity == "healthy"
    ]
    assert healthy == []


def test_the_text_of_the_line_decides() -> None:
    judge = shipped_policy().judge
    assert judge("xid", 145, "RLW_REMAP Nonfatal XC1 i0 Link 10").severity == "warn"
    assert judge("xid", 145, "RLW_REMAP Fatal XC1 i0 Link 10").severity == "now"
    assert judge("xid", 145).severity == "drain"
    changed = "GPU recovery action changed from {} to {}"
    none, reset, both = "0x0 (None)", "0x1 (GPU Reset Required)", "0x4 (Drain and Reset)"
    assert judge("xid", 154, changed.format(both, reset))[2:] == ("now", "reset-gpu")
    assert judge("xid", 154, changed.format(none, both))[2:] == ("drain", "reset-gpu")
    assert judge("xid", 154, changed.format(reset, none))[2:] == ("healthy", "ignore")
    assert judge("sxid", 12028, "Fatal, Link 3").severity == "now"
    assert judge("sxid", 77, "Non-fatal, Link 3").severity == "warn"


def test_disagreements_of_sources() -> None:
    found = disagreements(63)
    assert found is not None
    assert found.takes == ("gpud", "k8s", "azure") and found.leaves == ("nvidia", "gcm")
    uncontained = disagreements(95)
    assert uncontained is not None and uncontained.leaves == ("azure",)
    assert disagreements(79) is None and disagreements(99_999) is None
    assert sum(disagreements(code) is not None for code in range(1, 173)) >= 15


def test_a_finding_leads_back_to_its_entry() -> None:
    entry = shipped_policy().entry("XID 79")
    assert entry is not None and entry.action == "reboot"
    switch = shipped_policy().entry("SXID 20034")
    assert switch is not None and switch.symptom == "nvlink"
    for none in ("", "XID", "XID x", "MCE 4", "XID 99999", "XID " + "9" * 5000):
        assert shipped_policy().entry(none) is None


def test_a_custom_file_overrides_single_entries(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'version = "site-3"\n[xid]\n63 = { severity = "warn" }\n'
        '900 = { name = "ours", symptom = "other", severity = "drain", action = "inspect" }\n'
        '[lines]\nswitch = [{ has = "fatal", severity = "drain", action = "inspect" }]\n',
    )
    mine = load_policy(path)
    assert mine.xid[63].severity == "warn" and mine.xid[63].action == "reset-gpu"
    assert mine.xid[900].name == "ours" and mine.xid[79] == shipped_policy().xid[79]
    assert mine.judge("sxid", 20034, "Fatal, Link 1").severity == "drain"
    assert mine.version == f"site-3 over {shipped_policy().version}"
    assert shipped_policy().xid[63].severity == "drain"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[xid]\n79 = { severity = "fatal" }',
            r"mine.toml: xid\.79: .*fatal.*there are now, drain",
        ),
        ('[xid]\n79 = { action = "pray" }', r"xid\.79: .*pray.*there are restart-app"),
        ("[xid]\n79 = 3", r"xid\.79 must be a table"),
        ('[xid]\n900 = { severity = "now" }', r"xid\.900: .*name"),
        ('[xid]\nseventy = { severity = "now" }', r"xid\.seventy: a code is a number"),
        ('[xid]\n79 = { sevrity = "now" }', r"xid\.79: .*sevrity"),
        ('[xid]\n79 = { lines = "none" }', r"xid\.79: there is no lines\.none"),
        ('[xid]\n79 = { says = { me = "x" } }', r"xid\.79: .*me"),
        ("[codes]\n", "codes is not known; there are version, lines, xid, sxid"),
        ("version = 3", "version must be a text"),
        ("xid = [1]", "mine.toml: xid must be a table"),
        ("[lines]\nswitch = 3", r"lines\.switch"),
        ("no toml", "mine.toml: "),
        ("[xid]\n" + "9" * 5000 + " = {}", "a code is a number"),
        ("x = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_an_error_names_the_entry(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_policy(written(tmp_path, text))


def test_no_file_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.toml: No such file"):
        load_policy(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="that is no policy"):
        load_policy(written(tmp_path, "#" * (1 << 20) + "\n#"))


def test_entries_quote_known_sources_only() -> None:
    policy: XidPolicy = shipped_policy()
    for entry in policy.xid.values():
        assert all(entry.says.values())
    assert {source for entry in policy.xid.values() for source in entry.says} == {
        "nvidia", "gpud", "gcm", "k8s", "azure",
    }  # fmt: skip
