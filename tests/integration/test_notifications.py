"""Notifications of real heads to real servers: each change once, nothing blocks, and secrets stay secret."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.notify.config import NotifyConfig, Target
from gpulse.cluster.notify.notifier import Notifier
from gpulse.cluster.notify.outbox import Message
from gpulse.cluster.notify.secret_text import SecretText
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Cluster, HeadProcess, cluster_in, until
from tests.integration.commands import run
from tests.integration.receivers import HookServer, Mailbox, running

QUICKLY = {
    "gpulse.cluster.head.expected_nodes:MIN_MISSING_SECONDS": 0.0,
    "gpulse.cluster.notify.outbox:FIRST_RETRY_SECONDS": 0.3,
    "gpulse.cluster.notify.outbox:MAX_RETRY_SECONDS": 0.6,
    "logging:INFO": 10,
}
"""Nodes are missing at once, retries come soon, and the head logs everything."""
SECRETS = ("pw-0LdMaNtHeSeA", "tok-5eCrEtPaTh", "hdr-aUtHoRiZaTi0n", "hang-w0nTaNsWeR")
PASSWORD, PATH_TOKEN, HEADER, HANG_TOKEN = SECRETS
AT_ONCE = "group_seconds = 0\nresolve_seconds = 0\n"
TO_ALL = '[[routes]]\nseverity = "low"\ntargets = ["hook"]\n'


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents that are all gone at the end."""
    with cluster_in(tmp_path) as made:
        yield made


@pytest.fixture
def hook() -> Iterator[HookServer]:
    """A web server that receives notifications."""
    server = HookServer()
    with running(server):
        yield server


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A mail server that requires a password."""
    server = Mailbox("gpulse", PASSWORD)
    with running(server):
        yield server


def write_settings(directory: Path, text: str) -> Path:
    """Write settings that only their owner can read."""
    path = directory / "notify.toml"
    path.write_text(AT_ONCE + text, encoding="utf-8")
    path.chmod(0o600)
    return path


def hook_target(hook: HookServer, name: str = "hook", token: str = PATH_TOKEN) -> str:
    """The settings of a webhook."""
    return f'[targets.{name}]\nurl = "json://127.0.0.1:{hook.port}/{token}?+X-Token={HEADER}"\n'


def mail_url(mailbox: Mailbox, password: str) -> str:
    """The URL of a mail target."""
    return (
        f"mailto://gpulse:{password}@localhost:{mailbox.port}"
        "?smtp=127.0.0.1&from=gpulse@example.com&to=admins@example.com&mode=insecure"
    )


def write_nodes(path: Path, *names: str) -> None:
    """Replace a node list."""
    written = path.with_suffix(".new")
    written.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    written.rename(path)


class ExpectedNodes:
    """A node list: names that never report are missing, and found when they are taken from the list."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "nodes.txt"
        self.set()

    def set(self, *names: str) -> None:
        """Expect these nodes from now on, and one that is always missing, because a list has at least one."""
        write_nodes(self.path, "ghost-0", *names)


def changes(messages: list[str]) -> list[tuple[str, str]]:
    """What messages say has changed: the section, and the node."""
    found = []
    for text in messages:
        section = ""
        for line in text.splitlines():
            if line.endswith(":") and not line.startswith((" ", "-")):
                section = line.rstrip(":")
            elif line.startswith("- "):
                places = line.removeprefix("- ").removeprefix("HIGH ").partition(":")[0]
                found += [(section, place) for place in places.split(", ")]
    return found


def bodies(accepted: list[dict[str, Any]]) -> list[str]:
    """The texts of messages that a webhook accepted."""
    return [message["message"] for message in accepted]


def stored_frames(head: HeadProcess, since: float) -> int:
    """How many frames a head has stored, and so acknowledged, since a time."""
    found = head.get(f"/api/v1/query?metric=power_watts&from={since}")
    return max((len(series["times"]) for series in found["series"]), default=0)


def notified(head: HeadProcess) -> Mapping[str, dict[str, Any]]:
    """The state of notifications, by target."""
    return {target["name"]: target for target in head.get("/status")["notifications"]}


