"""Configuration of notifications: a TOML file with targets, routes, limits and the policy for idle GPUs."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import time
from fnmatch import fnmatchcase
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta, Struct

from gpulse.cluster.notify.idle_hook import check_placeholders, check_settings_file
from gpulse.cluster.notify.idle_policy import Exemptions, IdlePolicy
from gpulse.cluster.notify.secret_text import (
    MAIL_SCHEMAS,
    SecretText,
    holds_secret,
    read_secret_file,
    read_variable,
    resolve_references,
    show_name,
    url_schema,
)
from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.errors import UsageError
from gpulse.model.device import IDLE_RATIO
from gpulse.model.finding import FINDING_CATEGORIES, SEVERITIES, FindingCategory, Severity
from gpulse.model.safe_text import quoted
from gpulse.model.time_text import parse_duration

MAX_CONFIG_BYTES = 1 << 20
MAX_TARGETS = 100
MAX_ROUTES = 200
MIN_SECONDS, MAX_SECONDS = 1.0, 30 * 86_400.0
"""Durations in `[idle]`."""
MAX_HOOK_TIMEOUT_SECONDS = 3600.0
MAX_USERS = 100_000
MAX_USERS_FILE_BYTES = 16 << 20
_MAX_PATTERNS = 200
_MAX_EXEMPTIONS = 1000
_HOUR_SECONDS = 3600.0
_TARGET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNIT_WORDS = (
    (re.compile(r"\s*(?:minutes?|mins?)\b"), "m"),
    (re.compile(r"\s*(?:seconds?|secs?)\b"), "s"),
    (re.compile(r"\s*hours?\b"), "h"),
    (re.compile(r"\s*days?\b"), "d"),
)
_ADDRESS = re.compile(r"[A-Za-z0-9._%+=-]{1,64}@[A-Za-z0-9.-]{1,189}", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Users whose names can be part of a mail address."""
_EXAMPLES = {
    "targets": 'add a table such as [targets.admins] with url_file = "admins.url", and targets = ["admins"] to each route',
    "start": 'add start = "22:00"',
    "end": 'add end = "07:00"',
}
"""What to add for each required key."""
_WORDS = {
    "`object`": "a table",
    "`array`": "a list",
    "`str`": "text",
    "`float`": "a number",
    "`int`": "a whole number",
    "`bool`": "true or false",
    "`null`": "nothing",
}
"""Types as a TOML file has them, by their names in messages of msgspec."""

_Pattern = Annotated[str, Meta(min_length=1, max_length=200)]
_Patterns = Annotated[tuple[_Pattern, ...], Meta(max_length=_MAX_PATTERNS)]
_Duration = str | int | float
_Exemptions = Annotated[tuple[_Pattern, ...], Meta(max_length=_MAX_EXEMPTIONS)]
_Users = Annotated[dict[str, Annotated[str, Meta(max_length=254)]], Meta(max_length=MAX_USERS)]
_PerHour = Annotated[int, Meta(ge=1, le=1000)]
_Table = TypeVar("_Table", bound=Struct)


class _TargetTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table `[targets.NAME]`."""

    url: Annotated[str, Meta(min_length=1, max_length=4000)] | None = None
    url_file: Annotated[str, Meta(min_length=1, max_length=4000)] | None = None
    url_env: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    max_per_hour: _PerHour | None = None


class _RouteTable(Struct, frozen=True, forbid_unknown_fields=True):
    """A table `[[routes]]`."""

    targets: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_TARGETS)]
    severity: Severity = "medium"
    categories: tuple[FindingCategory, ...] = ()
    findings: _Patterns = ()
    nodes: _Patterns = ()
    users: _Patterns = ()
    jobs: _Patterns = ()


class _QuietTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[quiet]`."""

    start: str
    end: str
    time_zone: str | None = None
    except_severity: Severity | None = None
    except_categories: tuple[FindingCategory, ...] = ()
    except_findings: _Patterns = ()


class _Document(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    targets: dict[str, dict[str, Any]]
    routes: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ROUTES)] = []
    link: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    group_seconds: Annotated[float, Meta(ge=0, le=_HOUR_SECONDS)] = 30.0
    resolve_seconds: Annotated[float, Meta(ge=0, le=_HOUR_SECONDS)] = 120.0
    repeat_seconds: Annotated[float, Meta(ge=60, le=7 * 86_400)] | None = None
    max_per_hour: _PerHour = 20
    give_up_hours: Annotated[float, Meta(ge=0.01, le=168)] = 24.0
    quiet: dict[str, Any] | None = None
    idle: dict[str, Any] | None = None


