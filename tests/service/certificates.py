"""Certificates for a server on loopback, made by openssl: an authority, a server, a client, and a stranger."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

needs_openssl: Final = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files; `other_ca` has signed nothing."""

    ca: str
    other_ca: str
    server: str
    server_key: str
    client: str
    client_key: str

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        for authority in ("ca", "other_ca"):
            _openssl(
                folder, "req", "-x509", *_KEY, "-subj", f"/CN={authority}", "-keyout", f"{authority}.key",
                "-out", f"{authority}.pem",
            )  # fmt: skip
        for name in ("server", "client"):
            (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
            _openssl(folder, "req", *_KEY[:-2], "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
            _openssl(
                folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem",
            )  # fmt: skip
        names = ("ca.pem", "other_ca.pem", "server.pem", "server.key", "client.pem", "client.key")
        return cls(*(str(folder / name) for name in names))

    def server_arguments(self, port: int, *, clients: bool) -> list[str]:
        """For redis-server: TLS on this port; with `clients`, only for those who have a certificate themselves."""
        options = {
            "tls-port": str(port),
            "tls-cert-file": self.server,
            "tls-key-file": self.server_key,
            "tls-ca-cert-file": self.ca,
            "tls-auth-clients": "yes" if clients else "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
