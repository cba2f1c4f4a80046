"""Time-series databases that refuse, complain, restart or stay away for too long, and what becomes of the samples."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import cramjam
import pytest

from gpulse._version import __version__
from gpulse.store.tsdb import send_process
from gpulse.store.tsdb.config import RemoteWriteState, TsdbConfig
from gpulse.store.tsdb.write_client import ConnectionFailed, WriteClient, redact_url
from gpulse.store.tsdb.write_request import encode_time
from tests.integration.cluster import until
from tests.integration.remote_lab import FakeTsdb, Lab, fake_tsdb, lab_in, stored
from tests.integration.test_cluster_tls import make_certificates


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr(send_process, "_REJECTED_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(send_process, "_FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(send_process, "_MAX_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(send_process, "_REPORT_SECONDS", 0.05)


def reached(lab: Lab, state: str) -> RemoteWriteState:
    """Wait for a state."""
    found: RemoteWriteState = until(lambda: (now := lab.forwarder.state()).state == state and now, state)
    return found


def complete(lab: Lab, fake: FakeTsdb) -> bool:
    """Whether the database has at least every sample that the archive has."""
    wanted = sum(len(values) for values in stored(lab.archive).values())
    had = {series for series in fake.taken if b"_info" not in series}
    return wanted == len(had)


@pytest.mark.parametrize(
    ("status", "text", "state", "words"),
    [
        (401, "who are you", "refused", "--remote-headers"),
        (404, "", "refused", "--remote-write"),
        (503, "busy", "failing", "sent again"),
        (500, "", "failing", "sent again"),
        (429, "slow down", "failing", "sent again"),
        (400, "something is wrong with all of it", "refused", "--remote-write"),
    ],
)
def test_a_database_that_refuses_gets_everything_once_it_does_not(
    tmp_path: Path, status: int, text: str, state: str, words: str
) -> None:
    """It is said what it answers and what to try; nothing is skipped."""

    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        fake.status, fake.text = status, text
        lab.tick(5)
        raised = reached(lab, state)
        assert f"HTTP {status} {text}".strip() in (raised.error or "")
        assert words in (raised.hint or "")
        assert (0, 0) == (raised.samples_total, raised.refused_total)

        fake.status = 204
        lab.tick(5)
        lab.sent()

        assert complete(lab, fake)
        assert (None, 0) == (lab.forwarder.state().error, lab.forwarder.state().refused_total)


def test_a_database_says_when_to_come_again(tmp_path: Path) -> None:
    """Nobody asks before that."""

    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        fake.status, fake.headers = 503, {"Retry-After": "1"}
        begun = time.monotonic()
        lab.tick()
        reached(lab, "failing")
        asked = len(fake.asked)
        fake.status = 204
        lab.sent()

        assert time.monotonic() - begun >= 1.0
        assert asked <= len(lab.nodes)  # once for each


def test_series_that_a_database_does_not_want_cost_no_others(tmp_path: Path) -> None:
    """They are counted and told; everything else arrives."""

    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        fake.wanted = lambda series: "GPU-2-1" not in series or "power" not in series
        for _ in range(4):
            lab.tick(5)
        lab.sent()
        state = lab.forwarder.state()

        wanted = stored(lab.archive)
        refused = wanted.pop(("gpulse_gpu_power_watts", "host-2", "GPU-2-1"))
        assert sum(map(len, wanted.values())) == sum(
            count for name, count in fake.samples().items() if "_info" not in name
        )
        assert len(refused) == state.refused_total
        assert "gpulse_gpu_power_watts{gpu='1'" in (state.error or "")
        assert "label value too long" in (state.error or "")


def test_a_database_that_was_restarted_without_a_word_is_sent_the_last_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says itself when it was started; no request has to fail for that."""

    monkeypatch.setattr(send_process, "_RESTART_CHECK_SECONDS", 0.05)
    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        lab.tick(5)
        lab.sent()
        looked = fake.looked
        until(lambda: fake.looked > looked + 1, "it has asked when the database was started")
        fake.taken.clear()
        fake.started = 2.0
        until(lambda: complete(lab, fake), "it has everything again")
        until(lambda: lab.forwarder.state().resent_total, "that is told")

        assert (0, "ok") == (lab.forwarder.state().refused_total, lab.forwarder.state().state)


def test_a_database_that_complains_again_and_again_is_sent_the_same_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets on with what is new first, but what it may have lost is not forgotten."""

    monkeypatch.setattr("gpulse.store.tsdb.send_process._MIN_REWIND_SECONDS", 1.0)
    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        lab.tick()
        lab.sent()
        first = fake.taken[0]
        for _ in range(2):
            fake.status = 503
            lab.tick()
            reached(lab, "failing")
            fake.status = 204
            lab.sent()

        until(lambda: fake.taken.count(first) >= 3, "it was sent again for both times")
        assert complete(lab, fake)


def test_a_database_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for a slow one, which need not have lost anything."""

    monkeypatch.setattr("gpulse.store.tsdb.write_client._TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/write"
        with pytest.raises(ConnectionFailed, match="did not answer within") as raised:
            WriteClient(TsdbConfig(url)).post(b"x")

    assert not raised.value.hard


def test_a_database_that_answers_nonsense_is_tried_again() -> None:
    """Whoever listens there may not speak HTTP at all."""

    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionFailed, match="cannot reach"):
            WriteClient(TsdbConfig(f"http://127.0.0.1:{other.getsockname()[1]}/write")).post(b"x")
        thread.join()


