"""What a head has beyond its own disk, in words: the engine, and the directory that it shares with other heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpulse.terminal import format as f

Document = Mapping[str, Any]


def beyond_lines(status: Document) -> Iterator[tuple[str, str]]:
    """A line for each, with the style it is painted in; none where a head has nothing of the kind."""
    for name, worded in (("remote", _engine), ("remote_query", _query), ("shared", _shared)):
        part = status.get(name)
        if not part:
            continue
        told = worded(part)
        if told:
            yield ("" if part.get("state") == "ok" else "warn"), told


def _engine(remote: Document) -> str:
    place, state = f.plain(str(remote.get("url"))), remote.get("state")
    told = f"sends to {place}: {f.count(remote.get('samples_total'))} samples since it started"
    waiting = remote.get("waiting_seconds") or 0.0
    if state == "behind":
        told += f"; {f.duration(waiting)} behind"
    elif state != "ok":
        told = f"the engine at {place} {'refuses' if state == 'refused' else 'does not take samples'}{_why(remote)}"
        told += f"; {f.size(remote.get('waiting_bytes'))} wait for it"
    losses = [
        f"{f.count(remote[key])} {words}"
        for key, words in (("refused_total", "refused by it"), ("lost_total", "records given up"))
        if remote.get(key)
    ]
    return "; ".join([told, *losses])


def _query(query: Document) -> str:
    if query.get("state") == "ok":
        return ""
    return f"history beyond this disk cannot be read from {f.plain(str(query.get('url')))}{_why(query)}"


def _shared(shared: Document) -> str:
    place = f.plain(str(shared.get("directory")))
    if shared.get("state") != "ok":
        return f"shares nothing at the moment ({place}){_why(shared)}"
    others = shared.get("heads") or ()
    alive = sum(bool(other.get("alive")) for other in others)
    if not others:
        return f"shares in {place}: no other head yet"
    return f"shares in {place}: {len(others)} other head{'s' if len(others) > 1 else ''}, {alive} alive"


def _why(part: Document) -> str:
    error = f": {f.plain(str(part['error']))}" if part.get("error") else ""
    return error + (f"; try: {f.plain(str(part['hint']))}" if part.get("hint") else "")