def everything_written(directory: Path) -> str:
    """All files below a directory, but for the settings themselves."""
    return "\n".join(
        path.read_bytes().decode("latin-1")
        for path in directory.rglob("*")
        if path.is_file() and path.name != "notify.toml"
    )


@pytest.mark.slow
def test_each_change_arrives_once_while_another_target_hangs_and_the_head_is_killed(
    cluster: Cluster, hook: HookServer, mailbox: Mailbox, tmp_path: Path
) -> None:
    """By mail and webhook; frames are acknowledged all the time, and no secret is written anywhere."""
    expected, hanging = ExpectedNodes(tmp_path), HookServer()
    hanging.behavior = "hold"
    settings = write_settings(
        tmp_path,
        'link = "http://head.example.com:8091"\n'
        + hook_target(hook)
        + hook_target(hanging, "hanging", HANG_TOKEN)
        + f'[targets.mail]\nurl = "{mail_url(mailbox, "${MAIL_PASSWORD}")}"\n'
        + '[[routes]]\nfindings = ["node_missing"]\ntargets = ["mail", "hook", "hanging"]\n',
    )
    options = ("--freq", "200", "--nodes", str(expected.path), "--notify", str(settings))
    env = {"MAIL_PASSWORD": PASSWORD}
    with running(hanging):
        head = cluster.head(*options, tuned=QUICKLY, env=env)
        agent = cluster.agent("n1", head.port)
        until(lambda: head.nodes() == {"n1": "healthy"} and notified(head), "the node")
        expected.set("ghost-1")
        until(lambda: ("New", "ghost-1") in changes(bodies(hook.accepted)), "the webhook's message")
        hanging.wait_until_seen(1)
        hung_at = time.time()
        until(lambda: stored_frames(head, hung_at) > 5, "frames that are stored while a target hangs")
        assert notified(head)["hanging"]["waiting"] >= 1
        until(lambda: notified(head)["mail"]["waiting"] == notified(head)["hook"]["waiting"] == 0, "delivery")

        head.kill()
        log = head.text
        head = cluster.head(*options, port=head.port, http_port=head.http_port, tuned=QUICKLY, env=env)
        until(lambda: head.nodes() == {"n1": "healthy"}, "the node is back")
        expected.set("ghost-2")
        until(
            lambda: {("Resolved", "ghost-1"), ("New", "ghost-2")} <= set(changes(bodies(hook.accepted))),
            "the end of the first",
        )
        expected.set()
        until(lambda: ("Resolved", "ghost-2") in changes(bodies(hook.accepted)), "the end of the second")
        until(lambda: notified(head)["mail"]["waiting"] == notified(head)["hook"]["waiting"] == 0, "delivery")
        shown = json.dumps(head.get("/status"))
        shown += run("status", "--head", f"127.0.0.1:{head.port}", env={"HOME": str(tmp_path)}).out
        hanging.released.set()
        hanging.wait_for(2)
        assert 0 == agent.end()
        assert 0 == head.end()

    once = Counter(
        {("New", f"ghost-{number}"): 1 for number in range(3)}
        | {("Resolved", f"ghost-{number}"): 1 for number in (1, 2)}
    )
    assert once == Counter(changes(bodies(hook.accepted)))
    assert once == Counter(changes([mail.text for mail in mailbox.mails]))
    assert {("admins@example.com",)} == {mail.recipients for mail in mailbox.mails}
    assert {"gpulse"} == {mail.user for mail in mailbox.mails}
    assert {HEADER} == {headers["X-Token"] for headers in hook.headers}
    assert f"/{PATH_TOKEN}" == hook.seen[0]["path"]
    log += head.text
    assert "mailto" in shown
    written = log + shown + everything_written(tmp_path)
    assert [] == [secret for secret in SECRETS if secret in written]
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_receiver_that_refuses_dies_and_returns_gets_each_change_once(
    cluster: Cluster, hook: HookServer, tmp_path: Path
) -> None:
    """What changed meanwhile comes in one message; silenced findings send nothing, acknowledged ones only their end."""
    expected = ExpectedNodes(tmp_path)
    settings = write_settings(tmp_path, hook_target(hook) + TO_ALL)
    hook.behavior = "refuse"
    head = cluster.head("--nodes", str(expected.path), "--notify", str(settings), tuned=QUICKLY)
    hook.wait_until_seen(2)
    until(lambda: notified(head)["hook"]["state"] == "failing", "the failure is shown")
    assert "500" in notified(head)["hook"]["error"]
    hook.stop()
    until(lambda: "Connection error" in (notified(head)["hook"]["error"] or ""), "the death is noticed")
    for number in range(1, 4):
        expected.set(*(f"ghost-{one}" for one in range(1, number + 1)))
        until(lambda: list(pending(head).values()) == [True] * number, "one more")  # noqa: B023
    expected.set()
    until(lambda: list(pending(head).values()) == [False] * 3, "all but the first are over")
    status = run("status", "--head", f"127.0.0.1:{head.port}", env={"HOME": str(tmp_path)}).out
    assert "cannot send notifications to hook: A Connection error" in status
    _, metrics = metrics_page(head)
    assert 'gpulse_head_notifications_up{target="hook"} 0' in metrics

    hook.behavior = "accept"
    hook.start()
    until(lambda: notified(head)["hook"]["waiting"] == 0, "everything is delivered")
    told = bodies(hook.accepted)
    assert [("New", "ghost-0")] == changes(told[:1])
    assert {("Resolved", f"ghost-{one}"): 1 for one in range(1, 4)} == Counter(changes(told[1:]))
    assert 2 == len(told)

    head.post("/api/v1/silences", {"nodes": ["quiet-1"], "seconds": "1h", "reason": "repair", "by": "ada"})
    head.post("/api/v1/findings/acknowledge", {"keys": ["node_missing/ghost-0"], "by": "ada"})
    expected.set("quiet-1", "loud-1")
    until(lambda: missing(head) == {"ghost-0", "quiet-1", "loud-1"}, "both are missing")
    hook.wait_for(3)
    shown = run(
        *("notify", "check", settings, "--findings", "--head", f"127.0.0.1:{head.port}"),
        env={"HOME": str(tmp_path)},
    )
    assert {
        "high node_missing on ghost-0 -> no target, because the finding is acknowledged",
        "high node_missing on loud-1 -> hook",
        "high node_missing on quiet-1 -> no target, because the finding is silenced",
    } == set(shown.out.splitlines()[2:])
    write_nodes(expected.path, "never-1")
    until(lambda: missing(head) == {"never-1"}, "only another one is missing")
    until(lambda: len(changes(bodies(hook.accepted)[2:])) >= 4, "the ends")
    assert Counter(
        [("New", "loud-1"), ("New", "never-1"), ("Resolved", "loud-1"), ("Resolved", "ghost-0")]
    ) == Counter(changes(bodies(hook.accepted)[2:]))
    until(lambda: notified(head)["hook"]["sent_total"] == len(hook.accepted), "the last answer")
    state = notified(head)["hook"]
    assert ("ok", None, 0) == (state["state"], state["error"], state["waiting"])
    assert 0 == head.end()


