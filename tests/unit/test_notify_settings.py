"""Settings of notifications: what is valid, what errors say, and that no secret is in them."""

from __future__ import annotations

import os
from datetime import time
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner

from gpulse.cli import notify
from gpulse.cli.notify import load_notify_settings
from gpulse.cluster.notify import delivery
from gpulse.cluster.notify.changes import find_targets
from gpulse.cluster.notify.config import NotifyConfig, QuietHours, Route, load_config, parse_config
from gpulse.cluster.notify.secret_text import SecretText, holds_secret, redact
from gpulse.errors import MissingExtraError, UsageError, install_command
from tests.unit.notified_findings import Active

SECRET = "hunter2-TOPSECRET"
FULL = f"""
link = "https://gpus.example.com/gpulse/"
group_seconds = 60
resolve_seconds = 300
repeat_seconds = 86400
max_per_hour = 10
give_up_hours = 12

[targets.admins]
url = "mailtos://gpulse:{SECRET}@smtp.example.com?to=admins@example.com"
[targets.chat]
url_env = "CHAT_URL"
max_per_hour = 5

[[routes]]
targets = ["admins", "chat"]
severity = "high"
categories = ["fault"]
findings = ["gpu_*", "node_lost"]
nodes = ["gpu-*"]
users = ["alice"]
jobs = ["47*"]

[quiet]
start = "22:00"
end = "7:30"
time_zone = "Europe/Berlin"
except_severity = "critical"
except_findings = ["node_lost"]
"""


def parsed(text: str, *, is_private: bool = True, **environment: str) -> NotifyConfig:
    """The settings in a text."""
    return parse_config(text, "/etc/notify.toml", environment, is_private=is_private)


def refused(text: str, *, is_private: bool = True, **environment: str) -> tuple[str, str]:
    """The message and the hint of the error about a text."""
    with pytest.raises(UsageError) as caught:
        parsed(text, is_private=is_private, **environment)
    assert SECRET not in f"{caught.value.message} {caught.value.hint} {caught.value.__context__}"
    return caught.value.message, caught.value.hint or ""


def test_all_settings_are_read() -> None:
    """With the secrets from the environment."""
    config = parsed(FULL, CHAT_URL="slack://A/B/C")

    assert [("admins", "mailtos", 10), ("chat", "slack", 5)] == [
        (one.name, one.schema, one.max_per_hour) for one in config.targets.values()
    ]
    assert SecretText("slack://A/B/C") == config.targets["chat"].url
    assert (
        Route(
            ("admins", "chat"), "high", ("fault",), ("gpu_*", "node_lost"), ("gpu-*",), ("alice",), ("47*",)
        ),
    ) == config.routes
    zone = ZoneInfo("Europe/Berlin")
    assert QuietHours(time(22), time(7, 30), zone, "critical", (), ("node_lost",)) == config.quiet
    assert ("https://gpus.example.com/gpulse", 60, 300, 86400, 12 * 3600) == (
        config.link,
        config.group_seconds,
        config.resolve_seconds,
        config.repeat_seconds,
        config.give_up_seconds,
    )


def test_every_condition_of_a_route_must_match() -> None:
    """A list matches if one of its patterns does."""
    route = parsed(FULL, CHAT_URL="slack://A/B/C").routes[0]
    fits = Active(node="gpu-1")
    misses = [
        fits._replace(severity="medium"),
        fits._replace(category="slowness"),
        fits._replace(finding="clocks_low"),
        fits._replace(node="cpu-1"),
        fits._replace(users=("bob",)),
        fits._replace(users=()),
        fits._replace(jobs=("5",)),
    ]

    assert ("admins", "chat") == find_targets(fits, [route])
    assert [()] * len(misses) == [find_targets(one, [route]) for one in misses]


def test_parts_of_a_url_come_from_files_and_the_environment(tmp_path: Path) -> None:
    """Encoded, so that a password may have any characters."""
    (tmp_path / "password").write_text("p@ss/w:rd\n", encoding="utf-8")
    (tmp_path / "password").chmod(0o600)
    path = tmp_path / "notify.toml"
    path.write_text(
        '[targets.a]\nurl = "mailto://${MAIL_USER}:${file:password}@smtp.example.com"\n', encoding="utf-8"
    )
    config = load_config(str(path), {"MAIL_USER": "gpulse"})

    assert "mailto://gpulse:p%40ss%2Fw%3Ard@smtp.example.com" == config.targets["a"].url.reveal()


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """In the settings and in the files that they name; URLs without secrets may be public."""
    secret = tmp_path / "chat.url"
    secret.write_text(f"slack://{SECRET}/b/c", encoding="utf-8")
    secret.chmod(0o644)
    path = tmp_path / "notify.toml"
    path.write_text('[targets.a]\nurl_file = "chat.url"', encoding="utf-8")
    with pytest.raises(UsageError, match="other users can read"):
        load_config(str(path), {})
    secret.chmod(0o600)

    assert f"slack://{SECRET}/b/c" == load_config(str(path), {}).targets["a"].url.reveal()
    message, hint = refused(f'[targets.a]\nurl = "json://host/{SECRET}"', is_private=False)
    assert ("other users can read /etc/notify.toml, which contains the URL of targets.a", True) == (
        message,
        hint.startswith("chmod 600 /etc/notify.toml"),
    )
    assert "json" == parsed('[targets.a]\nurl = "json://host:8080"', is_private=False).targets["a"].schema
    mixed = f'[targets.a]\nurl = "mailto://bob:{SECRET}@host?to=${{TO}}"'
    assert "which contains the URL of targets.a" in refused(mixed, is_private=False, TO="a@b.c")[0]


