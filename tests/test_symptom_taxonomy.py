"""Failure taxonomy (Table I) and its differential diagnosis."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.log_records import DOMAINS, SYMPTOMS, TAXONOMY, Symptom, possible_domains

PAPER = {  # marks of Table I: user program, system software, hardware infrastructure
    "oom": "100", "gpu-unavailable": "011", "gpu-memory": "001", "gpu-driver": "010",
    "nvlink": "001", "ib-link": "001", "filesystem": "010", "main-memory": "001",
    "ethlink": "001", "pcie": "001", "nccl-timeout": "111", "services": "111",
}  # fmt: skip


def test_it_is_the_papers_table() -> None:
    marks = {
        row.symptom: "".join("1" if domain in row.domains else "0" for domain in DOMAINS)
        for row in TAXONOMY.values()
        if row.paper
    }
    assert marks == PAPER


def test_every_symptom_has_a_row() -> None:
    assert set(TAXONOMY) == set(SYMPTOMS)
    assert all(row.domains and all(row.causes) for row in TAXONOMY.values())


def test_a_timeout_alone_rules_out_no_domain() -> None:
    assert possible_domains({"nccl-timeout"}).domains == set(DOMAINS)


def test_a_link_beside_it_leaves_the_hardware() -> None:
    left = possible_domains({"nccl-timeout", "ib-link"})
    assert left.domains == {"hardware"} and left.single
    assert "switch" in left.causes and "deadlock" not in left.causes


def test_symptoms_without_a_common_domain_have_two_causes() -> None:
    left = possible_domains({"oom", "gpu-memory"})
    assert not left.single and left.domains == frozenset()
    assert left.of == {"oom": {"user"}, "gpu-memory": {"hardware"}}


def test_nothing_seen_rules_nothing_out() -> None:
    left = possible_domains(set())
    assert left.domains == set(DOMAINS) and left.causes == ()


@given(st.sets(st.sampled_from(SYMPTOMS)), st.sampled_from(SYMPTOMS))
@settings(max_examples=50)
def test_one_more_symptom_never_widens(seen: set[Symptom], more: Symptom) -> None:
    assert possible_domains({more, *seen}).domains <= possible_domains(seen).domains
