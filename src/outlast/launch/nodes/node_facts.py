"""Identity of a node: its host, token, endpoint, interface, and what all nodes must share."""

from __future__ import annotations

import fcntl
import hashlib
import platform
import secrets
import socket
import ssl
import struct
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast import __version__, config
from outlast.errors import ConfigError
from outlast.launch.nodes.failure_domains import domain_of
from outlast.launch.torchrun.worker_commands import source_files
from outlast.launch.torchrun_arguments import RunPlan
from outlast.transport.node_link import NodeHello, users_key
from outlast.transport.tls import NodeTls, PeerTls, TlsFiles, check_name

TOKEN_LENGTH_MIN = 16
NONCE_BYTES = 32
RESOLVE_S = 0.5
_SIOCGIFADDR = 0x8915
# Fields of a plan that may differ between nodes.
_OWN = (
    *("node", "run_dir", "json", "plain", "streams", "command", "script", "master_addr"),
    *("teed", "line_prefix"),
    "policy",  # a fact of its own
)


class NodePlaces(NamedTuple):
    """Findings of a node in its directories, as in NodeHello."""

    directory: str
    folders: tuple[str, ...] = ()
    run: str = ""
    neighbours: tuple[str, ...] = ()


class NodeIdentity(NamedTuple):
    """This node, as it introduces itself."""

    host: str
    node_rank: int  # -1: any
    endpoint: tuple[str, int]  # name or IPv4 address, and port
    key: bytes
    facts: dict[str, str]
    domain: str = ""
    local_addr: str = ""  # IPv4 address of this host to use; "": that of the route to the endpoint
    tls: NodeTls | None = None  # with TLS

    @property
    def endpoint_tls(self) -> PeerTls | None:
        """Return what the endpoint's certificate is checked with."""
        return PeerTls(self.tls, (self.endpoint[0],)) if self.tls else None

    def peer_tls(self, hosts: tuple[str, ...]) -> PeerTls | None:
        """Return what the certificate of a node of the run is checked with."""
        return PeerTls(self.tls, (self.endpoint[0], *hosts)) if self.tls else None

    def hello(self, places: NodePlaces) -> NodeHello:
        """Return the first message."""
        return NodeHello(
            host=self.host,
            node_rank=self.node_rank,
            facts=self.facts,
            domain=self.domain,
            directory=places.directory,
            folders=places.folders,
            run=places.run,
            neighbours=places.neighbours,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )


def identify(plan: RunPlan) -> NodeIdentity:
    """Return this node's identity. Raises ConfigError for a bad token or certificate."""
    host = socket.gethostname()
    return NodeIdentity(
        host=host,
        node_rank=plan.node.node_rank,
        endpoint=_endpoint(plan),
        key=users_key(_token(plan.node.token_file)),
        facts=_facts(plan),
        domain=domain_of(host, plan.node.topology),
        local_addr=plan.node.local_addr,
        tls=_tls(plan, host),
    )


def _tls(plan: RunPlan, host: str) -> NodeTls | None:
    """Return this node's certificates, or None without TLS. Raises ConfigError for those that other
    nodes would refuse."""
    node, (name, _) = plan.node, _endpoint(plan)
    if not node.tls_cert:
        return None
    try:
        tls = NodeTls(TlsFiles(node.tls_cert, node.tls_key, node.tls_ca))
        check_name(tls.own_names(), (name,) if node.node_rank == 0 else (name, host))
    except (ConfigError, ssl.CertificateError) as error:
        reason = f"{node.tls_cert}: {error}" if isinstance(error, ssl.CertificateError) else error
        raise ConfigError(f"{host}: {reason}; nothing was started") from error
    return tls


