from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.access_control import (
    LOGIN_COOKIE,
    LOGIN_SECONDS,
    AccessPolicy,
    HttpRequest,
    is_loopback,
    load_or_create_token,
    read_token,
)
from gpulse.cluster.client.http_transport import _make_tls_context
from gpulse.cluster.client.transport import HeadCredentials
from gpulse.cluster.tls_files import TlsFiles, load_channel_credentials, load_server_credentials
from gpulse.errors import GpulseError, UsageError
from tests.prerequisites import require

TOKEN = "a-token-of-some-length-1234567890"
LOCAL = HttpRequest("127.0.0.1", "localhost:8091", user=os.geteuid())
OTHER = LOCAL._replace(user=4711)
REMOTE = HttpRequest("10.1.2.3", "head:8091")
BEARER = f"Bearer {TOKEN}"


def status(access: AccessPolicy, request: HttpRequest) -> int:
    """How a request is answered."""
    refusal = access.check_http(request)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    "peer",
    ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "ipv4:127.0.0.1:4711", "ipv6:%5B::1%5D:12", "ipv6:[::1]:12",
     "ipv6:%5B::ffff:127.0.0.1%5D:12", "unix:", "unix:/run/x", "unix-abstract:x"],
)  # fmt: skip
def test_loopback_peers(peer: str) -> None:
    """Every spelling of this machine is this machine."""

    assert is_loopback(peer)


@pytest.mark.parametrize(
    "peer",
    ["10.0.0.1", "128.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "::ffff:10.0.0.1", "ipv4:10.0.0.1:4711", "ipv6:%5B2001::1%5D:12",
     "localhost", "", "127.0.0.1.evil.com", "ipv4:", "ipv4:evil:127.0.0.1", "[127.0.0.1", "unixx:"],
)  # fmt: skip
def test_other_peers(peer: str) -> None:
    """Anything else is another machine."""

    assert not is_loopback(peer)


@given(st.text(max_size=40))
def test_loopback_takes_any_text(peer: str) -> None:
    """No text makes it fail."""

    assert is_loopback(peer) in {True, False}


def test_own_machine_needs_no_token() -> None:
    """Requests from the head's own machine are served when they are addressed to it."""

    access = AccessPolicy(TOKEN, names=["headnode.cluster"])

    for host in (
        "localhost",
        "localhost:8091",
        "127.0.0.1:8091",
        "[::1]:8091",
        "LOCALHOST:1",
        "localhost.",
        "headnode.cluster:8091",
    ):
        assert 200 == status(access, LOCAL._replace(host=host))


def test_rebound_names_are_refused() -> None:
    """A page whose name was made to point here can neither read nor write."""

    access = AccessPolicy(TOKEN)

    for host in (
        "evil.com",
        "evil.com:8091",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        None,
        "",
        "localhost@evil.com",
        "[",
        "a,localhost",
    ):
        assert 403 == status(access, LOCAL._replace(host=host))
    rebound = LOCAL._replace(
        host="evil.com", origin="http://evil.com", method="POST", content_type="application/json"
    )
    assert 403 == status(access, rebound)


def test_other_machines_need_the_token() -> None:
    """Without the token nothing is read or written from beyond loopback; with it everything is."""

    access = AccessPolicy(TOKEN)

    assert 401 == status(access, REMOTE)
    assert 401 == status(access, REMOTE._replace(host="localhost"))
    assert 401 == status(access, REMOTE._replace(client_host=None, host="localhost"))
    assert 200 == status(access, REMOTE._replace(authorization=BEARER))
    assert 200 == status(access, REMOTE._replace(authorization=f"bearer  {TOKEN}"))


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer ä",
    ],
)
def test_wrong_tokens(wrong: str) -> None:
    """What is not exactly the token is refused."""

    assert 401 == status(AccessPolicy(TOKEN), REMOTE._replace(authorization=wrong))


