"""Frames that a recorder took, handed to an agent: the newest when it asks, with the jobs of Dask written into them."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpulse.errors import ClosedError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.model.process import ProcessReading
from gpulse.sources.family import Family
from gpulse.sources.procfs import Roots

_MOST_STINTS = 4096
_SILENCE_SECONDS = 5.0
"""A head that is there acknowledges frames every second or so."""


class _Offered(NamedTuple):
    frame: Frame
    jobs: Mapping[int, str]
    """As they were when it was offered."""


class Relay:
    """The source of an agent whose frames somebody else takes: each is given once, and only the newest."""

    def __init__(
        self,
        patience_seconds: float,
        roots: Roots = Roots(),  # noqa: B008  frozen
        *,
        given: Callable[[], None] = lambda: None,
    ) -> None:
        """Have nothing yet.

        Args:
            patience_seconds: For so long the next frame is waited for.
            roots: Where /proc is.
            given: Told of each frame that goes to the agent.
        """
        self._patience = patience_seconds
        self._given = given
        self._news = threading.Condition()
        self._newest: _Offered | None = None
        self._jobs: Mapping[int, str] = {}
        self._is_ending = False
        self._last: Frame | None = None
        self._silent_since: float | None = None
        self._labels = Labels(roots)

    def offer(self, frame: Frame) -> None:
        """Take a frame; one that nobody has asked for is forgotten."""
        with self._news:
            if not self._is_ending:
                self._newest = _Offered(frame, self._jobs)
                self._news.notify()

    def label(self, jobs: Mapping[int, str]) -> None:
        """Frames that are offered from now on have these jobs."""
        with self._news:
            self._jobs = dict(jobs)

    def end(self) -> None:
        """Nobody will offer anything more; whoever waits need not."""
        with self._news:
            self._is_ending = True
            self._news.notify()

    def sample(self, now: float) -> Frame:
        """The newest frame that was not given yet; an empty one when none comes.

        In the end the last one again: an agent tells with it that it stops.

        Raises:
            ClosedError: In the end there never was one.
        """
        frame = self._next(now)
        self._given()
        return frame

    def _next(self, now: float) -> Frame:
        with self._news:
            self._news.wait_for(lambda: self._newest is not None or self._is_ending, self._patience)
            offered, self._newest = self._newest, None
            is_ending = self._is_ending
        if offered is not None:
            self._silent_since = None
            self._last = self._labels.on(offered.frame, offered.jobs)
        elif not is_ending:
            return self._silence(now)
        if self._last is None:
            raise ClosedError("nothing was measured")
        return self._last

    def close(self) -> None:
        """Forget what there is."""
        self.end()
        with self._news:
            self._newest = None

    def _silence(self, now: float) -> Frame:
        since = self._silent_since = self._silent_since or now
        node = Node(platform.node()) if self._last is None else self._last.node
        detail = f"the Dask worker has measured nothing for {self._patience:g} s or longer"
        health = Health("sampler", "not_answering", detail, since, hint="is it busy, or stopped?")
        return Frame(now, time.monotonic(), node, health=(health,))


class Answers:
    """Whether a head answers to the frames that it is sent: every one of them asks for an answer."""

    def __init__(self, target: str) -> None:
        """Have sent nothing yet.

        Args:
            target: Where the head is.
        """
        self._target = target
        self._lock = threading.Lock()
        self._waiting_since: float | None = None

    def asked(self, now: float) -> None:
        """A frame goes there."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = now

    def answered(self) -> None:
        """The head has said something; also for when no answer is waited for any more."""
        with self._lock:
            self._waiting_since = None

    def trouble(self, now: float) -> str | None:
        """The same words for as long as nothing comes, None as long as that is not long."""
        with self._lock:
            since = self._waiting_since
        if since is None or now - since < _SILENCE_SECONDS:
            return None
        return f"the head at {self._target} has not answered for {_SILENCE_SECONDS:g} s or longer: frames wait here"


class Labels:
    """Writes into frames which job a process works for.

    To a head a process has one job for as long as it lives, and a worker outlives its jobs. So each stint of a process
    is told as a process of its own, which started when the job came to it.
    """

    def __init__(self, roots: Roots) -> None:
        self._family = Family(roots)
        self._stints: dict[tuple[int, float | None, str], float] = {}
        """When a job came to a process, by its pid and start."""

    def on(self, frame: Frame, jobs: Mapping[int, str]) -> Frame:
        """The frame with jobs, where processes have none of their own."""
        if not jobs or not frame.processes:
            return frame
        working: dict[int, str] = {}
        for pid, job in jobs.items():
            working.update(dict.fromkeys(self._family.descendants(frame.time, (pid,)), job))
        working.update(jobs)
        self._forget(frame)
        return frame._replace(
            processes=tuple(
                self._labelled(process, working.get(process.pid), frame.time) for process in frame.processes
            )
        )

    def _labelled(self, process: ProcessReading, job: str | None, now: float) -> ProcessReading:
        identity = process.identity
        if job is None or identity.owner.job is not None:
            return process
        began = self._stints.setdefault((identity.pid, identity.start_time, job), round(now, 2))
        owner = identity.owner._replace(job=job)
        return process._replace(identity=identity._replace(owner=owner, start_time=began))

    def _forget(self, frame: Frame) -> None:
        if len(self._stints) > _MOST_STINTS:
            alive = {(process.pid, process.identity.start_time) for process in frame.processes}
            self._stints = {key: began for key, began in self._stints.items() if key[:2] in alive}
