from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gpulse.cluster.head.commit import Committer, Trouble
from gpulse.errors import DiskError
from gpulse.store.entry import Entry


class Disk:
    """A journal whose disk can be full."""

    def __init__(self) -> None:
        self.full = False
        self.written: list[Entry] = []
        self.commits = 0

    def commit(self, entries: Sequence[Entry]) -> None:
        """Write, or fail."""
        self.commits += 1
        if self.full:
            raise DiskError("no space", hint="make some")
        self.written += entries

    def repair(self) -> list[Entry]:
        """Be as before, or fail again."""
        if self.full:
            raise DiskError("no space", hint="make some")
        return []


class Scene:
    """A committer and what it told."""

    def __init__(self) -> None:
        self.disk = Disk()
        self.done: list[Entry] = []
        self.trouble: list[Trouble] = []
        self.committer = Committer(
            self.disk, now=lambda: 100.0, done=self.done.extend, failed=self.trouble.append, seconds=3600.0
        )


def fact(name: str, number: int = 0) -> Entry:
    """Some fact."""
    return Entry.of_fact(name, number=number)


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
    scene.committer.add(fact("session"))

    await asyncio.wait_for(scene.committer.durable(), 5.0)

    assert len(scene.disk.written) == 1
    running.cancel()


async def test_a_full_disk_is_told_and_its_frames_are_forgotten() -> None:
    """What later frames rely on is kept for the time when there is room."""

    scene = Scene()
    scene.disk.full = True
    running = asyncio.create_task(scene.committer.run())
    for name in ("node", "event", "layout", "session"):
        scene.committer.add(fact(name))

    with pytest.raises(DiskError, match="no space"):
        await asyncio.wait_for(scene.committer.durable(), 5.0)

    assert [trouble.message for trouble in scene.trouble] == ["no space"]
    with pytest.raises(DiskError):
        await scene.committer.durable()
    scene.disk.full = False
    async with asyncio.timeout(10.0):
        while scene.committer.trouble is not None:  # noqa: ASYNC110  there is nothing to wait for but this
            await asyncio.sleep(0.05)
        await scene.committer.durable()
    assert [entry.fact["fact"] for entry in scene.disk.written if entry.fact] == ["node", "layout"]
    running.cancel()
