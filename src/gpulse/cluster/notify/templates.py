"""Text of messages about findings and unused GPUs: plain text, in which everything from outside is made safe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from gpulse.cluster.notify.changes import FindingRecord
from gpulse.cluster.notify.idle_hook import HookOutcome
from gpulse.cluster.notify.idle_policy import EndReason, IdlePolicy, Step, StepKind, Track
from gpulse.cluster.notify.outbox import MAX_BODY_CHARACTERS, MAX_TITLE_CHARACTERS, Message, PendingFinding
from gpulse.model.device import gpu_label
from gpulse.model.finding import SEVERITIES, Severity, format_places
from gpulse.model.formatting import duration, hours, local_text, local_time, time_zone
from gpulse.model.safe_text import natural_key, one_line, plain, printable

_MAX_DETAILED = 8
"""Groups of findings beyond this number get one line each."""
_MAX_LISTED = 40
"""Groups beyond this number are only counted."""
_MAX_NAMES = 5
_MAX_TITLE_PLACES = 3
_MAX_PLACES = 10
_MAX_WORDS_CHARACTERS = 300
_MAX_SENTENCE_CHARACTERS = 600
_MENTION = re.compile(r"@(?=(?:everyone|here|channel|all|room)\b)|<(?=[!@#])", re.IGNORECASE)

_Group = Sequence[PendingFinding]
"""Changes of the same kind with the same cause, on several GPUs and nodes."""
USER, OPERATORS = "user", "operators"
"""Readers of messages, as part of their keys."""
_MAX_NODES_NAMED = 8
_MAX_NAME_CHARACTERS = 80
_SEVERITIES: dict[StepKind, Severity] = {
    "warn": "low",
    "warn_again": "medium",
    "hook": "medium",
    "resolved": "info",
}
_OUTCOMES = {
    "ended": "The hook succeeded",
    "failed": "The hook failed",
    "timed_out": "The hook was killed",
    "not_started": "The hook could not be started",
    "refused": "The hook was not run",
    "stopped": "The hook was killed",
    "unknown": "The head stopped just before or while the hook ran, so it is unknown whether the hook ran; it is not run again",
}
_END_REASONS: dict[EndReason, str] = {
    "used": "the GPUs are in use again",
    "changed": "a process was started, or another GPU is now held",
    "released": "the GPUs were released",
}


def build_digest(entries: Sequence[PendingFinding], *, key: str, link: str | None, now: float) -> Message:
    """Return the message about changes of findings, worst first.

    Args:
        entries: The changes; at least one.
        key: The message's key.
        link: Address of the head's web page; None for messages without links.
        now: Epoch seconds.
    """
    new = _group([entry for entry in entries if entry.is_active and entry.began])
    known = _group([entry for entry in entries if entry.is_active and not entry.began])
    over = _group([entry for entry in entries if not entry.is_active])
    sections = [
        *_section("New", new, link, now),
        *_section("Still active", known, link, now),
        *_section("Resolved", over, link, now),
    ]
    body = "\n".join(sections).strip()
    footer = f"Times are in {time_zone(now)}. Sent by gpulse."
    if len(body) > MAX_BODY_CHARACTERS - len(footer) - 10:
        body = f"{body[: MAX_BODY_CHARACTERS - len(footer) - 10]}…"
    severities: list[Severity] = [group[0].record.severity for group in [*new, *known]]
    worst: Severity = max(severities, key=SEVERITIES.index, default="info")
    return Message(
        key,
        f"gpulse: {_title(new, known, over)}"[:MAX_TITLE_CHARACTERS],
        f"{body}\n\n{footer}",
        worst,
        is_resolved=not new and not known,
    )


def build_test_message(target: str, host: str, now: float) -> Message:
    """Return the message of `gpulse notify test`."""
    return Message(
        "test",
        f"gpulse: test message to {target}",
        f"This is a test message from gpulse on {safe_words(host)}, sent to the target {target} "
        f"at {local_time(now)} ({time_zone(now)}). It does not report a problem.",
    )


def safe_words(text: str, max_characters: int = _MAX_WORDS_CHARACTERS) -> str:
    """Return text from outside as one line that neither controls a terminal nor mentions everybody in a chat."""
    return _MENTION.sub(
        lambda match: "(at)" if match[0] == "@" else "(", plain(one_line(text, max_characters))
    )


def finding_link(link: str, records: Sequence[FindingRecord]) -> str:
    """Return the address of the page of a finding's GPU, of its node, or of the whole fleet."""
    nodes = {record.node for record in records}
    if len(nodes) > 1:
        return f"{link}/"
    node, labels = quote(records[0].node, safe=""), {record.label for record in records}
    if len(labels) == 1 and records[0].label is not None:
        return f"{link}/#/gpu/{node}/{quote(records[0].label, safe='')}"
    return f"{link}/#/node/{node}"


