"""TLS between the hosts of a run: both ends show a certificate of one authority.

The certificate of a node names its host, or the endpoint. Frames carry the run's token as without
TLS: a certificate alone lets nobody take part.
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from outlast.errors import ConfigError

RELOAD_S = 60.0  # files may be renewed during a run
HANDSHAKE_BYTE = b"\x16"  # first one of a TLS connection
_FLIGHTS_MAX = 8
_FOREIGN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")


class TlsFiles(NamedTuple):
    """PEM files: this node's certificate (with intermediate ones), its key, and the authority."""

    certificate: str
    key: str
    authority: str


class NodeTls:
    """Certificates of one node, read again every RELOAD_S."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError if a file cannot be read, or the key is not the certificate's."""
        self._files = files
        self._contexts = self._load()
        self._loaded_s = time.monotonic()

    @property
    def server(self) -> ssl.SSLContext:
        """Return the context for connections that this node accepts."""
        return self._newest()[0]

    @property
    def client(self) -> ssl.SSLContext:
        """Return the context for connections that this node makes; it leaves the name to
        `check_name`."""
        return self._newest()[1]

    def own_names(self) -> tuple[str, ...]:
        """Return the names of this node's certificate, which a peer would accept.

        Raises ConfigError with the reason for which peers would refuse it.
        """
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        client = self.client.wrap_bio(to_client, to_server)
        try:
            for _ in range(_FLIGHTS_MAX):
                for side in (client, server):
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue
        except ssl.SSLError as error:
            raise ConfigError(
                f"the certificate {self._files.certificate} does not pass the check with the"
                f" authority {self._files.authority}: {reason_of(error)}"
            ) from error
        return names_of(client.getpeercert())

    def _newest(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        now_s = time.monotonic()
        if now_s - self._loaded_s > RELOAD_S:
            self._loaded_s = now_s
            with contextlib.suppress(ConfigError):  # while files are being replaced
                self._contexts = self._load()
        return self._contexts

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # see `check_name`
            context.verify_mode = ssl.CERT_REQUIRED
            self._load_files(context)
        server.num_tickets = 0  # connections are made anew, and rarely
        return server, client

    def _load_files(self, context: ssl.SSLContext) -> None:
        for name in self._files:
            try:
                Path(name).read_bytes()
            except OSError as error:
                raise ConfigError(f"the file {name} cannot be read: {error.strerror}") from error
        try:
            context.load_verify_locations(self._files.authority)
        except ssl.SSLError as error:
            raise ConfigError(f"{self._files.authority} has no certificate in PEM") from error
        try:
            context.load_cert_chain(
                self._files.certificate, self._files.key, password=self._refuse_password
            )
        except ssl.SSLError as error:
            raise ConfigError(
                f"{self._files.certificate} and {self._files.key} are no certificate and its key in"
                f" PEM: {reason_of(error)}"
            ) from error

    def _refuse_password(self) -> str:
        raise ConfigError(f"the key {self._files.key} is encrypted: give one without a password")


class PeerTls(NamedTuple):
    """Certificates of this node, and the names of which a peer's certificate has to have one."""

    node: NodeTls
    names: tuple[str, ...]

    def also_of(self, host: str) -> PeerTls:
        """Return these, with the name of a host that has joined the run."""
        return self if host in self.names else self._replace(names=(*self.names, host))

    def check(self, sock: ssl.SSLSocket) -> None:
        """Raise ssl.CertificateError if the peer's certificate has none of the names."""
        check_name(names_of(sock.getpeercert()), self.names)


def check_name(found: tuple[str, ...], wanted: Iterable[str]) -> None:
    """Raise ssl.CertificateError unless a certificate with the names `found` is one of `wanted`."""
    expected = tuple(dict.fromkeys(wanted))
    if not any(_matches(pattern, name) for pattern in found for name in expected):
        raise ssl.CertificateError(
            f"its certificate is for {', '.join(found) or 'no name'}, and not for"
            f" {' or '.join(expected)}"
        )


def names_of(certificate: Any) -> tuple[str, ...]:
    """Return the DNS names and IP addresses of a certificate (subjectAltName)."""
    entries = (certificate or {}).get("subjectAltName", ())
    return tuple(text for kind, text in entries if kind in ("DNS", "IP Address"))


def _matches(pattern: str, name: str) -> bool:
    try:
        return ipaddress.ip_address(pattern) == ipaddress.ip_address(name)
    except ValueError:
        pass
    first, dot, rest = name.lower().partition(".")
    wild, _, suffix = pattern.lower().partition(".")
    if wild == "*" and dot and first:
        return suffix == rest
    return pattern.lower() == name.lower()


def reason_of(error: OSError) -> str:
    """Return the reason for which a TLS connection failed, as a clause about the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return getattr(error, "verify_message", "") or str(error.args[0])  # of `check_name`
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if reason in _FOREIGN:
        return "it does not speak TLS"
    words = reason.lower().replace("_", " ")
    if "alert" in words:
        return f"it refuses this node's certificate ({words.partition('alert ')[2]})"
    return words or str(error.strerror or error)