class Target(NamedTuple):
    """Where messages are sent."""

    name: str
    schema: str
    """Kind of the URL, such as `mailto`; the only part of it that is shown."""
    url: SecretText
    max_per_hour: int


class Route(NamedTuple):
    """Which findings are sent to which targets; an empty field matches everything."""

    targets: tuple[str, ...]
    severity: Severity = "medium"
    """The lowest severity that matches."""
    categories: tuple[FindingCategory, ...] = ()
    findings: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


class QuietHours(NamedTuple):
    """Time of day in which nothing is sent but the exceptions."""

    start: time
    end: time
    zone: ZoneInfo | None = None
    """None for the time zone of the head's machine."""
    except_severity: Severity | None = None
    except_categories: tuple[FindingCategory, ...] = ()
    except_findings: tuple[str, ...] = ()


class NotifyConfig(NamedTuple):
    """Configuration of notifications."""

    targets: Mapping[str, Target]
    routes: tuple[Route, ...] = ()
    link: str | None = None
    """Address of the head's web page as people reach it; None for messages without links."""
    group_seconds: float = 30.0
    """How long changes are collected before they are sent as one message."""
    resolve_seconds: float = 120.0
    """How long a finding must be absent before it counts as resolved."""
    repeat_seconds: float | None = None
    """Interval of reminders of active findings; None for none."""
    give_up_seconds: float = 86_400.0
    """How long a message is retried."""
    quiet: QuietHours | None = None
    idle: IdlePolicy | None = None
    """What is done about GPUs that are held and unused; None for nothing."""


def load_config(path: str, environment: Mapping[str, str]) -> NotifyConfig:
    """Read the configuration of notifications, with the secrets that it refers to.

    Args:
        path: The TOML file.
        environment: The environment variables.

    Raises:
        UsageError: A file cannot be read, a value is invalid, other users can read a secret, or they can change the
            settings. The message never contains a URL.
    """
    text, found = _read_text(path)
    check_settings_file(path, found, has_hook=False)
    config = parse_config(text, path, environment, is_private=not found.st_mode & 0o077)
    check_settings_file(path, found, has_hook=config.idle is not None and bool(config.idle.hook))
    return config