TARGET = f'[targets.a]\nurl = "json://h/{SECRET}"\n'
ERRORS = {
    "x = ": "is not valid TOML",
    "": "/etc/notify.toml: targets is missing",
    "targets = {}": "has no targets",
    '[targets.a]\nurll = "json://h"': "unknown key 'targets.a.urll'",
    f'[targets.a]\nurl = "{SECRET}"': "the URL of targets.a does not start with a scheme",
    '[targets.a]\nurl = "json://h"\nurl_env = "X"': "targets.a needs exactly one of url, url_file and url_env",
    "[targets.a]": "targets.a needs exactly one of url, url_file and url_env",
    '[targets.a]\nurl_env = "MISSING"': "refers to the environment variable MISSING, which is not set",
    '[targets.a]\nurl_file = "/missing"': "refers to the file /missing, which cannot be read",
    '[targets."a b"]\nurl = "json://h"': "'a b' is not a valid name of a target",
    f'[targets.a]\nurl_env = "slack://{SECRET}/b"': "targets.a.url_env refers to an environment variable",
    f'[targets.a]\nurl_file = "slack://{SECRET}/b"': "targets.a.url_file refers to a file by a URL instead of a path",
    f'[targets.a]\nurl = "json://h/${{file:json://{SECRET}}}"': "targets.a.url refers to a file by a URL",
    f'[targets.a]\nurl = "json://h/${{{SECRET}}}"': "targets.a.url refers to an environment variable",
    f'[targets."slack://{SECRET}/b"]\nurl = "json://h"': "(a URL) is not a valid name of a target",
    f'[targets.a]\n"slack://{SECRET}" = "json://h"': "unknown key (a URL)",
    "[targets.a]\nurl = 5": "targets.a.url: expected text",
    TARGET + '[[routes]]\ntargets = ["b"]': "routes[0].targets names 'b', which is not a target",
    TARGET + f'[[routes]]\ntargets = ["slack://{SECRET}"]': "routes[0].targets names (a URL), which is not",
    TARGET + "[[routes]]\ntargets = []": "routes[0].targets: expected a list of length >= 1",
    TARGET
    + '[[routes]]\ntargets = ["a"]\nseverity = "hihg"': "routes[0].severity has an unknown value: 'hihg'",
    TARGET + '[[routes]]\ntargets = ["a"]\nseverities = "high"': "unknown key 'routes[0].severities'",
    TARGET + '[[routes]]\ntargets = ["a"]\nfindings = ["gpu_falt"]': "no finding is called 'gpu_falt'",
    TARGET + '[quiet]\nstart = "25:00"\nend = "7:00"': "quiet.start must be a time of day",
    TARGET + '[quiet]\nstart = "22:00"': "quiet.end is missing",
    TARGET + '[quiet]\nstart = "7:00"\nend = "7:00"': "quiet.start and quiet.end are the same time",
    TARGET + '[quiet]\nstart = "22:00"\nend = "7:00"\ntime_zone = "Mars"': "'Mars' is not a known time zone",
    'link = "ftp://x"\n' + TARGET: "link must be the URL of a web page",
    'link = "http://u:p@x"\n' + TARGET: "link must not contain a password",
    "group_seconds = -1\n" + TARGET: "group_seconds: expected a number >= 0",
    "max_per_hour = 0\n" + TARGET: "max_per_hour: expected a whole number >= 1",
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_names_the_key_and_what_to_do_but_no_secret(text: str) -> None:
    """Settings are written by hand."""
    message, hint = refused(text)

    assert (True, True) == (ERRORS[text] in message, bool(hint)), (message, hint)


def test_a_secret_is_not_in_the_representation_of_the_settings() -> None:
    """Whatever prints them."""
    config = parsed(FULL, CHAT_URL=f"slack://{SECRET}/B/C")

    assert SECRET not in f"{config} {config!r} {config.targets['admins'].url}"


@pytest.mark.parametrize(
    ("url", "text", "expected"),
    [
        (
            "json://host/tok-123?+Auth=abc%2Fdef",
            "POST host /tok-123 abc/def abc%2Fdef",
            "POST host /*** *** ***",
        ),
        (
            "mailto://bob:s%40cret@smtp.example.com",
            "smtp.example.com: bob, s@cret, s%40cret",
            "smtp.example.com: ***, ***, ***",
        ),
        ("slack://tokA/tokB/tokC/#chan", "tokA and tokB and tokC", "*** and *** and ***"),
        (
            "https://hooks.example.com/T0/B1234/xyzzy",
            "hooks.example.com says xyzzy",
            "hooks.example.com says ***",
        ),
    ],
)
def test_messages_of_libraries_lose_the_secrets_of_a_url(url: str, text: str, expected: str) -> None:
    """In every encoding; the name of a machine stays."""

    assert expected == redact(text, url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("json://h", False),
        ("json://h:1/", False),
        ("json://h/x", True),
        ("json://u@h", True),
        ("json://h?x=y", True),
        ("slack://h", True),
        ("ntfy://topic", True),
        ("json://h/${PATH}?+Token=${T}&verify=no", False),
        ("json://h/${PATH}/x", True),
        ("json://h?+Token=${T}x", True),
        ("json://h?${T}&secret", True),
        ("json://${TOKEN}@h", False),
        ("mailtos://bob:${file:password}@h?from=a@b.c&to=d@e.f", False),
        ("mailtos://${USER}:literal@h?from=a@b.c", True),
        ("mailtos://bob:literal@h?to=${TO}", True),
        ("mailtos://bob:x${PASSWORD}@h", True),
        ("mailto://h?to=d@e.f&pass=literal", True),
        ("slack://${A}/${B}/${C}", False),
        ("slack://${A}/literal/${C}", True),
        ("${WHOLE}", True),
    ],
)
def test_what_is_literal_in_a_url_may_be_a_secret(url: str, *, expected: bool) -> None:
    """One reference does not make the rest public; for kinds whose host is a token, everything may be secret."""

    assert expected == holds_secret(url)


