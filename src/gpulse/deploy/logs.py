"""Logs of agents on nodes: the last lines, or all that come from now on."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpulse.deploy.nodes import NodeSpec
from gpulse.deploy.order import Outcome
from gpulse.deploy.script import letter, read_answer
from gpulse.deploy.ssh import NodeError, Ssh, converse
from gpulse.errors import GpulseError

_LONGEST_LINE = 1 << 16
_MOST_BYTES = 16 << 20
"""Of one node that is not followed for ever."""
_MOST_OURS = 1 << 20


class _Lines:
    """Cuts what comes into lines, and keeps ours apart from the log's."""

    def __init__(self, mark: str, told: Callable[[str], None], most: int | None) -> None:
        self._mark = mark.encode()
        self._told = told
        self._rest = b""
        self._is_log = False
        self._left = most
        self.ours = b""

    def add(self, piece: bytes) -> None:
        if self._left is not None:
            self._left -= len(piece)
            if self._left < 0:
                raise NodeError(
                    "more than 16 MiB came, and the rest was left there", hint="fewer lines: -n 50"
                )
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _LONGEST_LINE:
            self.flush()

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        if line.startswith(self._mark + b" "):
            if len(self.ours) < _MOST_OURS:
                self.ours += line + b"\n"
            self._is_log = self._is_log or line.startswith(self._mark + b" log ")
        elif self._is_log:
            self._told(line.decode("utf-8", "replace"))


async def show_log(
    ssh: Ssh,
    node: NodeSpec,
    told: Callable[[NodeSpec, str], None],
    *,
    lines: int,
    follow: bool,
    seconds: float,
    slug: str | None = None,
) -> Outcome:
    """Tell the lines of one node's log.

    Args:
        ssh: How it is reached.
        node: Which.
        told: Told each line.
        lines: How many of those that are there.
        follow: Go on with those that come, for ever.
        seconds: How long it may take otherwise.
        slug: Of the head whose agents are meant, None for all.
    """
    began = time.monotonic()
    order = letter("logs", {"lines": str(lines), "follow": "yes" if follow else None, "slug": slug})
    heard = _Lines(order.mark, lambda line: told(node, line), None if follow else _MOST_BYTES)
    error: GpulseError | None = None
    try:
        await converse(ssh, node, order, seconds=None if follow else seconds, heard=heard.add)
        heard.flush()
        answer = read_answer(heard.ours, order.mark)
        if (said := answer.first("error")) is not None:
            raise NodeError(said, hint=answer.first("hint"))
        if not answer.is_complete:
            raise NodeError("the connection broke off", hint="try again")
    except GpulseError as failed:
        error = failed
    return Outcome(
        node,
        round(time.monotonic() - began, 3),
        did=None if error else "shown",
        error=error.message if error else None,
        hint=error.hint if error else None,
    )