@pytest.mark.parametrize("user", [4711, None])
def test_other_users_of_this_machine_read_only(user: int | None) -> None:
    """Whoever is not the head's user or root, or cannot be found, changes nothing without the token."""

    access = AccessPolicy(TOKEN)
    other = LOCAL._replace(user=user)

    for method in ("GET", "HEAD", "OPTIONS"):
        assert 200 == status(access, other._replace(method=method))
    for method in ("POST", "PUT", "DELETE", "PATCH", "get", ""):
        assert 401 == status(access, other._replace(method=method))
        assert 401 == status(AccessPolicy(None), other._replace(method=method, authorization="Bearer None"))
        assert 200 == status(access, other._replace(method=method, authorization=BEARER))
        assert 200 == status(access, other._replace(method=method, user=0))
        assert 200 == status(access, LOCAL._replace(method=method))
    assert 403 == status(access, other._replace(host="evil.com")), "reading needs a name of the head, too"


def test_who_is_trusted_with_code() -> None:
    """Whoever may change something: with the token from anywhere, else the head's own user and root on its machine."""

    access = AccessPolicy(TOKEN, public_read=True)

    for trusted in (LOCAL, LOCAL._replace(user=0), OTHER._replace(authorization=BEARER)):
        assert access.may_change(trusted)
    assert access.may_change(REMOTE._replace(authorization=BEARER))
    assert access.may_change(REMOTE._replace(cookie=f"{LOGIN_COOKIE}={access.make_login_cookie()}"))
    for reader in (OTHER, REMOTE, LOCAL._replace(user=None), LOCAL._replace(forwarded=True)):
        assert not access.may_change(reader)
    assert not access.may_change(LOCAL._replace(origin="http://evil.com"))
    assert not access.may_change(OTHER._replace(authorization="Bearer wrong"))


def test_a_private_head_is_not_read_by_other_users() -> None:
    """They need the token for everything; its own user and root do not."""

    access = AccessPolicy(TOKEN, private=True)

    assert 401 == status(access, OTHER)
    assert 200 == status(access, OTHER._replace(authorization=BEARER))
    assert [200, 200] == [status(access, LOCAL), status(access, LOCAL._replace(user=0))]
    assert 401 == status(access, REMOTE)


def test_public_read() -> None:
    """Everybody reads, nobody changes anything without the token, and pages of other origins do neither."""

    access = AccessPolicy(TOKEN, public_read=True, names=["gpu-head"])

    for host in ("10.0.0.7:8091", "[fd00::7]:8091", "gpu-head:8091"):
        public = REMOTE._replace(host=host)
        assert 200 == status(access, public)
        assert 401 == status(access, public._replace(method="POST"))
        assert 200 == status(access, public._replace(method="POST", authorization=BEARER))
        assert 403 == status(access, public._replace(origin="http://evil.com"))
        assert 403 == status(access, public._replace(fetch_site="cross-site", fetch_mode="cors"))
    for name in ("evil.com:8091", None, "10.0.0.7.evil.com"):
        assert 403 == status(access, REMOTE._replace(host=name)), "a name that was made to point here"
    assert [200, 401] == [status(access, OTHER), status(access, OTHER._replace(method="POST"))]
    assert 401 == status(access, LOCAL._replace(forwarded=True, method="POST"))


def test_refusals_say_what_helps() -> None:
    """With the command that prints the token's place."""

    for access, request in (
        (AccessPolicy(TOKEN), REMOTE),
        (AccessPolicy(TOKEN), OTHER._replace(method="POST")),
        (AccessPolicy(TOKEN), REMOTE._replace(authorization="Bearer wrong")),
    ):
        refusal = access.check_http(request)
        assert refusal is not None
        assert "gpulse token" in refusal.hint
        assert "Authorization: Bearer TOKEN" in refusal.hint


def test_no_token_means_this_machine_only() -> None:
    """A head without a token serves nobody else, whatever they send."""

    access = AccessPolicy(None)

    assert 200 == status(access, LOCAL)
    for authorization in (None, "Bearer ", "Bearer None"):
        assert 401 == status(access, REMOTE._replace(authorization=authorization))
    assert 401 == status(access, REMOTE._replace(cookie=f"{LOGIN_COOKIE}={access.make_login_cookie()}"))