def parse_config(text: str, path: str, environment: Mapping[str, str], *, is_private: bool) -> NotifyConfig:
    """Return the configuration in a TOML text.

    Args:
        text: The text.
        path: Its file, for messages; relative paths refer to its directory.
        environment: The environment variables.
        is_private: Whether only the owner can read the file; otherwise it must not contain secrets.

    Raises:
        UsageError: As for `load_config`.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(
            f"{path} is not valid TOML: {reason}", hint='put text in quotes: url = "mailto://..."'
        ) from None
    given = _convert(document, _Document, path, "")
    targets = _read_targets(given, path, environment, is_private=is_private)
    routes = tuple(
        _read_route(_convert(table, _RouteTable, path, f"routes[{number}]"), targets, path, number)
        for number, table in enumerate(given.routes)
    )
    return NotifyConfig(
        targets,
        routes,
        None if given.link is None else _check_link(given.link, path),
        given.group_seconds,
        given.resolve_seconds,
        given.repeat_seconds,
        given.give_up_hours * _HOUR_SECONDS,
        None if given.quiet is None else _read_quiet(given.quiet, path),
        None
        if given.idle is None
        else parse_idle_policy(given.idle, path, {name: one.schema for name, one in targets.items()}),
    )


def _read_text(path: str) -> tuple[str, os.stat_result]:
    """Return the text of a configuration file, and what is known of that file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            data = file.read(MAX_CONFIG_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise UsageError(
            f"cannot read the notification settings {path}: {error.strerror}",
            hint="check the name and the permissions of the file",
        ) from error
    if not stat.S_ISREG(found.st_mode) or len(data) > MAX_CONFIG_BYTES:
        raise UsageError(
            f"{path} is not a file with notification settings", hint="give a TOML file smaller than 1 MiB"
        )
    try:
        return data.decode("utf-8-sig"), found
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None


def _read_targets(
    given: _Document, path: str, environment: Mapping[str, str], *, is_private: bool
) -> dict[str, Target]:
    if not given.targets:
        raise UsageError(
            f"{path} has no targets", hint='add a table such as [targets.admins] with url = "mailto://..."'
        )
    if len(given.targets) > MAX_TARGETS:
        raise UsageError(f"{path} has more than {MAX_TARGETS} targets", hint="remove some of the targets")
    targets = {}
    for name, table in given.targets.items():
        if not _TARGET_NAME.fullmatch(name):
            raise UsageError(
                f"{path}: {show_name(name)} is not a valid name of a target",
                hint="use letters, digits, - and _, as in [targets.admins]",
            )
        one = _convert(table, _TargetTable, path, f"targets.{name}")
        url = _read_url(name, one, path, environment, is_private=is_private)
        schema = url_schema(url)
        if schema is None:
            raise UsageError(
                f"{path}: the URL of targets.{name} does not start with a scheme such as mailto://",
                hint="see `gpulse notify --help` for examples of URLs",
            )
        targets[name] = Target(name, schema, SecretText(url), one.max_per_hour or given.max_per_hour)
    return targets


def _read_url(
    name: str, table: _TargetTable, path: str, environment: Mapping[str, str], *, is_private: bool
) -> str:
    where, directory = f"targets.{name}", os.path.dirname(os.path.abspath(path))
    if sum(value is not None for value in (table.url, table.url_file, table.url_env)) != 1:
        raise UsageError(
            f"{path}: {where} needs exactly one of url, url_file and url_env",
            hint='for example url_file = "admins.url", a file with the URL that only you can read',
        )
    if table.url_file is not None:
        return read_secret_file(os.path.join(directory, table.url_file), where=f"{where}.url_file")
    if table.url_env is not None:
        return read_variable(table.url_env, environment, where=f"{where}.url_env")
    url = table.url or ""
    if not is_private and holds_secret(url):
        raise UsageError(
            f"other users can read {path}, which contains the URL of {where}",
            hint=f'chmod 600 {shlex.quote(path)}, or keep the URL in another file: url_file = "{name}.url"',
        )
    return resolve_references(url.strip(), environment, directory=directory, where=f"{where}.url")


def _read_route(table: _RouteTable, targets: Mapping[str, Target], path: str, number: int) -> Route:
    for name in table.targets:
        _check_target(name, targets, path, f"routes[{number}].targets")
    _check_findings(table.findings, path, f"routes[{number}].findings")
    return Route(**msgspec.structs.asdict(table))


def _read_quiet(table: dict[str, Any], path: str) -> QuietHours:
    given = _convert(table, _QuietTable, path, "quiet")
    _check_findings(given.except_findings, path, "quiet.except_findings")
    zone = None
    if given.time_zone is not None:
        try:
            zone = ZoneInfo(given.time_zone)
        except (OSError, ValueError, LookupError):
            raise UsageError(
                f"{path}: quiet.time_zone {quoted(given.time_zone)} is not a known time zone",
                hint='give a name such as "Europe/Berlin" or "UTC"',
            ) from None
    start, end = (
        _parse_time_of_day(value, path, f"quiet.{name}")
        for name, value in (("start", given.start), ("end", given.end))
    )
    if start == end:
        raise UsageError(
            f"{path}: quiet.start and quiet.end are the same time",
            hint='give two times, such as start = "22:00" and end = "07:00"',
        )
    return QuietHours(start, end, zone, given.except_severity, given.except_categories, given.except_findings)


def _check_findings(patterns: Sequence[str], path: str, where: str) -> None:
    """Check that every pattern matches a finding: with a typing error, nothing would ever be sent."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in RULES_BY_ID):
            raise UsageError(
                f"{path}: {where}: no finding is called {quoted(pattern)}",
                hint=_suggest(pattern, list(RULES_BY_ID)) or "`gpulse explain` lists all findings",
            )


def _parse_time_of_day(text: str, path: str, where: str) -> time:
    match = _TIME_OF_DAY.fullmatch(text)
    if match is None:
        raise UsageError(f"{path}: {where} must be a time of day", hint='write it as "22:00"')
    return time(int(match[1]), int(match[2]))


def _check_link(text: str, path: str) -> str:
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not text.isprintable() or " " in text:
        raise UsageError(
            f"{path}: link must be the URL of a web page",
            hint='give the address of this head\'s page, such as "http://head.example.com:8091"',
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"{path}: link must not contain a password, a query or a fragment, because it is part of every message",
            hint='for example "http://head.example.com:8091"',
        )
    return text.rstrip("/")


def _convert(table: Mapping[str, Any], kind: type[_Table], path: str, where: str) -> _Table:
    """Convert a table of the file into its type; messages name the key."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text = str(error)
    inside = _AT.search(text)
    reason = _AT.sub("", text)
    keys = [name for name in (where, inside[1] if inside else "") if name]
    key = ".".join(keys).replace(".[", "[")
    names = kind.__struct_fields__
    if unknown := _UNKNOWN_FIELD.fullmatch(reason):
        key = ".".join([*keys, unknown[1]])
        raise UsageError(
            f"{path}: unknown key {show_name(key, 120)}",
            hint=_suggest(unknown[1], names) or f"valid keys are: {', '.join(names)}",
        )
    if missing := _MISSING_FIELD.fullmatch(reason):
        raise UsageError(f"{path}: {'.'.join([*keys, missing[1]])} is missing", hint=_EXAMPLES[missing[1]])
    if reason.startswith("Invalid enum value"):
        choices = FINDING_CATEGORIES if "categories" in key else SEVERITIES
        raise UsageError(
            f"{path}: {key} has an unknown value: {reason.removeprefix('Invalid enum value ')}",
            hint=f"give one of {', '.join(choices)}",
        )
    raise UsageError(
        f"{path}: {key or 'the file'}: {_plain_reason(reason)}", hint=f"correct {key or 'the file'}"
    )


def _plain_reason(reason: str) -> str:
    """Return a reason of msgspec in the words of a TOML file."""
    reason = reason.replace(" | null`", "`")
    for theirs, ours in _WORDS.items():
        reason = reason.replace(theirs, ours)
    return reason[:1].lower() + reason[1:]


def _suggest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}?" if close else None


