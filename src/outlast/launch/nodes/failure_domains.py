"""Failure domains: what fails together with a node, and the order of nodes that follows.

A domain is a path from the largest part to the smallest, as in `row2/rack7/nvlink3`; "" is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from outlast import config
from outlast.errors import ConfigError

DOMAIN_VARIABLE = "OUTLAST_DOMAIN"
DOMAIN = re.compile(r"[A-Za-z0-9._:-]{1,64}(/[A-Za-z0-9._:-]{1,64}){0,7}")
_FILE_BYTES_MAX = 1 << 24


def domain_of(host: str, file: str) -> str:
    """Return the domain of a host: from the topology file, else OUTLAST_DOMAIN, else Slurm's
    SLURM_TOPOLOGY_ADDR; "" where none is given. Raises ConfigError, naming this host."""
    domain, source = (
        (_in_file(host, file), file) if file else from_environment(config.process_environment())
    )
    if domain and not DOMAIN.fullmatch(domain):
        raise ConfigError(
            f"{host}: {source} gives the failure domain {domain[:80]!r}; nothing was started; give"
            " one to eight names of letters, digits and ._:- with / between them, the largest"
            " domain first, as in row2/rack7"
        )
    return domain


def from_environment(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return this host's domain, and the variable that names it; "" without one.

    Slurm names switches and host, as in `s0.s4.node7` (`SLURM_TOPOLOGY_ADDR`, sbatch(1)).
    """
    if domain := environment.get(DOMAIN_VARIABLE, "").strip():
        return domain, DOMAIN_VARIABLE
    switches = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count("switch")
    levels = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")[:switches]
    return "/".join(levels), "SLURM_TOPOLOGY_ADDR"


def _in_file(host: str, file: str) -> str:
    """Return the domain of a host in a file of lines `HOST DOMAIN`; # begins a comment."""
    try:
        with Path(file).open(errors="replace") as lines:
            text = lines.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"{host}: the topology file {file} cannot be read ({error.strerror}); nothing was"
            " started"
        ) from error
    found = ""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words and len(words) != 2:
            raise ConfigError(
                f"{host}: line {number} of {file} is {line[:80]!r}; nothing was started; each line"
                " is HOST DOMAIN, as in: node7 row2/rack7"
            )
        if words and words[0] == host:
            if found and found != words[1]:
                raise ConfigError(
                    f"{host}: {file} gives two domains, {found[:80]} and {words[1][:80]}; nothing"
                    " was started; leave one line for each host"
                )
            found = words[1]
    if not found:
        raise ConfigError(
            f"{host}: {file} has no line for this host; nothing was started; add: {host} DOMAIN"
        )
    return found


def order_nodes(domains: Mapping[str, str], given: Mapping[int, str], nodes: int) -> list[str]:
    """Return the hosts by node rank. `domains`: all hosts. `given`: hosts with a node rank of their
    own. The first `nodes` have ranks, and ranks are contiguous by domain.

    Spare nodes are taken from the domain that has most nodes left, so that no domain's loss takes
    more of them than it must.
    """
    free = sorted(domains.keys() - set(given.values()), key=lambda host: (domains[host], host))
    remaining = Counter(domains.values())
    spares: list[str] = []
    for _ in range(sum(rank not in given for rank in range(nodes, len(domains)))):
        # the last host of the largest domain, the last of equal domains
        host = max(free, key=lambda one: (remaining[domains[one]], domains[one], one))
        free.remove(host)
        remaining[domains[host]] -= 1
        spares.insert(0, host)
    rest = iter([*free, *spares])
    return [given[rank] if rank in given else next(rest) for rank in range(len(domains))]