def test_insecure_serves_everybody_but_foreign_pages() -> None:
    """Without security other machines need nothing; pages of other origins are still kept out."""

    access = AccessPolicy(None, insecure=True)

    assert 200 == status(access, REMOTE)
    assert 403 == status(access, REMOTE._replace(origin="http://evil.com"))
    assert 200 == status(access, OTHER._replace(method="POST"))


def test_a_proxy_on_this_machine_is_not_this_machine() -> None:
    """What a proxy passes on may come from anywhere, so it needs the token."""

    access = AccessPolicy(TOKEN)

    assert 401 == status(access, LOCAL._replace(forwarded=True))
    assert 200 == status(access, LOCAL._replace(forwarded=True, authorization=BEARER))


def test_foreign_origins() -> None:
    """A page of another origin can neither read nor write, with whatever else it has."""

    access = AccessPolicy(TOKEN)

    for origin in (
        "http://evil.com",
        "null",
        "",
        "http://localhost:9999",
        "https://localhost.evil.com:8091",
        "file://",
        "http://[",
        "http://localhost:8091, http://evil.com",
    ):
        assert 403 == status(access, LOCAL._replace(origin=origin))
    assert 403 == status(access, REMOTE._replace(origin="http://evil.com", authorization=BEARER))
    assert 403 == status(
        access,
        REMOTE._replace(origin="http://head:9999", cookie=f"{LOGIN_COOKIE}={access.make_login_cookie()}"),
    )


def test_own_and_allowed_origins() -> None:
    """Our own pages and those that were allowed are served."""

    access = AccessPolicy(TOKEN, ["https://Panel.example/"])

    assert 200 == status(access, LOCAL._replace(origin="http://localhost:8091"))
    assert 200 == status(access, REMOTE._replace(host="head", origin="https://head", authorization=BEARER))
    assert 200 == status(access, LOCAL._replace(origin="https://panel.example"))
    assert access.allows_origin("https://panel.example")
    assert not access.allows_origin("https://panel.example.evil.com")
    assert not access.allows_origin(None)


def test_requests_that_browsers_mark_as_foreign() -> None:
    """A script or an image of another site is refused; following a link to the head is not."""

    access = AccessPolicy(TOKEN)

    for site in ("cross-site", "same-site"):
        assert 403 == status(access, LOCAL._replace(fetch_site=site, fetch_mode="no-cors"))
        assert 200 == status(access, LOCAL._replace(fetch_site=site, fetch_mode="navigate"))
        assert 403 == status(access, LOCAL._replace(fetch_site=site, fetch_mode="navigate", method="POST"))
    assert 200 == status(access, LOCAL._replace(fetch_site="same-origin"))
    assert 200 == status(access, LOCAL._replace(fetch_site="none"))


def test_writes_are_json() -> None:
    """A form cannot write, from wherever it comes; a request without a body needs no type."""

    access = AccessPolicy(TOKEN)
    post = LOCAL._replace(method="POST", has_body=True)

    for kind in (
        "application/x-www-form-urlencoded",
        "text/plain",
        "multipart/form-data; boundary=x",
        None,
        "application/jsonx",
    ):
        assert 415 == status(access, post._replace(content_type=kind))
        assert 415 == status(
            access, post._replace(content_type=kind, client_host="10.0.0.1", authorization=BEARER)
        )
    assert 200 == status(access, post._replace(content_type="application/json"))
    assert 200 == status(access, post._replace(content_type="Application/JSON; charset=utf-8"))
    assert 200 == status(access, post._replace(has_body=False))
    refusal = access.check_http(post._replace(content_type="application/x-www-form-urlencoded"))
    assert refusal is not None
    assert "Content-Type: application/json" in refusal.hint


