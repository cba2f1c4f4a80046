"""`gpulse notify`: check the notification settings of a head, and send test messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpulse.cli import common, head_client
from gpulse.cli.common import CommandGroup, closest
from gpulse.cluster.notify.changes import find_targets
from gpulse.cluster.notify.config import NotifyConfig, Route, load_config
from gpulse.cluster.notify.delivery import check_targets, has_apprise, require_apprise, send_to_all
from gpulse.cluster.notify.idle_hook import check_idle_policy
from gpulse.cluster.notify.templates import build_test_message, describe_policy
from gpulse.cluster.protocol.answers import Findings, NodeFinding
from gpulse.errors import UsageError, install_command
from gpulse.model.finding import FindingCategory, Severity, format_places
from gpulse.model.safe_text import plain

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group(cls=CommandGroup)
def command() -> None:
    """Check the notification settings of a head (`gpulse head --notify FILE`), and send test messages.

    \b
    gpulse notify check notify.toml                   check the file and its URLs without sending anything
    gpulse notify check notify.toml --findings        also show where a head's current findings would go
    gpulse notify test notify.toml                    send a test message to every target
    gpulse notify test notify.toml --target admins    send one to this target only

    \b
    The URL of a target is an apprise URL (https://github.com/caronc/apprise), such as:
      mailtos://USER:PASSWORD@smtp.example.com?from=gpulse@example.com&to=admins@example.com
      slack://TOKEN_A/TOKEN_B/TOKEN_C
      ntfys://ntfy.example.com/TOPIC
      jsons://hooks.example.com/gpulse
    """  # noqa: D301  click needs the backspace itself


@command.command()
@_file
@click.option(
    "--target", "names", multiple=True, metavar="NAME", help="Send to this target only; repeatable."
)
def test(*, file: Path, names: tuple[str, ...]) -> int:
    """Send a test message to each target.

    Prints which targets accepted the message. The exit code is 1 if a target did not accept it.
    """
    config = load_notify_settings(file)
    for name in names:
        if name not in config.targets:
            close = closest(name, config.targets)
            raise UsageError(
                f"{file} has no target {name!r}",
                hint=f"did you mean {close}?" if close else f"targets are: {', '.join(config.targets)}",
            )
    now, host = time.time(), socket.gethostname()
    messages = {name: build_test_message(name, host, now) for name in names or config.targets}
    results = send_to_all(messages, config.targets)
    width = max(map(len, results))
    for name, error in results.items():
        outcome = "accepted" if error is None else f"failed: {error}"
        common.write(f"{name:<{width}}  {config.targets[name].schema}  {outcome}")
    return 1 if any(error is not None for error in results.values()) else 0


@command.command()
@_file
@click.option(
    "--findings",
    is_flag=True,
    help="Also print which targets would get the current findings of a running head.",
)
@head_client.options
def check(*, file: Path, findings: bool, **given: Any) -> int:
    """Check the file, the URLs of its targets, and the hook for idle GPUs.

    Prints which findings go to which targets. Nothing is sent, and the hook is not run. Run this as the head's user.
    """
    chosen = head_client.pop_target(given)
    config = load_notify_settings(file, sends=False)
    for target in config.targets.values():
        common.write(
            f"target {target.name}: {target.schema}, at most {target.max_per_hour} messages per hour"
        )
    for number, route in enumerate(config.routes):
        common.write(f"route {number + 1}: {_describe_route(route)}")
    unused = [name for name in config.targets if not any(name in route.targets for route in config.routes)]
    if config.idle is not None:
        check_idle_policy(config.idle)
        common.write(f"idle GPUs: {describe_policy(config.idle)}")
        used = {*config.idle.targets, config.idle.mail_target, *(place for _, place in config.idle.users)}
        unused = [name for name in unused if name not in used]
    if unused:
        common.print_note(f"note: no route sends findings to these targets: {', '.join(unused)}")
    if not has_apprise():
        common.print_note(
            "note: only the schemes of the URLs were checked, because apprise is not installed; "
            f"to check them fully and to send messages, run: {install_command('notify')}"
        )
    if findings:
        with head_client.connect_to_head(chosen) as head:
            _print_findings(head.call("findings", Findings).findings, config)
    return 0


def _print_findings(found: Sequence[NodeFinding], config: NotifyConfig) -> None:
    """Print where the current findings of a head go."""
    if not found:
        common.write("the head has no findings now")
    for one in found:
        routed = _CurrentFinding(
            one.id, one.category, one.severity, one.node or "", tuple(one.users), tuple(one.jobs)
        )
        muted = "acknowledged" if one.acknowledged else "silenced" if one.silenced else None
        places = (
            f"no target, because the finding is {muted}"
            if muted
            else ", ".join(find_targets(routed, config.routes)) or "no target"
        )
        (place,) = format_places([{"node": routed.node, "label": one.label}])
        common.write(plain(f"{one.severity} {one.id} on {place} -> {places}"))


class _CurrentFinding(NamedTuple):
    """What routes look at in a finding."""

    finding: str
    category: FindingCategory
    severity: Severity
    node: str
    users: tuple[str, ...]
    jobs: tuple[str, ...]


def _describe_route(route: Route) -> str:
    conditions = [f"severity {route.severity} or higher"]
    for name in ("categories", "findings", "nodes", "users", "jobs"):
        patterns: tuple[str, ...] = getattr(route, name)
        if patterns:
            conditions.append(f"{name} {', '.join(patterns)}")
    return f"{'; '.join(conditions)} -> {', '.join(route.targets)}"


def load_notify_settings(file: Path, *, sends: bool = True) -> NotifyConfig:
    """Read notification settings, and check that messages can be sent to their URLs.

    Args:
        file: The settings.
        sends: Whether something will be sent; otherwise URLs are checked only if the library that sends is installed.

    Raises:
        MissingExtraError: The library that sends is not installed.
        UsageError: The settings are invalid.
    """
    if sends:
        require_apprise()
    config = load_config(str(file), os.environ)
    problems = check_targets(config.targets) if has_apprise() else {}
    if problems:
        text = "; ".join(
            f"targets.{name} ({config.targets[name].schema}://): {why}" for name, why in problems.items()
        )
        raise UsageError(
            f"{file} has a URL that cannot be used: {text}",
            hint="`gpulse notify --help` shows examples of URLs",
        )
    return config