def _group(entries: Iterable[PendingFinding]) -> list[_Group]:
    """Group changes with the same cause and severity, worst first, and in natural order within a group."""
    groups: dict[tuple[str, str], list[PendingFinding]] = {}
    for entry in sorted(entries, key=_place_key):
        groups.setdefault((entry.record.group, entry.record.severity), []).append(entry)
    return sorted(groups.values(), key=lambda group: -SEVERITIES.index(group[0].record.severity))


def _place_key(entry: PendingFinding) -> tuple[object, object]:
    return natural_key(entry.record.node), natural_key(entry.record.label or "")


def _title(new: Sequence[_Group], known: Sequence[_Group], over: Sequence[_Group]) -> str:
    groups = [*new, *known, *over]
    if len(groups) == 1:
        record = groups[0][0].record
        state = record.severity if new else "still active" if known else "resolved"
        return f"{state}: {safe_words(record.title, 100)} on {_places(groups[0], _MAX_TITLE_PLACES)}"
    counted = [
        (sum(map(len, groups)), word)
        for groups, word in ((new, "new"), (known, "still active"), (over, "resolved"))
        if groups
    ]
    (first, word), *others = counted
    noun = "finding" if first == 1 else "findings"
    parts = [f"{first} new {noun}" if word == "new" else f"{first} {noun} {word}"]
    parts += [f"{count} {word}" for count, word in others]
    nodes = list(dict.fromkeys(entry.record.node for group in groups for entry in group))
    worst = f", worst: {new[0][0].record.severity}" if new else ""
    return f"{', '.join(parts)}{worst}, on {_list_names(nodes, _MAX_TITLE_PLACES, 'node')}"


def _section(heading: str, groups: Sequence[_Group], link: str | None, now: float) -> Iterator[str]:
    if not groups:
        return
    yield f"{heading}:"
    for number, group in enumerate(groups[:_MAX_LISTED]):
        if not group[0].is_active:
            yield from _resolved_lines(group, now)
        elif number < _MAX_DETAILED:
            yield from _details(group, link, now)
        else:
            yield f"- {_headline(group)}"
    if len(groups) > _MAX_LISTED:
        yield f"- and {len(groups) - _MAX_LISTED} more"
    if link is not None and len(groups) > _MAX_DETAILED:
        yield f"All findings: {link}/"
    yield ""


def _details(group: _Group, link: str | None, now: float) -> Iterator[str]:
    records = [entry.record for entry in group]
    first = records[0]
    yield f"- {_headline(group)}"
    if first.summary:
        example = f"For example, {_place(first)}: " if len(group) > 1 else ""
        yield f"  {example}{safe_words(first.summary, _MAX_SENTENCE_CHARACTERS)}"
    since = min(record.since for record in records)
    yield f"  Since: {local_time(since, now)} ({duration(now - since)})"
    returned = sum(entry.resolved > 0 for entry in group)
    if returned:
        yield f"  Resolved in the meantime, but has returned{f' on {returned} GPUs' if returned > 1 else ''}."
    users = dict.fromkeys(user for record in records for user in record.users)
    jobs = dict.fromkeys(job for record in records for job in record.jobs)
    if users:
        yield f"  Users: {_list_names(list(users), _MAX_NAMES)}"
    if jobs:
        yield f"  Jobs: {_list_names(list(jobs), _MAX_NAMES)}"
    for title, texts in (("Evidence", first.evidence), ("What to do", first.advice)):
        if len(texts) == 1:
            yield f"  {title}: {safe_words(texts[0], _MAX_SENTENCE_CHARACTERS)}"
        elif texts:
            yield f"  {title}:"
            yield from (f"    - {safe_words(text, _MAX_SENTENCE_CHARACTERS)}" for text in texts[:_MAX_NAMES])
    if link is not None:
        yield f"  {finding_link(link, records)}"


