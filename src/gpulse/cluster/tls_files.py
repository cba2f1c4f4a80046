"""Load and check TLS certificates and keys, for servers and for gRPC."""

from __future__ import annotations

import ssl
from typing import NamedTuple

import grpc

from gpulse.cluster.credentials import check_key_permissions
from gpulse.errors import UsageError

_MAX_FILE_BYTES = 1_000_000


class TlsFiles(NamedTuple):
    """The PEM files of a server."""

    cert: str
    """Its certificate chain."""
    key: str
    client_ca: str | None = None
    """Certificate authorities of clients; if set, every client needs a certificate."""

    def checked(self) -> TlsFiles:
        """Check the files and return self.

        Raises:
            UsageError: The files cannot be used.
        """
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of an HTTP server.

        Raises:
            UsageError: The files cannot be used.
        """
        for option, path in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            _read_pem(path, option)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"{self.cert} and {self.key} are not a matching certificate and key: {_reason(error)}",
                hint="give a PEM certificate with --tls-cert, and its PEM key without a passphrase with --tls-key",
            ) from error
        check_key_permissions(self.key)
        if self.client_ca is not None:
            _read_pem(self.client_ca, "--tls-client-ca")
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise UsageError(
                    f"{self.client_ca} contains no certificates: {_reason(error)}",
                    hint="give a PEM file with the certificate authorities of clients with --tls-client-ca",
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def load_server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return the TLS credentials of a gRPC server.

    Raises:
        UsageError: The files cannot be used.
    """
    tls.checked()
    client_ca = None if tls.client_ca is None else _read_pem(tls.client_ca, "--tls-client-ca")
    return grpc.ssl_server_credentials(
        [(_read_pem(tls.key, "--tls-key"), _read_pem(tls.cert, "--tls-cert"))],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def load_channel_credentials(
    ca: str | None = None, cert: str | None = None, key: str | None = None
) -> grpc.ChannelCredentials:
    """Return the TLS credentials of a gRPC client.

    Args:
        ca: PEM file with the certificate authorities of the server; the system's when None.
        cert: The client certificate, if the server requires one.
        key: The key of that certificate.

    Raises:
        UsageError: The files cannot be used.
    """
    if (cert is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key must be used together", hint="give both, or neither")
    if cert is not None and key is not None:
        TlsFiles(cert, key).checked()
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else _read_pem(ca, "--tls-ca"),
        private_key=None if key is None else _read_pem(key, "--tls-key"),
        certificate_chain=None if cert is None else _read_pem(cert, "--tls-cert"),
    )


def _read_pem(path: str, option: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {option} {path}: {error.strerror}", hint="give the path of a readable PEM file"
        ) from error
    if len(content) > _MAX_FILE_BYTES or b"-----BEGIN " not in content:
        raise UsageError(
            f"{option} {path} is not a PEM file",
            hint="give a PEM file, which contains lines such as -----BEGIN CERTIFICATE-----",
        )
    return content


def _no_password() -> str:
    """Return an empty passphrase, so that OpenSSL does not prompt for one."""
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