def test_cookies() -> None:
    """A login holds for its time, for its token, and does not give the token away."""

    now = [1000.0]
    access = AccessPolicy(TOKEN, clock=lambda: now[0])
    value = access.make_login_cookie()
    request = REMOTE._replace(cookie=f"other=1; {LOGIN_COOKIE}={value}")

    assert TOKEN not in value
    assert 200 == status(access, request)
    assert 401 == status(AccessPolicy(TOKEN + "x", clock=lambda: now[0]), request)
    expires, _, mark = value.partition(".")
    for forged in (
        f"{int(expires) + 1}.{mark}",
        mark,
        f"{expires}.",
        f".{mark}",
        "",
        "x.y",
        f"{'9' * 50}.{mark}",
        f"²{expires}.{mark}",
    ):
        assert 401 == status(access, REMOTE._replace(cookie=f"{LOGIN_COOKIE}={forged}"))
    now[0] += LOGIN_SECONDS
    assert 401 == status(access, request)


async def call(
    access: AccessPolicy, peer: str, metadata: Iterable[tuple[str, str | bytes]] = (), *, changes: bool = True
) -> str | None:
    """How a call is answered."""
    return await access.check_grpc(peer, metadata, ports=(1,), changes=changes)


async def test_grpc() -> None:
    """Calls from other machines need the token in their metadata."""

    access, peer = AccessPolicy(TOKEN), "ipv4:10.0.0.1:1"

    assert None is await call(access, peer, [("authorization", BEARER)])
    assert None is await call(access, peer, [("x", "y"), ("authorization", BEARER.encode())])
    assert None is await call(AccessPolicy(None, insecure=True), peer)
    for changes in (True, False):
        for metadata in ([], [("authorization", "Bearer nope")], [("token", TOKEN)]):
            assert "token" in (await call(access, peer, metadata, changes=changes) or "")


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "unix:", "ipv4:127.0.0.1:x"])
async def test_grpc_calls_of_nobody_on_this_machine(peer: str) -> None:
    """A caller who cannot be found may read unless the head is private, and changes nothing without the token."""

    assert None is await call(AccessPolicy(TOKEN), peer, changes=False)
    assert "token" in (await call(AccessPolicy(TOKEN), peer) or "")
    assert "token" in (await call(AccessPolicy(TOKEN, private=True), peer, changes=False) or "")
    assert None is await call(AccessPolicy(TOKEN, private=True), peer, [("authorization", BEARER)])


async def test_public_read_over_grpc() -> None:
    """As over HTTP."""

    access = AccessPolicy(TOKEN, public_read=True)

    assert None is await call(access, "ipv4:10.0.0.1:1", changes=False)
    assert "a token for changes" in (await call(access, "ipv4:10.0.0.1:1") or "")


def test_a_token_is_made_once(tmp_path: Path) -> None:
    """The first start makes a token that only its owner can read; later ones read it."""

    path = tmp_path / "config" / "gpulse" / "token"
    token = load_or_create_token(str(path))

    assert len(token) >= 40
    assert 0o600 == path.stat().st_mode & 0o777
    assert token == load_or_create_token(str(path)) == read_token(str(path))
    assert ["token"] == os.listdir(path.parent)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_tokens_that_others_can_read(tmp_path: Path, mode: int) -> None:
    """A token that other users can read is refused, with the command that mends it."""

    path = tmp_path / "gpulse" / "token"
    path.parent.mkdir()
    path.write_text(TOKEN)
    path.chmod(mode)

    with pytest.raises(UsageError, match="other users can read") as caught:
        load_or_create_token(str(path))
    assert f"chmod 600 {path}" == caught.value.hint


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    """Nobody is told to change or to remove what is no token of gpulse."""

    own = tmp_path / "notes.txt"
    own.write_text("short")
    own.chmod(0o600)

    for path, words in (("/etc/passwd", "other users can read"), (str(own), "does not contain a token")):
        with pytest.raises(UsageError, match=words) as caught:
            read_token(path)
        assert (
            "copy the head's token to a file with mode 600, and give that file with --token-file"
            == caught.value.hint
        )


@pytest.mark.parametrize(
    "text", ["", "short", "two words that are long enough", "x" * 1001, "ä" * 30, "a" * 20 + "\nb" * 20]
)
def test_files_that_hold_no_token(tmp_path: Path, text: str) -> None:
    """What cannot be a token is not taken for one."""

    path = tmp_path / "token"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)

    with pytest.raises(UsageError, match="does not contain a token"):
        read_token(str(path))