def _resolved_lines(group: _Group, now: float) -> Iterator[str]:
    since = min(entry.record.since for entry in group)
    until = max(entry.last for entry in group)
    times = max(entry.began for entry in group)
    again = f", occurred {times} times" if times > 1 else ""
    lasted = (
        f"Lasted {duration(until - since)}, from {local_time(since, now)} to {local_time(until, now)}{again}"
    )
    yield f"- {_places(group, _MAX_PLACES)}: {safe_words(group[0].record.title)}"
    yield f"  {lasted}"


def _headline(group: _Group) -> str:
    record = group[0].record
    return f"{record.severity.upper()} {_places(group, _MAX_PLACES)}: {safe_words(record.title)}"


def _place(record: FindingRecord) -> str:
    """Return where one finding is: `gpu17 GPU 3`, or the node alone."""
    return safe_words(format_places([{"node": record.node, "label": record.label}])[0])


def _places(group: _Group, max_count: int) -> str:
    """Return where a group is: `gpu17 GPUs 0-3, gpu18 GPU 1`."""
    places = format_places({"node": entry.record.node, "label": entry.record.label} for entry in group)
    return _list_names(places, max_count, "node")


def _list_names(names: Sequence[str], max_count: int, noun: str = "") -> str:
    """Return some names and the number of the others; the noun, in the singular, says what these are."""
    shown = ", ".join(safe_words(name, 100) for name in names[:max_count])
    more = len(names) - max_count
    others = f" {noun}{'' if more == 1 else 's'}" if noun else ""
    return f"{shown} and {more} more{others}" if more > 0 else shown


class StepText(NamedTuple):
    """What is said about a step, to operators and in the log."""

    title: str
    lines: tuple[str, ...]


def describe_policy(policy: IdlePolicy) -> str:
    """Return a policy in one line."""
    steps = [
        f"warn after {hours(policy.after_seconds)}",
        f"warn again {hours(policy.warn_again_seconds)} later",
    ]
    if policy.hook:
        steps.append(f"run {printable(policy.hook[0], 200)} {hours(policy.hook_after_seconds)} later")
    return f"{', '.join(steps)}{' (dry run: only operators are notified)' if policy.dry_run else ''}"


def message_key(step: StepKind | str, track: Track, reader: str) -> str:
    """Return the key of a message, the same one after a restart of the head."""
    return f"idle:{track.episode}:{step}:{reader}"


def build_user_message(step: Step, policy: IdlePolicy) -> Message:
    """Return the message to the user whose GPUs are unused."""
    track = step.track
    what, where = f"your job {_shown(track.holder.job)}" if track.holder.job else "you", describe_gpus(track)
    if step.kind == "resolved":
        title = f"No longer idle: {where}"
        lines = [f"The warning about {where}, held by {what}, no longer applies: {_end_reason(step)}."]
        return _message(step, track, title, lines, USER)
    began = _clock_text(track.since)
    holds, end = ("holds", "the job") if track.holder.job else ("hold", "your programs")
    lines = [
        f"{what[:1].upper()}{what[1:]} {holds} {where}.",
        f"No work has run on the GPUs for {hours(track.unused_seconds)} (since {began}).",
        "",
        f"If the GPUs are no longer needed, please end {end} so that others can use them.",
        "If you still need them, start using them, and this warning will be withdrawn.",
    ]
    if step.kind == "warn":
        title = f"Unused for {hours(track.unused_seconds)}: {where}"
        lines += ["", f"You will be warned again in {hours(policy.warn_again_seconds)} if they stay unused."]
    else:
        title = f"Second warning, unused for {hours(track.unused_seconds)}: {where}"
        if policy.hook:
            lines += [
                "",
                f"If they stay unused for another {hours(policy.hook_after_seconds)}, they may be freed",
                f"by ending {end}.",
            ]
    return _message(step, track, title, lines, USER)


