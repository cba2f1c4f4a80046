"""What goes from a head's disk early because a time-series database has it, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpulse.store.seal_client import SealClient
from gpulse.store.seal_process import handle_request, open_writer
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.send_supervisor import TsdbForwarder
from tests.queries import query
from tests.unit.report_lab import BEGIN, Held, Lab

END = 6 * 3600
KEPT: dict[str, Any] = {"keep_seconds": 3600.0, "limit_bytes": None, "metadata_seconds": 1e9}


class Waiting(TsdbForwarder):
    """What waits for a time-series database that has got everything between two positions."""

    def __init__(self, data_dir: str) -> None:
        super().__init__(data_dir, TsdbConfig("http://127.0.0.1:1"), limit_bytes=1 << 30)
        self.got = (0, 0)

    @property
    def begun(self) -> int:
        """As it was when the database was new."""
        return self.got[0]

    @property
    def confirmed(self) -> int:
        """As the database says."""
        return self.got[1]


class SameProcess(SealClient):
    """One that needs no process."""

    def __init__(self, data_dir: str) -> None:
        super().__init__(data_dir)
        self._writer = open_writer(data_dir)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return handle_request(self._writer, request)

    def _end(self) -> None:
        self._writer.close()


def _oldest(lab: Lab) -> float:
    """The first sample of a GPU that is on disk, in seconds after the beginning."""
    (found,) = lab.archive.series(query("gpu", "power_watts", start=BEGIN, end=BEGIN + 1e6))
    return float(found.times[0]) - BEGIN


def test_samples_that_the_database_did_not_get_stay(tmp_path: Path) -> None:
    """However old they are; what it has got goes, and what processes did stays in both cases."""
    with Lab(tmp_path, ("0",)) as lab:
        lab.archive._sealer = SameProcess(lab.archive.directory)
        forwarder = Waiting(lab.archive.directory)
        lab.archive.forward_to(forwarder)
        ends = []
        for begin in range(0, END, 3600):
            seconds = range(begin, begin + 3600, 300)
            values: Any = {"0": {"power_watts": 300.0}}
            lab.add([lab.frame(second, Held(100, sm=0.5), values=values) for second in seconds])
            ends.append(lab.archive.accepted)
            lab.archive.seal()
        late = END + BEGIN + 1e6

        assert [] == lab.archive.tidy(late, **KEPT)
        assert 0.0 == _oldest(lab)
        assert [ends[1], ends[3], ends[5]] == [segment.last for segment in lab.archive.segments]
        before = lab.archive.gpu_time(query(start=BEGIN, end=BEGIN + END))

        for got in ((0, ends[1] - 1), (1, ends[1]), (ends[3], ends[5])):
            forwarder.got = got
            lab.archive.tidy(late, **KEPT)
            assert 0.0 == _oldest(lab)

        forwarder.got = 0, ends[1]
        lab.archive.tidy(late, **KEPT)
        assert 7200.0 == _oldest(lab)
        assert before == lab.archive.gpu_time(query(start=BEGIN, end=BEGIN + END))