def test_what_a_database_says_is_harmless_for_terminals() -> None:
    """It comes from a stranger, and is shown and logged."""

    with fake_tsdb() as fake:
        fake.status, fake.text = 400, "no\x1b[2J\nway \x07"
        poster = WriteClient(fake.tsdb)
        answer = poster.post(b"")
        poster.close()

    assert "no?[2J way ?" == answer.text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0), ("soon", None), ("-3", None), ("", None)],
)
def test_when_to_come_again_is_said_in_seconds_or_as_a_date(text: str, seconds: float | None) -> None:
    """Anything else is not taken for an answer."""

    with fake_tsdb() as fake:
        fake.headers = {"Retry-After": text}
        poster = WriteClient(fake.tsdb)
        answer = poster.post(bytes(cramjam.snappy.compress_raw(b"")))
        poster.close()

    assert seconds == answer.retry_after


def test_requests_say_who_sends_them(tmp_path: Path) -> None:
    """The headers of the protocol, our name, and whatever the database wants."""

    with fake_tsdb() as fake:
        tsdb = TsdbConfig(fake.tsdb.write_url, headers={"X-Scope-OrgID": "gpus"})
        with lab_in(tmp_path, tsdb, in_thread=True) as lab:
            lab.tick()
            lab.sent()
            state = lab.forwarder.state()

    wanted = {
        "Content-Encoding": "snappy",
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
        "User-Agent": f"gpulse/{__version__}",
        "X-Scope-OrgID": "gpus",
    }
    assert wanted.items() <= fake.asked[0].items()
    assert fake.tsdb.write_url == state.url
    assert "http://h:1/w" == redact_url("http://me:secret@h:1/w?token=1")


def test_when_the_log_gets_too_long_the_oldest_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time-series database that stays away does not fill the disk; how much was given up is counted, and where is known for good."""

    monkeypatch.setattr("gpulse.store.local._SEGMENT_BYTES", 16 << 10)
    with fake_tsdb() as fake:
        fake.status = 503
        with lab_in(tmp_path, fake.tsdb, in_thread=True, limit_bytes=64 << 10) as lab:
            for _ in range(10):
                lab.tick(10)
            assert lab.shorten() > 32 << 10
            for _ in range(40):
                lab.tick(10)
            assert lab.shorten() < 100 << 10
            asked = len(fake.asked)
            until(lambda: len(fake.asked) > asked + 2 * len(lab.nodes), "what is left is read anew")

            fake.status = 204
            lab.sent()
            state = lab.forwarder.state()
            assert state.lost_total > 0
            newest = max(stored(lab.archive)["gpulse_gpu_power_watts", "host-1", "GPU-1-0"])
            assert any(encode_time(newest) in series for series in fake.taken)
            assert not complete(lab, fake)
            begun, left = lab.forwarder.begun, lab.archive._log.first
            assert left <= begun <= lab.archive.accepted

        with lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
            until(lambda: lab.forwarder.begun, "where it begins is told")
            assert left - 1 <= lab.forwarder.begun <= begun
        fresh = fake.tsdb._replace(write_url=f"{fake.tsdb.write_url}/other")
        with lab_in(tmp_path, fresh, in_thread=True) as lab:
            until(lambda: lab.forwarder.begun, "where it begins is told")
            assert left - 1 == lab.forwarder.begun


def test_a_log_that_was_sent_and_sealed_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for as long as something may have to be sent again, and no longer."""

    monkeypatch.setattr("gpulse.store.local._SEGMENT_BYTES", 16 << 10)
    monkeypatch.setattr("gpulse.store.tsdb.send_process.RESEND_SECONDS", 0.2)
    with fake_tsdb() as fake, lab_in(tmp_path, fake.tsdb, in_thread=True) as lab:
        for _ in range(20):
            lab.tick(10)
        lab.sent()
        held = lab.shorten()
        time.sleep(0.3)
        lab.tick()
        lab.sent()
        until(lambda: lab.forwarder.confirmed, "it may be dropped")

        assert lab.shorten() < held / 2
        assert complete(lab, fake)
        assert 0 == lab.forwarder.begun


def test_a_database_behind_tls_is_spoken_to_when_somebody_vouches_for_it(tmp_path: Path) -> None:
    """The authority's certificate is enough; without it nothing is sent."""

    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "head.pem", tmp_path / "head.key")
    with fake_tsdb() as fake:
        server: Any = fake._server
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = fake.tsdb.write_url.replace("http://127.0.0.1", "https://localhost")

        with pytest.raises(ConnectionFailed, match="cannot verify the certificate") as raised:
            WriteClient(TsdbConfig(url)).post(b"")
        assert "--remote-ca" in (raised.value.hint or "")

        tsdb = TsdbConfig(url, ca=str(tmp_path / "ca.pem"))
        with lab_in(tmp_path / "data", tsdb, in_thread=True) as lab:
            lab.tick()
            lab.sent()
            assert complete(lab, fake)