class _IdleTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[idle]`."""

    after: _Duration = "30 min"
    warn_again: _Duration = "15 min"
    hook_after: _Duration = "30 min"
    threshold: Annotated[float, Meta(ge=0, lt=1)] = IDLE_RATIO
    dry_run: bool = True
    hook: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=100)] = ()
    hook_user: str | None = None
    hook_timeout: _Duration = "60 s"
    max_hooks_per_hour: Annotated[int, Meta(ge=1, le=10_000)] = 10
    exempt_users: _Exemptions = ()
    exempt_jobs: _Exemptions = ()
    exempt_nodes: _Exemptions = ()
    users: str | _Users | None = None
    mail: Annotated[str, Meta(max_length=254)] | None = None
    mail_target: str | None = None
    targets: tuple[str, ...] = ()


def parse_idle_policy(table: Mapping[str, Any], path: str, targets: Mapping[str, str]) -> IdlePolicy:
    """Return the policy in an `[idle]` table.

    Args:
        table: The table.
        path: The file that it is from, for messages; relative paths refer to its directory.
        targets: The targets in that file: the kind of the URL by name.

    Raises:
        UsageError: A value is invalid.
    """
    given = _convert(table, _IdleTable, path, "idle")
    known = _read_users(given.users, path, has_hook=bool(given.hook))
    for name in (*given.targets, *([given.mail_target] if given.mail_target else ())):
        _check_target(name, targets, path, "idle")
    if given.mail_target is not None and targets[given.mail_target] not in MAIL_SCHEMAS:
        raise UsageError(
            f"{path}: idle.mail_target {quoted(given.mail_target)} cannot send mail to users",
            hint="name a target with a mailto:// or mailtos:// URL",
        )
    if (given.mail or any("@" in address for address in known.values())) and given.mail_target is None:
        raise UsageError(
            f"{path}: idle.mail_target, the target through which users get mail, is missing",
            hint='name a target with a mailto:// URL, as in mail_target = "mail"',
        )
    for user, address in known.items():
        if "@" not in address:
            _check_target(address, targets, path, f"the entry for {quoted(user)} in idle.users")
        elif not _ADDRESS.fullmatch(address):
            raise UsageError(
                f"{path}: idle.users: {show_name(address)} is not a mail address",
                hint=f"correct it for {quoted(user)}",
            )
    if given.mail is not None and (
        "{user}" not in given.mail or not _ADDRESS.fullmatch(given.mail.replace("{user}", "user"))
    ):
        raise UsageError(
            f"{path}: idle.mail must be a mail address with {{user}} in it",
            hint='for example mail = "{user}@example.org"',
        )
    _check_hook(given.hook, path)
    return IdlePolicy(
        after_seconds=_seconds(given.after, path, "after"),
        warn_again_seconds=_seconds(given.warn_again, path, "warn_again"),
        hook_after_seconds=_seconds(given.hook_after, path, "hook_after"),
        threshold=given.threshold,
        dry_run=given.dry_run,
        hook=given.hook,
        hook_user=given.hook_user,
        hook_timeout_seconds=_seconds(given.hook_timeout, path, "hook_timeout", MAX_HOOK_TIMEOUT_SECONDS),
        max_hooks_per_hour=given.max_hooks_per_hour,
        exempt=Exemptions(given.exempt_users, given.exempt_jobs, given.exempt_nodes),
        users=tuple(known.items()),
        mail=given.mail,
        mail_target=given.mail_target,
        targets=given.targets,
    )


def find_user_address(user: str | None, users: Mapping[str, str], mail: str | None) -> str | None:
    """Return the mail address or the target of a user; None when it is unknown.

    Args:
        user: The user's name, as an agent reported it.
        users: Addresses by user.
        mail: Mail address of other users, with `{user}` in it.
    """
    if user is None or user in users:
        return None if user is None else users[user] or None
    if mail is None or not _USER.fullmatch(user):
        return None
    return mail.replace("{user}", user)


def _read_users(given: str | dict[str, str] | None, path: str, *, has_hook: bool) -> dict[str, str]:
    if not isinstance(given, str):
        return given or {}
    name = os.path.join(os.path.dirname(os.path.abspath(path)), given)
    try:
        with open(name, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            data = file.read(MAX_USERS_FILE_BYTES + 1) if stat.S_ISREG(found.st_mode) else b""
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(
                f"{name} is not a regular file",
                hint="set idle.users to the path of a TOML file smaller than 16 MiB",
            )
        check_settings_file(name, found, has_hook=has_hook)
        if len(data) > MAX_USERS_FILE_BYTES:
            raise UsageError(
                f"{name} is larger than 16 MiB",
                hint="set idle.users to the path of a TOML file smaller than 16 MiB",
            )
        return msgspec.convert(tomllib.loads(data.decode()), _Users)
    except OSError as error:
        raise UsageError(
            f"{path}: cannot read idle.users {quoted(name)}: {error.strerror}",
            hint="give the path of a TOML file with one line per user, or a table of users",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{name} is not a list of users: {_AT.sub('', str(error))}",
            hint='write one line per user, as in alice = "alice@example.org"',
        ) from error


def _check_target(name: str, targets: Collection[str], path: str, where: str) -> None:
    if name not in targets:
        raise UsageError(
            f"{path}: {where} names {show_name(name)}, which is not a target",
            hint=_suggest(name, targets) or f"targets are: {', '.join(targets)}",
        )


def _check_hook(hook: tuple[str, ...], path: str) -> None:
    if not hook:
        return
    wrong = check_placeholders(hook)
    if not os.path.isabs(hook[0]):
        wrong = "the program must be given by its absolute path"
    elif any("\0" in argument for argument in hook):
        wrong = "an argument contains a NUL character"
    if wrong is not None:
        raise UsageError(
            f"{path}: idle.hook: {wrong}", hint='for example hook = ["/usr/local/sbin/free-gpu", "{job_id}"]'
        )


def _seconds(given: _Duration, path: str, key: str, most: float = MAX_SECONDS) -> float:
    text = given
    if isinstance(text, str):
        for pattern, unit in _UNIT_WORDS:
            text = pattern.sub(unit, text.strip().lower())
        text = re.sub(r"\s+", "", text)
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = -1.0
    if not MIN_SECONDS <= seconds <= most:
        raise UsageError(
            f"{path}: idle.{key} is {quoted(given)}, which is not a duration between 1 s and {most / 3600:g} h",
            hint=f'for example {key} = "30 min"',
        )
    return seconds
