"""Flags of runs of several nodes, and the flags that such runs do not support yet."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from ipaddress import IPv4Address

import msgspec

from outlast import config
from outlast.errors import UsageError
from outlast.launch.terms.term_store import check_address

ANY_RANK = -1
PORT = 29400  # torchrun's, for an endpoint without one
_MASTER_ADDR, _MASTER_PORT = "127.0.0.1", 29500  # torchrun's defaults
BACKENDS = ("static", "c10d")
# Exit code of a launcher whose host has left the run (`outlast roll`); 0 without it.
RELEASE_VARIABLE = "OUTLAST_RELEASE_CODE"


class NodeFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of a run, and this one among them."""

    nodes: int = 1  # that have ranks at the start
    spare_nodes: int = 0  # that wait without ranks
    endpoint: str = ""  # HOST:PORT of the meeting
    node_rank: int = ANY_RANK
    token_file: str = ""
    term_store: str = ""  # URL of the terms' store; "": the run directory
    topology: str = ""  # file of failure domains
    tls_cert: str = ""  # PEM files; "": no TLS
    tls_key: str = ""
    tls_ca: str = ""
    local_addr: str = ""  # IPv4 address of this host to use; "": that of the route to the endpoint
    on_one_host: bool = False  # a replay: one host has the ranks of all nodes

    @property
    def total(self) -> int:
        """Return the number of nodes that meet."""
        return 1 if self.on_one_host else self.nodes + self.spare_nodes

    @property
    def is_several(self) -> bool:
        """Return whether ranks have local ranks of several nodes, wherever they are."""
        return self.total > 1 or self.nodes > 1


def release_code(usual: int) -> int:
    """Return the exit code of a launcher whose host has left the run."""
    text = config.process_environment().get(RELEASE_VARIABLE, "")
    return int(text) if re.fullmatch("[0-9]{1,3}", text) and int(text) < 256 else usual


def add_node_flags(add: Callable[..., object]) -> None:
    """Add the flags beyond torchrun's own."""
    add(
        "--token-file",
        "--token_file",
        default="",
        metavar="FILE",
        help="File with the secret that all nodes of a run share (default: $OUTLAST_TOKEN_FILE, or"
        " the secret itself in $OUTLAST_TOKEN). Needed with --nnodes above 1.",
    )
    add(
        "--term-store",
        "--term_store",
        default="files",
        metavar="URL",
        help="Store in which nodes agree on their controller, with --nnodes above 1: files (the run"
        " directory, default), etcd://HOST:PORT/PREFIX, or s3://, gs://, az://BUCKET/PREFIX.",
    )
    for name, what in (("cert", "certificate"), ("key", "key"), ("ca", "certificate authority")):
        add(
            f"--tls-{name}",
            f"--tls_{name}",
            default="",
            metavar="FILE",
            help=f"PEM file with the {what} for TLS between the nodes, with --nnodes above 1"
            f" (default: $OUTLAST_TLS_{name.upper()}; without all three: no TLS).",
        )
    add(
        "--topology",
        default="",
        metavar="FILE",
        help="Failure domains of a run of several nodes: lines of HOST DOMAIN, as in: node7"
        " row2/rack7 (default: $OUTLAST_DOMAIN of each host, else Slurm's topology).",
    )


def read(given: Namespace, token_file: str, tls_files: tuple[str, ...] = ("", "", "")) -> NodeFlags:
    """Return the node flags; `token_file` and `tls_files` are the defaults of their flags.

    Raises UsageError for flags that do not fit together, or that need one host.
    """
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", given.nnodes)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UsageError(
            f"--nnodes {given.nnodes}: give the number of nodes, or NODES:NODES_WITH_SPARES, as in"
            " --nnodes 2:3"
        )
    if most == 1:
        if given.node_rank not in (0, ANY_RANK):
            raise UsageError(f"--node-rank {given.node_rank}: there is one node, and its rank is 0")
        if given.tls_cert or given.tls_key or given.tls_ca:
            raise UsageError("--tls-cert, --tls-key and --tls-ca are for --nnodes above 1")
        return NodeFlags()
    _refuse(given)
    if not -1 <= given.node_rank < most:
        raise UsageError(
            f"--node-rank {given.node_rank}: this run has the node ranks 0 to {most - 1}"
        )
    tls_cert, tls_key, tls_ca = _tls(given, tls_files)
    return NodeFlags(
        nodes=least,
        spare_nodes=most - least,
        endpoint=_endpoint(given.rdzv_endpoint or _static_endpoint(given)),
        node_rank=given.node_rank,
        token_file=given.token_file or token_file,
        term_store=_term_store(given.term_store),
        topology=given.topology,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        local_addr=_local_addr(given.local_addr or ""),
    )


def _tls(given: Namespace, defaults: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of TLS: all three, or none."""
    flags = (given.tls_cert, given.tls_key, given.tls_ca)
    found = tuple(one or default for one, default in zip(flags, defaults, strict=True))
    if any(found) and not all(found):
        names = ("--tls-cert", "--tls-key", "--tls-ca")
        missing = [name for name, file in zip(names, found, strict=True) if not file]
        raise UsageError(
            f"TLS needs all of --tls-cert, --tls-key and --tls-ca; missing: {', '.join(missing)}"
        )
    return found


def _term_store(text: str) -> str:
    address = "" if text == "files" else text
    check_address(address)
    return address


def _static_endpoint(given: Namespace) -> str:
    """Return the endpoint of torchrun's static form, or "" without --master-addr."""
    if given.master_addr == _MASTER_ADDR:
        return ""
    return f"{given.master_addr}:{given.master_port or _MASTER_PORT}"


def _local_addr(text: str) -> str:
    try:
        return str(IPv4Address(text)) if text else ""
    except ValueError as error:
        raise UsageError(
            f"--local-addr {text}: give an IPv4 address of this host, at which the other nodes"
            " reach it"
        ) from error


def _endpoint(text: str) -> str:
    if not text:
        raise UsageError(
            "--nnodes above 1 needs --rdzv-endpoint HOST:PORT (or --master-addr and --master-port),"
            " an address of the first node; give the same one on every node"
        )
    name, colon, port = text.rpartition(":")
    name, port = (name, port) if colon else (text, str(PORT))
    if not name or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--rdzv-endpoint {text}: give HOST:PORT with a port from 1 to 65535")
    return f"{name}:{port}"


def _refuse(given: Namespace) -> None:
    if given.rdzv_backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend {given.rdzv_backend}: nodes meet at the endpoint itself; leave it out"
        )
    if given.standalone:
        raise UsageError("--standalone is for one node; leave it out, or give --nnodes 1")
    if not given.run_dir:
        raise UsageError(
            "--nnodes above 1 needs --run-dir DIR, on a file system of all nodes; with --durable"
            " DIRECTORY of all nodes, each host may have its own"
        )
