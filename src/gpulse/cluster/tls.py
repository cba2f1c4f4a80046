"""Certificates and keys for TLS: read, checked, and handed to gRPC. HTTP takes the same files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, NamedTuple

from gpulse.errors import UsageError

if TYPE_CHECKING:
    import grpc

_LARGEST_FILE = 1_000_000


class TlsFiles(NamedTuple):
    """The PEM files of a server."""

    cert: str
    """Its certificate, and those that vouch for it."""
    key: str
    client_ca: str | None = None
    """Who vouches for clients; with it every client needs a certificate."""

    def checked(self) -> TlsFiles:
        """Itself, if the files can be used.

        Raises:
            UsageError: They cannot.
        """
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """For a server of HTTP.

        Raises:
            UsageError: The files cannot be used.
        """
        for option, path in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            _read(path, option)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"{self.cert} and {self.key} are no certificate and its key: {_reason(error)}",
                hint="--tls-cert takes a PEM certificate, --tls-key its PEM key without a password",
            ) from error
        if self.client_ca is not None:
            _read(self.client_ca, "--tls-client-ca")
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise UsageError(
                    f"{self.client_ca} holds no certificates: {_reason(error)}",
                    hint="--tls-client-ca takes the PEM certificates of who vouches for clients",
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """For a server of gRPC.

    Raises:
        UsageError: The files cannot be used.
    """
    import grpc  # noqa: PLC0415  only a head or an agent with TLS needs it

    tls.checked()
    client_ca = None if tls.client_ca is None else _read(tls.client_ca, "--tls-client-ca")
    return grpc.ssl_server_credentials(
        [(_read(tls.key, "--tls-key"), _read(tls.cert, "--tls-cert"))],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def channel_credentials(
    ca: str | None = None, cert: str | None = None, key: str | None = None
) -> grpc.ChannelCredentials:
    """For a client of gRPC.

    Args:
        ca: PEM certificates of who vouches for the server; the system's when left out.
        cert: The client's own certificate, if the server wants one.
        key: The key of that certificate.

    Raises:
        UsageError: The files cannot be used.
    """
    import grpc  # noqa: PLC0415  as above

    if (cert is None) != (key is None):
        raise UsageError(
            "a certificate needs its key, and a key its certificate", hint="--tls-cert and --tls-key"
        )
    if cert is not None and key is not None:
        TlsFiles(cert, key).checked()
    return grpc.ssl_channel_credentials(
        root_certificates=None if ca is None else _read(ca, "--tls-ca"),
        private_key=None if key is None else _read(key, "--tls-key"),
        certificate_chain=None if cert is None else _read(cert, "--tls-cert"),
    )


def _read(path: str, option: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be read: {error.strerror}", hint="name a PEM file"
        ) from error
    if len(content) > _LARGEST_FILE or b"-----BEGIN " not in content:
        raise UsageError(
            f"{option} {path} is not a PEM file",
            hint="PEM files have lines such as -----BEGIN CERTIFICATE-----",
        )
    return content


def _no_password() -> str:
    """Instead of asking on the terminal for the password of a key."""
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
