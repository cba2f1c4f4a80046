from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from gpulse.cluster.head.group_commit import Committer
from gpulse.errors import DiskError
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.log.record_payloads import LogEntry


class Disk:
    """A journal whose disk can be full."""

    def __init__(self) -> None:
        self.full = False
        self.room_bytes = 1 << 30
        self.written: list[LogEntry] = []
        self.commits = 0
        self.probes: list[int] = []
        self.started = threading.Event()
        self.going_on = threading.Event()
        self.going_on.set()

    def commit(self, entries: Sequence[LogEntry]) -> None:
        """Write, or fail."""
        self.commits += 1
        self.started.set()
        self.going_on.wait(60.0)
        if self.full:
            raise DiskError("no space", hint="make some")
        self.written += entries

    def repair(self, probe_bytes: int) -> list[LogEntry]:
        """Be as before, or fail again."""
        self.probes.append(probe_bytes)
        if self.full:
            raise DiskError("no space", hint="make some")
        return []


class Scene:
    """A committer and what it told."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.done: list[LogEntry] = []
        self.trouble: list[BackendOutage] = []
        self.committer = Committer(
            self.disk, now=lambda: 100.0, done=self.done.extend, failed=self.trouble.append, seconds=3600.0
        )


def fact(name: str, number: int = 0) -> LogEntry:
    """Some fact."""
    return LogEntry.of_fact(name, number=number)


async def test_nothing_is_acknowledged_before_it_is_written() -> None:
    """Done is told after the commit, with everything in it, in order."""

    scene = Scene()
    entries = [fact("event", number) for number in range(3)]
    for entry in entries:
        scene.committer.add(entry)
    assert scene.done == []

    await scene.committer.commit()

    assert scene.done == scene.disk.written == entries
    assert scene.disk.commits == 1


async def test_whoever_needs_it_now_does_not_wait_for_the_next_commit() -> None:
    """A session is on disk when its start is answered."""

    scene = Scene()
    running = asyncio.create_task(scene.committer.run())

    await asyncio.wait_for(scene.committer.durable(fact("session")), 60.0)

    assert len(scene.disk.written) == 1
    running.cancel()


async def test_a_commit_that_takes_long_does_not_delay_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came meanwhile is due a second after the commit began, not after it ended."""

    scene, loop, passed = Scene(), asyncio.get_running_loop(), [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + passed[0])
    scene.disk.going_on.clear()
    running = asyncio.create_task(scene.committer.run())
    first = asyncio.create_task(scene.committer.durable(fact("first")))
    assert await asyncio.to_thread(scene.disk.started.wait, 60.0)
    scene.committer.add(fact("meanwhile"))
    passed[0] = 3600.0
    scene.disk.started.clear()
    scene.disk.going_on.set()
    await first

    assert await asyncio.to_thread(scene.disk.started.wait, 60.0)
    running.cancel()


async def test_what_was_refused_never_takes_effect() -> None:
    """A request that was answered with an error is not written later; what nobody waits for is."""

    scene = Scene()
    scene.disk.full = True
    running = asyncio.create_task(scene.committer.run())
    for name in ("node", "event", "layout"):
        scene.committer.add(fact(name))

    with pytest.raises(DiskError, match="no space"):
        await asyncio.wait_for(scene.committer.durable(fact("session")), 60.0)

    assert [trouble.message for trouble in scene.trouble] == ["no space"]
    with pytest.raises(DiskError):
        await scene.committer.durable(fact("session"))
    scene.disk.full = False
    async with asyncio.timeout(60.0):
        while scene.committer.trouble is not None:  # noqa: ASYNC110  there is nothing to wait for but this
            await asyncio.sleep(0.05)
        await scene.committer.durable()
    assert [entry.fact["fact"] for entry in scene.disk.written if entry.fact] == ["node", "event", "layout"]
    assert max(scene.disk.probes) > 0
    running.cancel()


async def test_what_comes_while_a_commit_fails_fails_with_it() -> None:
    """Nobody is told that something is on disk that was given up."""

    scene = Scene()
    scene.disk.full = True
    scene.disk.going_on.clear()
    scene.committer.add(fact("event"))
    committing = asyncio.create_task(scene.committer.commit())
    while not scene.disk.commits:  # noqa: ASYNC110  it is in a thread
        await asyncio.sleep(0.01)
    waiting = asyncio.create_task(scene.committer.durable(fact("session")))
    await asyncio.sleep(0)

    scene.disk.going_on.set()
    await committing

    with pytest.raises(DiskError):
        await waiting
    scene.disk.full = False
    await scene.committer._repair()
    await scene.committer.commit()
    assert [entry.fact["fact"] for entry in scene.disk.written if entry.fact] == ["event"]
