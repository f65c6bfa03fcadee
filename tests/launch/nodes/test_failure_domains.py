"""Failure domains of nodes: their sources, and the order of nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import ConfigError
from outlast.launch.nodes.failure_domains import domain_of, from_environment, order_nodes


def test_a_topology_file_names_each_host(tmp_path: Path) -> None:
    file = tmp_path / "topology"
    file.write_text("# rows and racks\nn1 row1/rack1\n\nn2  row1/rack2  # at the door\n")
    assert domain_of("n1", str(file)) == "row1/rack1"
    assert domain_of("n2", str(file)) == "row1/rack2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("n1 rack1\n", "has no line for this host"),
        ("n2 rack1\nn2 rack2\n", "gives two domains, rack1 and rack2"),
        ("n2\n", "line 1 of"),
        ("n2 rack1 rack2\n", "line 1 of"),
        ("n2 rack1//7\n", "gives the failure domain 'rack1//7'"),
        ("n2 a/b/c/d/e/f/g/h/i\n", "gives the failure domain"),
        ("n2 \x1b[2J\n", "gives the failure domain"),
    ],
)
def test_a_bad_topology_file_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "topology"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        domain_of("n2", str(file))
    assert str(caught.value).startswith("n2: ") and says in str(caught.value)
    assert "nothing was started" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "domain"),
    [
        ({}, ""),
        ({"OUTLAST_DOMAIN": "rack7", "SLURM_TOPOLOGY_ADDR": "s0.n1"}, "rack7"),
        (
            {
                "SLURM_TOPOLOGY_ADDR": "s0.s4.n1.cluster.org",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            },
            "s0/s4",
        ),
        ({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ""),
    ],
)
def test_the_environment_names_a_domain(environment: dict[str, str], domain: str) -> None:
    assert from_environment(environment)[0] == domain


def test_ranks_are_contiguous_by_domain_and_spares_lie_in_several() -> None:
    domains = {"a": "r2", "b": "r1", "c": "r2", "d": "r1", "e": "r1", "f": "r2"}
    assert order_nodes(domains, {}, 4) == ["b", "d", "a", "c", "e", "f"]
    assert order_nodes(domains, {0: "f"}, 4) == ["f", "b", "d", "a", "e", "c"]
    assert order_nodes(dict.fromkeys("cab", ""), {}, 2) == ["a", "b", "c"]


@given(
    st.dictionaries(st.sampled_from("abcdefghijkl"), st.sampled_from(["r1", "r2", "r3"])).filter(
        bool
    ),
    st.data(),
)
def test_no_domain_has_more_spares_than_it_must(
    domains: dict[str, str], data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(1, len(domains)))
    order = order_nodes(domains, {}, nodes)
    assert sorted(order) == sorted(domains)
    with_ranks = [domains[host] for host in order[:nodes]]
    assert with_ranks == sorted(with_ranks)
    ranks = Counter(with_ranks)
    spares = Counter(domains[host] for host in order[nodes:])
    for domain in spares:
        # a spare of this domain in place of one elsewhere would leave that one with more nodes
        assert ranks[domain] + 1 >= max(ranks.values())
