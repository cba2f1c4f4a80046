"""What the scheduler keeps of each worker, and which worker is which."""

from __future__ import annotations

import os
import tempfile
from itertools import accumulate
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.integrations.dask import worker_registry as module
from gpulse.integrations.dask.worker_registry import WorkerRecord, WorkerRegistry, unpack_block


def everything(record: WorkerRecord) -> bytes:
    """All lines, page by page."""
    lines, position = b"", 0
    while True:
        blocks, following = record.page(position)
        lines += b"".join(map(unpack_block, blocks))
        if following is None:
            return lines
        assert following > position
        position = following


def batch(number: int, size: int = 5) -> bytes:
    """Lines that tell where they belong."""
    return b"".join(b"1,1,%d.%d,%s\n" % (number, line, os.urandom(20).hex().encode()) for line in range(size))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 1500), max_size=12), st.sampled_from([None, 1, 7, 500, 10_000]))
def test_nothing_is_lost_wherever_it_is_kept(sizes: list[int], limit: int | None) -> None:
    """In memory, in the file, or in both."""
    with tempfile.TemporaryDirectory() as folder:
        _check_kept(Path(folder) / "worker-0.dump", sizes, limit)


def _check_kept(path: Path, sizes: list[int], limit: int | None) -> None:
    record = WorkerRecord(str(path), limit)
    batches = [batch(number, size) for number, size in enumerate(sizes)]
    for lines, size, last in zip(batches, sizes, accumulate(sizes), strict=True):
        record.add(lines, size, float(last))

    assert b"".join(batches) == everything(record)
    assert sum(sizes) == record.measurements
    if limit == 1 and sizes:
        assert path.stat().st_size
        assert not record._blocks
    record.close()
    assert not path.exists()


def test_pages_stay_in_order_while_it_grows(tmp_path: Path) -> None:
    """Also when what was in memory goes to the file between two of them."""
    record = WorkerRecord(str(tmp_path / "dump"), 3000)
    kept = [batch(number, 400) for number in range(40)]
    for lines in kept[:20]:
        record.add(lines, 400, 0.0)
    old = module._PAGE_BYTES
    module._PAGE_BYTES = 1
    try:
        blocks, position = record.page(0)
        for lines in kept[20:]:
            record.add(lines, 400, 0.0)
        while position is not None:
            more, position = record.page(position)
            blocks += more
    finally:
        module._PAGE_BYTES = old

    assert b"".join(kept) == b"".join(map(unpack_block, blocks))


def test_a_disk_that_takes_nothing_costs_memory_and_no_data(tmp_path: Path) -> None:
    """And is said; when it takes something again, that is over."""
    path = tmp_path / "away" / "dump"
    record = WorkerRecord(str(path), 5)
    record.add(batch(1), 5, 1.0)
    refused = record.trouble
    path.parent.mkdir()
    record.add(batch(2), 5, 2.0)

    assert "No such file" in (refused or "")
    assert record.trouble is None
    assert 10 == everything(record).count(b"\n")


def test_lines_are_kept_small() -> None:
    """A day of an idle worker is no burden for the scheduler."""
    record = WorkerRecord()
    for second in range(0, 86_400, 10):
        record.add(b"".join(b'0,0,%d.%d00,"[0, 0]"\n' % (second, n) for n in range(10)), 10, 0.0)

    assert sum(map(len, record._blocks)) < 700_000


def test_workers_are_numbered_as_they_first_join() -> None:
    """One that comes back is the one it was: by its address, or by a name that somebody gave it."""
    workers = WorkerRegistry(lambda _: WorkerRecord())
    first = [
        workers.arrived(address, name).index
        for address, name in [("tcp://a:1", "tcp://a:1"), ("tcp://b:1", "b")]
    ]
    workers.left("tcp://a:1")
    workers.left("tcp://b:1")
    same_address = workers.arrived("tcp://a:1", "tcp://a:1").index
    same_name = workers.arrived("tcp://b:2", "b").index
    another = workers.arrived("tcp://c:1", "tcp://c:1").index

    assert ([0, 1], 0, 1, 2) == (first, same_address, same_name, another)
    assert ["tcp://a:1", "tcp://b:2", "tcp://c:1"] == [entry.address for entry in workers.entries]


def test_two_workers_of_one_name_at_the_same_time_are_two() -> None:
    """Only one that is gone can have come back."""
    workers = WorkerRegistry(lambda _: WorkerRecord())

    assert [0, 1] == [workers.arrived(address, "b").index for address in ("tcp://b:1", "tcp://b:2")]


def test_a_batch_that_comes_again_counts_once() -> None:
    """One of another life of the worker does not pass for it."""
    entry = WorkerRegistry(lambda _: WorkerRecord()).arrived("tcp://a:1", "a")

    found = [
        entry.is_new(*told) for told in [("x", 1), ("x", 1), ("x", 2), ("x", 1), ("y", 1), ("y", 1), ("y", 2)]
    ]

    assert [True, False, True, False, True, False, True] == found


def test_names_that_were_given_count_more_than_addresses() -> None:
    """Workers that come back on each other's ports keep their records."""
    workers = WorkerRegistry(lambda _: WorkerRecord())
    for address, name in [("tcp://h:1", "a"), ("tcp://h:2", "b")]:
        workers.arrived(address, name)
    for address in ("tcp://h:1", "tcp://h:2"):
        workers.left(address)

    back = [
        workers.arrived(*worker).index
        for worker in [("tcp://h:2", "a"), ("tcp://h:1", "b"), ("tcp://h:3", "c")]
    ]

    assert [0, 1, 2] == back
    assert [0, 1] == [entry.index for address in ("tcp://h:2", "tcp://h:1") if (entry := workers.at(address))]


def test_the_first_worker_of_each_machine_speaks_for_it() -> None:
    """The next one does when it is gone."""
    workers = WorkerRegistry(lambda _: WorkerRecord())
    for address, host in [("tcp://a:1", "a"), ("tcp://a:2", "a"), ("tcp://b:1", "b")]:
        workers.joined(workers.arrived(address, address), host, 1, [])
    before = [entry.address for entry in workers.entries if workers.streams_to_head(entry)]
    workers.left("tcp://a:1")
    after = [entry.address for entry in workers.entries if workers.streams_to_head(entry)]

    assert ["tcp://a:1", "tcp://b:1"] == before
    assert ["tcp://a:2", "tcp://b:1"] == after


def test_a_dump_that_is_gone_costs_what_was_in_it(tmp_path: Path) -> None:
    """The rest can still be had, and it is said."""
    path = tmp_path / "dump"
    record = WorkerRecord(str(path), 5)
    record.add(batch(1), 5, 1.0)
    record.add(batch(2), 4, 2.0)
    path.unlink()

    assert 5 == everything(record).count(b"\n")
    assert "removed or truncated" in (record.trouble or "")
    record.add(batch(3), 5, 3.0)
    assert 10 == everything(record).count(b"\n")


def test_workers_that_dask_numbers_are_others_each_time() -> None:
    """It uses the numbers again; only the address tells that one has come back."""
    workers = WorkerRegistry(lambda _: WorkerRecord())
    workers.arrived("tcp://h:1", 0)
    workers.left("tcp://h:1")

    assert 1 == workers.arrived("tcp://h:2", 0).index
    assert 0 == workers.arrived("tcp://h:1", 3).index