def test_a_token_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    """Nobody waits for whoever might write to it."""

    os.mkfifo(tmp_path / "token", 0o600)

    with pytest.raises(UsageError, match="not a regular file"):
        read_token(str(tmp_path / "token"))


def test_token_files_that_are_not_there(tmp_path: Path) -> None:
    """A missing file, or a directory that cannot be, is an error with a hint."""

    with pytest.raises(GpulseError, match="cannot read") as caught:
        read_token(str(tmp_path / "none"))
    assert caught.value.hint
    (tmp_path / "file").write_text("")
    with pytest.raises(GpulseError, match="cannot create"):
        load_or_create_token(str(tmp_path / "file" / "token"))


@pytest.fixture
def pems(tmp_path: Path) -> tuple[str, str]:
    """A certificate that vouches for itself, and its key."""
    require("openssl")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-subj", "/CN=localhost", "-keyout", key, "-out", cert, "-days", "2"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_files(pems: tuple[str, str]) -> None:
    """A certificate and its key make credentials for HTTP and gRPC."""

    cert, key = pems

    assert TlsFiles(cert, key, cert).checked().context().verify_mode
    assert load_server_credentials(TlsFiles(cert, key)) is not None
    assert load_server_credentials(TlsFiles(cert, key, cert)) is not None
    assert load_channel_credentials(cert, cert, key) is not None
    assert load_channel_credentials() is not None


def test_tls_files_that_cannot_be_used(pems: tuple[str, str], tmp_path: Path) -> None:
    """Every wrong file is named, with what it should be."""

    cert, key = pems
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nxxxx\n-----END CERTIFICATE-----\n")

    for files, word in (
        (TlsFiles(str(tmp_path / "none"), key), "--tls-cert"),
        (TlsFiles(cert, str(text)), "is not a PEM file"),
        (TlsFiles(key, cert), "not a matching certificate and key"),
        (TlsFiles(cert, key, str(text)), "--tls-client-ca"),
        (TlsFiles(cert, key, str(broken)), "contains no certificates"),
    ):
        with pytest.raises(UsageError, match=word):
            files.checked()
    with pytest.raises(UsageError, match="must be used together"):
        load_channel_credentials(cert=cert)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    ("mode", "owner", "expected"),
    [
        (0o600, 0, None),
        (0o400, 0, None),
        (0o640, 0, None),
        (0o644, 0, "other users can read or change --tls-key .* \\(mode 644\\)"),
        (0o660, 0, "other users can read or change --tls-key .* \\(mode 660\\)"),
        (0o600, 65534, "belongs to another user \\(UID 65534\\)"),
    ],
)
def test_keys_that_others_can_read_are_refused(
    pems: tuple[str, str], mode: int, owner: int, expected: str | None
) -> None:
    """As in PostgreSQL: 600; 640 when it belongs to root, for the group of a service."""

    cert, key = pems
    os.chmod(key, mode)
    os.chown(key, owner, owner)
    if expected is None:
        assert load_channel_credentials(cert, cert, key) is not None
        return
    for load in (
        lambda: load_server_credentials(TlsFiles(cert, key)),
        lambda: load_channel_credentials(cert, cert, key),
        lambda: _make_tls_context(HeadCredentials(ca=cert, cert=cert, key=key)),
    ):
        with pytest.raises(UsageError, match=expected) as raised:
            load()
        assert "chmod 600" in str(raised.value.hint) or "install -m 600" in str(raised.value.hint)


def test_keys_with_a_password_do_not_ask(pems: tuple[str, str], tmp_path: Path) -> None:
    """A key with a password is refused instead of asking for it on a terminal."""

    cert, key = pems
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", locked],
        check=True,
        capture_output=True,
    )

    with pytest.raises(UsageError, match="not a matching certificate and key"):
        TlsFiles(cert, locked).checked()


def test_grpc_is_loaded_when_it_is_used() -> None:
    """Reading the rules does not load gRPC."""

    code = "import sys, gpulse.cluster.access_control; sys.exit('grpc' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode
