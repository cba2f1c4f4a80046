"""Heads and agents over TLS, with certificates of an authority of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, cluster_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("openssl"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents of one test."""
    with cluster_in(tmp_path) as made:
        yield made


def openssl(directory: Path, *arguments: str) -> None:
    """Run openssl there."""
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


def make_certificates(directory: Path) -> None:
    """An authority (ca.pem), and certificates of it for the head and for agents."""
    subject, days = ("-subj", "/CN=authority"), ("-days", "2")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(directory, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", *subject, *days)
    for name in ("head", "agent"):
        openssl(
            directory, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed, *days)


def test_agents_with_a_certificate_come_in_and_others_do_not(cluster: Cluster) -> None:
    """`--tls-client-ca`."""

    make_certificates(cluster.directory)
    head = cluster.head(
        *("--tls-cert", "head.pem", "--tls-key", "head.key", "--tls-client-ca", "ca.pem"), "--with-agent"
    )
    head.said("is connected")  # its own, which needs none
    known = cluster.agent(
        "known", head.port, "--tls-ca", "ca.pem", "--tls-cert", "agent.pem", "--tls-key", "agent.key"
    )
    known.said("connected to")
    stranger = cluster.agent("stranger", head.port, "--tls-ca", "ca.pem")
    stranger.said("cannot connect")

    head.said("known is connected")
    assert "stranger is connected" not in head.text


def test_an_agent_without_tls_is_told(cluster: Cluster) -> None:
    """And one that does not know the authority does not come in."""

    make_certificates(cluster.directory)
    head = cluster.head("--tls-cert", "head.pem", "--tls-key", "head.key")
    plain = cluster.agent("plain", head.port)

    assert plain.popen.wait(30.0) == 1
    assert "TLS" in plain.text
    distrustful = cluster.agent("distrustful", head.port, "--tls")
    distrustful.said("cannot connect")
    trusting = cluster.agent("trusting", head.port, "--tls-ca", "ca.pem")
    trusting.said("connected to")