def pending(head: HeadProcess) -> dict[str, bool]:
    """The findings with changes that wait for the next message of the webhook, and whether they are active."""
    state = json.loads((head.data_dir / "notifications.json").read_text(encoding="utf-8"))
    return {key: entry["is_active"] for key, entry in state["queues"]["hook"]["pending"].items()}


def missing(head: HeadProcess) -> set[str]:
    """The nodes with a finding that they are missing."""
    found = head.get("/api/v1/findings")["findings"]
    return {one["cause"] for one in found if one["id"] == "node_missing"}


def metrics_page(head: HeadProcess) -> tuple[int, str]:
    """The page for Prometheus."""
    connection = http.client.HTTPConnection("127.0.0.1", head.http_port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.slow
def test_a_fault_of_a_gpu_is_told_with_evidence_advice_and_link(
    cluster: Cluster, hook: HookServer, tmp_path: Path, nvml_library: Path
) -> None:
    """To those who asked for faults of such nodes."""
    fake = FakeNvml.create(tmp_path / "control", 2)
    try:
        fake.gpu(1).remapped_pending = 1
        route = '[[routes]]\ncategories = ["fault"]\nfindings = ["gpu_fault"]\nnodes = ["gpu-*"]\ntargets = ["hook"]\n'
        settings = write_settings(
            tmp_path, 'link = "http://head.example.com:8091"\n' + hook_target(hook) + route
        )
        head = cluster.head("--freq", "250", "--notify", str(settings), tuned=QUICKLY)
        cluster.agent("gpu-01", head.port, "--interval", "0.25", source=(), env=fake.env(nvml_library))
        (message,) = hook.wait_for(1)
        assert message["title"].endswith("on gpu-01 GPU 1")
        text = message["message"]
        for words in ("gpu-01 GPU 1: ", "  Since: ", "  Evidence: ", "  What to do:", "/#/gpu/gpu-01/1"):
            assert words in text
        assert "warning" == message["type"]
        head.end()
    finally:
        fake.close()


def notifier_settings(target: Target, **changed: float) -> NotifyConfig:
    """Settings with one target and no routes."""
    return NotifyConfig({target.name: target}, group_seconds=0.0)._replace(**changed)  # type: ignore[arg-type]


def hook_only(hook: HookServer) -> Target:
    """The target of a webhook."""
    return Target("hook", "json", SecretText(f"json://127.0.0.1:{hook.port}/x"), 1000)


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr("gpulse.cluster.notify.outbox.FIRST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr("gpulse.cluster.notify.outbox.MAX_RETRY_SECONDS", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_retries")
def test_a_slow_receiver_gets_a_message_once_and_one_that_dies_after_accepting_it_twice(
    hook: HookServer, tmp_path: Path
) -> None:
    """Nobody can know that the second one had it."""
    hook.behavior = "hold"
    notifier = Notifier(notifier_settings(hook_only(hook)), str(tmp_path), now=time.time)
    notifier.start()
    try:
        notifier.send(Message("1", "slow", "first"), ["hook", "unknown"])
        hook.wait_until_seen(1)
        hook.released.set()
        hook.wait_for(1)
        until(lambda: notifier.status()[0].sent_total == 1, "the answer")
        hook.behavior = "cut"
        notifier.send(Message("2", "dies", "second"), ["hook"])
        hook.wait_until_seen(2)
        hook.behavior = "accept"
        until(lambda: notifier.status()[0].sent_total == 2, "the second attempt")
    finally:
        notifier.close()

    assert ["slow"] == [one["title"] for one in hook.seen if one["title"] == "slow"]
    assert ["slow", "dies"] == [one["title"] for one in hook.accepted]
    assert 2 <= len([one for one in hook.seen if one["title"] == "dies"])


@pytest.mark.slow
@pytest.mark.usefixtures("quick_retries")
def test_a_message_survives_the_death_of_the_delivery_process_and_a_restart(
    hook: HookServer, tmp_path: Path
) -> None:
    """It is stored before it is sent."""
    hook.behavior = "hold"
    config = notifier_settings(hook_only(hook))
    notifier = Notifier(config, str(tmp_path), now=time.time)
    notifier.start()
    try:
        notifier.send(Message("1", "title", "body"), ["hook"])
        hook.wait_until_seen(1)
        process = notifier._client.pid
        assert process is not None
        os.kill(process, signal.SIGKILL)
        hook.wait_until_seen(2)
        assert "delivery process ended" in (notifier.status()[0].error or "")
    finally:
        notifier.close()
    hook.behavior = "accept"
    hook.released.set()
    count = len(hook.accepted)
    notifier = Notifier(config, str(tmp_path), now=time.time)
    notifier.start()
    try:
        until(lambda: notifier.status()[0].sent_total == 1, "delivery after the restart")
    finally:
        notifier.close()
    assert "title" == hook.accepted[count]["title"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_retries")
def test_a_server_that_never_answers_is_given_up_and_the_process_that_sent_is_gone(
    hook: HookServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the time for it; it is logged and counted."""
    monkeypatch.setattr("gpulse.cluster.notify.delivery.MAX_SEND_SECONDS", 0.3)
    hook.behavior = "hold"
    config = notifier_settings(hook_only(hook), give_up_seconds=1.0)
    notifier = Notifier(config, str(tmp_path), now=time.time)
    notifier.start()
    try:
        notifier.send(Message("1", "title", "body"), ["hook"])
        until(lambda: notifier.status()[0].given_up_total == 1, "giving up")
        assert "the server did not answer in time" == notifier.status()[0].error
    finally:
        notifier.close()

    assert "gave up sending a notification to hook (json) after" in caplog.text


@pytest.mark.slow
def test_a_message_to_one_user_goes_to_that_address_alone(mailbox: Mailbox, tmp_path: Path) -> None:
    """Through a mail target with recipients of its own."""
    target = Target("mail", "mailto", SecretText(mail_url(mailbox, PASSWORD)), 10)
    notifier = Notifier(notifier_settings(target), str(tmp_path), now=time.time)
    notifier.start()
    try:
        notifier.send(
            Message("1", "Your GPU is idle", "Since noon."), ["mail"], recipient="alice@example.com"
        )
        (mail,) = mailbox.wait_for(1)
    finally:
        notifier.close()

    assert ("alice@example.com",) == mail.recipients
    assert ("Your GPU is idle", "Since noon.") == (mail.message["subject"], mail.text.strip())
    assert PASSWORD not in everything_written(tmp_path)


@pytest.mark.slow
def test_the_test_command_says_for_each_target_whether_it_arrived(
    hook: HookServer, mailbox: Mailbox, tmp_path: Path
) -> None:
    """Its exit code is 1 if one did not, and secrets are not shown."""
    down = HookServer()
    settings = write_settings(
        tmp_path,
        hook_target(hook) + hook_target(down, "down", HANG_TOKEN) + '[targets.mail]\nurl_env = "MAIL_URL"\n',
    )
    env = {"MAIL_URL": mail_url(mailbox, PASSWORD)}
    ended = run("notify", "test", settings, env=env)
    good = run("notify", "test", settings, "--target", "mail", env=env)
    unknown = run("notify", "test", settings, "--target", "mial", env=env)
    wrong = (
        f"mailto://{PASSWORD}",
        f"mailto://u:{PASSWORD}@[{PATH_TOKEN}",
        f"slack://{PATH_TOKEN}",
        f"x://{PASSWORD}",
    )
    checked = [run("notify", "check", settings, env={"MAIL_URL": url}) for url in wrong]

    assert (1, "") == (ended.code, ended.err)
    hook_line, down_line, mail_line = ended.out.splitlines()
    assert ("hook  json  accepted", "mail  mailto  accepted") == (hook_line, mail_line)
    assert down_line.startswith("down  json  failed: A Connection error")
    assert (0, "mail  mailto  accepted\n") == (good.code, good.out)
    assert (2, True) == (unknown.code, "did you mean mail?" in unknown.err)
    for one in checked:
        assert (2, True) == (one.code, "a URL that cannot be used: targets.mail" in one.err)
    assert ["gpulse: test message to hook"] == [message["title"] for message in hook.accepted]
    assert ["gpulse: test message to mail"] * 2 == [mail.message["subject"] for mail in mailbox.mails]
    shown = "".join(one.out + one.err for one in (ended, good, unknown, *checked))
    assert [] == [secret for secret in SECRETS if secret in shown]


def test_settings_that_are_missing_are_an_error_of_the_user(tmp_path: Path) -> None:
    """The head does not start without notifications that somebody relies on."""
    ended = run("head", "--notify", tmp_path / "missing.toml", "--data-dir", tmp_path / "data")

    assert (2, True) == (ended.code, "cannot read the notification settings" in ended.err)


def test_a_hook_that_a_head_refuses_is_found_by_the_check(tmp_path: Path) -> None:
    """Nobody should learn of it from a head that does not start."""
    table = '[targets.a]\nurl = "json://localhost"\n[idle]\nhook = ["/no/such/hook"]\nhook_user = "root"\n'
    ended = run("notify", "check", write_settings(tmp_path, table))

    assert (2, True) == (ended.code, "[idle] hook" in ended.err)