def test_without_apprise_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is read."""
    monkeypatch.setattr(delivery, "find_spec", lambda _: None)

    with pytest.raises(MissingExtraError) as caught:
        load_notify_settings(tmp_path / "missing.toml")

    assert install_command("notify") == caught.value.hint


def test_without_apprise_settings_can_be_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All but the URLs beyond their kind, and that is said; the head refuses them, because it would send."""
    path = tmp_path / "notify.toml"
    path.write_text('[targets.admins]\nurl = "json://localhost"\n', encoding="utf-8")
    monkeypatch.setattr(delivery, "find_spec", lambda _: None)

    checked = CliRunner().invoke(notify.check, [str(path)])
    assert 0 == checked.exit_code
    assert "target admins: json, at most" in checked.stdout
    assert "only the schemes of the URLs were checked, because apprise is not installed" in checked.stderr
    assert install_command("notify") in checked.stderr
    path.write_text('[targets.admins]\nurl = "no kind"\n', encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="does not start with a scheme"):
        CliRunner().invoke(notify.check, [str(path)], catch_exceptions=False, standalone_mode=False)
    with pytest.raises(MissingExtraError):
        load_notify_settings(path)


def test_settings_that_others_can_change_are_refused(tmp_path: Path) -> None:
    """They say which program is run; without one, members of the file's group may change them."""
    path, users = tmp_path / "notify.toml", tmp_path / "users.toml"
    plain = '[targets.a]\nurl = "json://localhost"\n'
    hooked = f'{plain}[idle]\nhook = ["/bin/true"]\nusers = "users.toml"\n'
    users.write_text('ada = "a"\n', encoding="utf-8")

    def is_refused(text: str, file: Path, mode: int) -> bool:
        path.write_text(text, encoding="utf-8")
        file.chmod(mode)
        try:
            load_config(str(path), {})
        except UsageError as error:
            return f"other users can change {file}" in error.message and f"chmod go-w {file}" == error.hint
        finally:
            file.chmod(0o600)
        return False

    assert [True, False] == [is_refused(plain, path, mode) for mode in (0o646, 0o664)]
    assert [True, True, False] == [is_refused(hooked, path, mode) for mode in (0o646, 0o664, 0o644)]
    assert [True, True, False] == [is_refused(hooked, users, mode) for mode in (0o646, 0o664, 0o644)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_settings_of_another_user_are_refused(tmp_path: Path) -> None:
    """Their owner could change them at any time."""
    path, users = tmp_path / "notify.toml", tmp_path / "users.toml"
    users.write_text('ada = "a"\n', encoding="utf-8")
    path.write_text('[targets.a]\nurl = "json://localhost"\n[idle]\nusers = "users.toml"\n', encoding="utf-8")
    load_config(str(path), {})

    for file in (path, users):
        os.chown(file, 65534, -1)
        with pytest.raises(UsageError, match=f"{file} belongs to user ID 65534"):
            load_config(str(path), {})
        os.chown(file, 0, -1)


def test_a_list_of_users_that_is_no_file_does_not_block(tmp_path: Path) -> None:
    """Such as a FIFO that nobody writes."""
    os.mkfifo(tmp_path / "users.toml")
    path = tmp_path / "notify.toml"
    path.write_text('[targets.a]\nurl = "json://localhost"\n[idle]\nusers = "users.toml"\n', encoding="utf-8")

    with pytest.raises(UsageError, match="is not a regular file"):
        load_config(str(path), {})
