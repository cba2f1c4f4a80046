"""How the databases of a head are, in words."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.cluster.protocol.answers import BackendStatus, RemoteQuery, RemoteWrite, SharedDatabaseStatus
from gpulse.terminal import format as f


def beyond_lines(status: BackendStatus) -> Iterator[tuple[str, str]]:
    """Yield a line for each database that a head uses, with the style it is painted in."""
    if status.remote:
        yield _style(status.remote), _write(status.remote)
    if status.remote_query and status.remote_query.state != "ok":
        query = status.remote_query
        told = f"history beyond this disk cannot be read from {f.plain(query.url)}{_why(query)}"
        yield _style(query), told
    if status.database:
        yield _style(status.database), _database(status.database)


def _style(part: RemoteWrite | RemoteQuery | SharedDatabaseStatus) -> str:
    return "" if part.state == "ok" else "warn"


def _write(remote: RemoteWrite) -> str:
    place, state = f.plain(remote.url), remote.state
    told = f"sends to {place}: {f.count(remote.samples_total)} samples since it started"
    if state == "behind":
        told += f"; {f.duration(remote.waiting_seconds)} behind"
    elif state != "ok":
        what = "refuses samples" if state == "refused" else "is not accepting samples"
        told = f"the remote-write endpoint {place} {what}{_why(remote)}"
        told += f"; {f.size(remote.waiting_bytes)} wait for it"
    losses = [
        f"{f.count(count)} {words}"
        for count, words in ((remote.refused_total, "refused by it"), (remote.lost_total, "records given up"))
        if count
    ]
    return "; ".join([told, *losses])


def _database(shared: SharedDatabaseStatus) -> str:
    if shared.state != "ok":
        waiting = f"; {f.count(shared.waiting_records)} records wait for it"
        return f"other heads' data are missing{_why(shared)}{waiting}"
    alive = sum(head.alive for head in shared.heads)
    others = "no other head" if not alive else "1 other head" if alive == 1 else f"{alive} other heads"
    return f"shares sessions and reports in PostgreSQL at {f.plain(shared.database)} with {others}"


def _why(part: RemoteWrite | RemoteQuery | SharedDatabaseStatus) -> str:
    error = f": {f.plain(part.error)}" if part.error else ""
    return error + (f"; try: {f.plain(part.hint)}" if part.hint else "")