def describe_step(step: Step, policy: IdlePolicy, address: str | None, command: tuple[str, ...]) -> StepText:
    """Return what operators read about a step.

    Args:
        step: The step.
        policy: The policy.
        address: Mail address or target of the user; None when it is unknown.
        command: The hook with its arguments, for the step that runs it.
    """
    track = step.track
    who, where = describe_holder(track), describe_gpus(track)
    idle = hours(track.unused_seconds)
    prefix = "Dry run: " if policy.dry_run else ""
    if step.kind == "resolved":
        title = f"{prefix}{who} no longer holds idle GPUs: {where}"
        return StepText(title, (f"No further action: {_end_reason(step)}.",))
    subject = f"{who[:1].upper()}{who[1:]}" if track.holder.job else who
    facts = f"{subject} holds {where}, unused for {idle} (since {_clock_text(track.since)})."
    if step.kind == "hook":
        would = "would have been run" if policy.dry_run else "is now being run"
        run = f"Command: {safe_words(shlex.join(command), 400)}"
        return StepText(f"{prefix}{'the' if prefix else 'The'} hook {would} for {who}, {where}", (facts, run))
    which = "warned" if step.kind == "warn" else "warned again"
    would = f"would have been {which}" if policy.dry_run else f"is now being {which}"
    notice = f"The user {would}, at {address}."
    if address is None:
        notice = "The user's address is unknown, so only operators are notified."
    title = f"{prefix}{who if prefix else subject} holds {where} unused for {idle}"
    return StepText(f"{title} (second warning)" if step.kind == "warn_again" else title, (facts, notice))


def build_operator_message(step: Step, text: StepText) -> Message:
    """Return the message to operators about a step."""
    return _message(step, step.track, text.title, list(text.lines), OPERATORS)


def describe_outcome(track: Track, outcome: HookOutcome) -> StepText:
    """Return what operators read about the end of a hook."""
    reason = f": {safe_words(outcome.reason, 200)}" if outcome.reason else ""
    lines = [f"{_OUTCOMES[outcome.state]}{reason}."]
    if outcome.output:
        lines += ["", "Output of the hook:", *map(safe_words, outcome.output.splitlines()[:20])]
    state = {"ended": "ended", "failed": "failed", "refused": "was not run"}.get(
        outcome.state, "was not completed"
    )
    if outcome.state == "unknown":
        state = "may have run"
    return StepText(f"The hook for {describe_holder(track)}, {describe_gpus(track)}, {state}", tuple(lines))


def build_outcome_message(track: Track, outcome: HookOutcome) -> Message:
    """Return the message to operators about the end of a hook."""
    text = describe_outcome(track, outcome)
    severity: Severity = "info" if outcome.state == "ended" else "high"
    return Message(
        message_key("outcome", track, OPERATORS),
        one_line(text.title, 200),
        "\n".join(text.lines),
        severity,
        waits_for_quiet_end=True,
    )


def describe_holder(track: Track) -> str:
    """Return who holds GPUs, in words: `job slurm:4711 of alice`, `bob`."""
    user = _shown(track.user) if track.user else "an unknown user"
    return f"job {_shown(track.holder.job)} of {user}" if track.holder.job else user


def describe_gpus(track: Track) -> str:
    """Return the GPUs in words: `GPUs 0-3 on node-1`."""
    named = [
        f"{gpu_label(label for label, _ in place.gpus)} on {_shown(place.node)}"
        for place in track.places[:_MAX_NODES_NAMED]
    ]
    more = len(track.places) - len(named)
    others = [f"GPUs on {more} more node{'' if more == 1 else 's'}"] if more else []
    return ", ".join([*named, *others])


def _end_reason(step: Step) -> str:
    return _END_REASONS[step.reason or "used"]


def _message(step: Step, track: Track, title: str, lines: list[str], reader: str) -> Message:
    return Message(
        message_key(step.kind, track, reader),
        one_line(title, 200),
        "\n".join(lines),
        _SEVERITIES[step.kind],
        step.kind == "resolved",
        waits_for_quiet_end=reader == OPERATORS,
    )


def _clock_text(when: float) -> str:
    return f"{local_text(when, '%Y-%m-%d %H:%M') or 'an unknown time'} {time_zone(when)}"


def _shown(name: str | None) -> str:
    return safe_words(name or "", _MAX_NAME_CHARACTERS)