def resolve(endpoint: tuple[str, int], within_s: float) -> str:
    """Return the endpoint's IPv4 address. A name may appear late: names of pods do.

    Raises ConfigError, naming this host, if the name does not resolve within `within_s`.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            found = socket.getaddrinfo(*endpoint, socket.AF_INET, socket.SOCK_STREAM)
            return str(found[0][4][0])
        except OSError as error:
            if time.monotonic() >= deadline_s:
                raise unresolved(endpoint, within_s, error) from error
        time.sleep(RESOLVE_S)  # nothing else runs yet


def is_address(name: str) -> bool:
    """Return whether a name is an IPv4 address, which no resolver is asked for."""
    try:
        socket.inet_aton(name)
    except OSError:
        return False
    return True


def unresolved(endpoint: tuple[str, int], within_s: float, error: OSError) -> ConfigError:
    """Return the error for an endpoint whose name has not resolved."""
    return ConfigError(
        f"{socket.gethostname()}: the name {endpoint[0]!r} of the endpoint does not resolve to an"
        f" IPv4 address ({error.strerror}), tried for {within_s:g} s; nothing was started; correct"
        " --rdzv-endpoint or this host's names, or wait longer with --limit hello_s=SECONDS"
    )


def holds_controller(plan: RunPlan) -> bool:
    """Return whether the controller runs on this node: its node rank is 0, or it has no rank and
    the endpoint's address is its own. Raises ConfigError as `resolve` does."""
    if plan.node.node_rank >= 0:
        return plan.node.node_rank == 0
    address = resolve(_endpoint(plan), plan.limits.hello_s)
    if plan.node.local_addr:
        return address == plan.node.local_addr
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _endpoint(plan: RunPlan) -> tuple[str, int]:
    name, _, port = plan.node.endpoint.rpartition(":")
    return name, int(port)


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address. Raises ConfigError if none has."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
        if socket.inet_ntoa(found[20:24]) == address:
            return name
    raise ConfigError(
        f"{socket.gethostname()}: no interface has the address {address}, which leads to the"
        " endpoint; nothing was started; set GLOO_SOCKET_IFNAME"
    )


def choose_interface(address: str) -> None:
    """Make gloo listen on the interface that has this address, unless GLOO_SOCKET_IFNAME is set.
    Raises ConfigError without one."""
    if not config.gloo_interface():
        config.add_to_environment({"GLOO_SOCKET_IFNAME": interface_of(address)})


def _token(file: str) -> str:
    """Return the users' token, of the file or of OUTLAST_TOKEN."""
    token = config.users_token()
    source = config.TOKEN_VARIABLE
    if file:
        source = file
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{socket.gethostname()}: the token file {file} cannot be read ({error}); nothing"
                " was started"
            ) from error
    if len(token) < TOKEN_LENGTH_MIN:
        raise ConfigError(
            f"{socket.gethostname()}: {source} has a token of {len(token)} characters, and a run of"
            f" several nodes needs {TOKEN_LENGTH_MIN} or more; nothing was started; make one with:"
            " openssl rand -hex 32, and give it to all nodes with --token-file or"
            f" {config.TOKEN_VARIABLE}"
        )
    return token


def _facts(plan: RunPlan) -> dict[str, str]:
    """Return what must be equal on all nodes, in the order in which differences are named."""
    facts = {
        "version of Outlast": __version__,
        "version of Python": platform.python_version(),
        "version of torch": _version("torch"),
        "number of nodes": f"{plan.node.nodes}:{plan.node.nodes + plan.node.spare_nodes}",
        "world size": str(plan.world),
        "store of terms (--term-store)": plan.node.term_store or "files",
        "recovery policy (--policy)": f"{plan.policy.name}, digest {plan.policy.digest}",
        "script": plan.script,
        "digest of the script": _digest(plan),
    }
    for name in RunPlan.__struct_fields__:
        if name not in _OWN:
            facts.setdefault(f"plan ({name})", msgspec.json.encode(getattr(plan, name)).decode())
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _digest(plan: RunPlan) -> str:
    """Return the digest of the script, or of what `-m` executes. Programs may differ."""
    is_module = plan.script.startswith("-m ")
    files = source_files(plan.command) if is_module else [Path(plan.script)]
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError:
        return "none"  # a program on the search path
    return hashlib.blake2b(text, digest_size=8).hexdigest()
