"""The `[idle]` table: what is valid, and what errors say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gpulse.cluster.notify.config import find_user_address, parse_config, parse_idle_policy
from gpulse.cluster.notify.idle_policy import Exemptions, IdlePolicy
from gpulse.errors import UsageError

TARGETS = {"ops": "slack", "mail": "mailtos", "bob-chat": "ntfy"}


def parsed(text: str, path: str = "/etc/notify.toml") -> IdlePolicy:
    """The policy in a table."""
    return parse_idle_policy(tomllib.loads(text), path, TARGETS)


def refused(text: str) -> str:
    """The message and the hint of the error about a table."""
    with pytest.raises(UsageError) as caught:
        parsed(text)
    return f"{caught.value.message} | {caught.value.hint}"


def test_defaults() -> None:
    """An empty table is a dry run without a hook."""

    assert parsed("") == IdlePolicy()
    assert parsed("").dry_run


def test_everything() -> None:
    """All keys, with durations as people write them."""

    policy = parsed(
        """
        after = "1 h"
        warn_again = "15 min"
        hook_after = "1h30m"
        threshold = 0.02
        dry_run = false
        hook = ["/usr/local/sbin/free-gpu", "--job={job_id}", "{user}"]
        hook_user = "gpulse-ops"
        hook_timeout = 90
        max_hooks_per_hour = 5
        exempt_users = ["root", "svc-*"]
        exempt_jobs = ["slurm:1"]
        exempt_nodes = ["login*"]
        users = { bob = "bob-chat", eve = "eve@example.org" }
        mail = "{user}@example.org"
        mail_target = "mail"
        targets = ["ops"]
    """
    )

    assert policy == IdlePolicy(
        3600.0,
        900.0,
        5400.0,
        0.02,
        dry_run=False,
        hook=("/usr/local/sbin/free-gpu", "--job={job_id}", "{user}"),
        hook_user="gpulse-ops",
        hook_timeout_seconds=90.0,
        max_hooks_per_hour=5,
        exempt=Exemptions(("root", "svc-*"), ("slurm:1",), ("login*",)),
        users=(("bob", "bob-chat"), ("eve", "eve@example.org")),
        mail="{user}@example.org",
        mail_target="mail",
        targets=("ops",),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("afer = 3", "did you mean after?"),
        ('after = "soon"', "idle.after"),
        ("after = 0", "not a duration between 1 s"),
        ('dry_run = "no"', "idle.dry_run"),
        ('hook = ["free-gpu"]', "absolute path"),
        ('hook = ["/bin/{job}"]', "must not contain a placeholder"),
        ('hook = ["/bin/x", "{jobs}"]', "{jobs} is not a placeholder"),
        ('targets = ["opps"]', "did you mean ops?"),
        (
            'mail = "{user}@example.org"',
            "idle.mail_target, the target through which users get mail, is missing",
        ),
        ('mail_target = "ops"', "cannot send mail"),
        ('mail_target = "mail"\nmail = "all@example.org"', "with {user} in it"),
        ('mail_target = "mail"\nusers = { eve = "eve@x?to=b" }', "is not a mail address"),
        ('users = { eve = "nowhere" }', "which is not a target"),
        ('users = "missing.toml"', "cannot read idle.users"),
        ("threshold = 1.5", "idle.threshold"),
    ],
)
def test_refused(text: str, words: str) -> None:
    """An error names the key and what to write instead."""

    assert words in refused(text)


def test_users_file(tmp_path: Path) -> None:
    """The users can be in a file beside the settings."""

    (tmp_path / "users.toml").write_text('ada = "ada@example.org"\n"dom\\\\eve" = "ops"\n')
    policy = parsed('users = "users.toml"\nmail_target = "mail"', str(tmp_path / "notify.toml"))

    assert dict(policy.users) == {"ada": "ada@example.org", "dom\\eve": "ops"}


def test_addresses() -> None:
    """A listed user's own address, else the pattern, but never with a name that does not belong into an address."""

    known = {"ada": "ada@lab.example"}
    mail = "{user}@example.org"

    assert find_user_address("ada", known, mail) == "ada@lab.example"
    assert find_user_address("bob", known, mail) == "bob@example.org"
    assert find_user_address("bob", known, None) is None
    assert find_user_address(None, known, mail) is None
    for name in (
        "bob,eve@evil.example",
        "bob eve",
        "bob\n",
        "bob@evil.example",
        "-bob",
        "b" * 65,
        "bob?cc=x",
    ):
        assert find_user_address(name, known, mail) is None


def test_part_of_the_settings() -> None:
    """The settings of a head have the policy, with errors that name their file."""

    text = '[targets.ops]\nurl = "json://localhost"\n[idle]\n'
    config = parse_config(f'{text}targets = ["ops"]', "notify.toml", {}, is_private=True)

    assert config.idle == IdlePolicy(targets=("ops",))
    with pytest.raises(UsageError, match=r"notify\.toml: idle\.after"):
        parse_config(f"{text}after = []", "notify.toml", {}, is_private=True)
