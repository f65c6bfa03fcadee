"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from outlast.transport.tls import TlsFiles


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.certificate = str(folder / "ca.pem")
        self._key = str(folder / "ca.key")
        words = ["req", "-x509", "-subj", f"/CN=authority of {folder.parent.name}", "-days", "3"]
        _openssl(*words, *_NEW_KEY, "-keyout", self._key, "-out", self.certificate)

    def issue(self, name: str, *names: str, days: int = 2) -> TlsFiles:
        """Return the files of a node whose certificate is for `names`, as DNS:n1 or IP:127.0.0.1.
        With negative `days` it has expired."""
        stem = self._folder / name
        key, certificate, request, extensions = (
            str(stem.with_suffix(suffix)) for suffix in (".key", ".pem", ".csr", ".ext")
        )
        Path(extensions).write_text(f"subjectAltName={','.join(names)}\n")
        _openssl("req", "-subj", f"/CN={name}", *_NEW_KEY, "-keyout", key, "-out", request)
        dates = ["-days", str(days)]
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-set_serial", "7", "-extfile", extensions, *dates, "-out", certificate),
        )
        return TlsFiles(certificate, key, self.certificate)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30)
