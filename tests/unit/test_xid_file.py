from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.cluster.agent.agent import MAX_XID_AGE_SECONDS, XidFile
from gpulse.model.xid import XidErrors

NOW = 1_767_225_600.0
ERRORS = [
    XidErrors("GPU-0", "0", 94, 2, NOW),
    XidErrors("GPU-0", "0", 13, 1, NOW + 60),
    XidErrors("GPU-1", "1", 79, 1, NOW + 60),
]


def test_the_next_agent_reads_what_was_written(tmp_path: Path) -> None:
    """The newest contents, without what was last seen more than a day ago."""

    file = XidFile(tmp_path / "xids.json", "boot")
    for file.xids in (ERRORS[:1], ERRORS):
        file.write()

    assert ERRORS == XidFile(tmp_path / "xids.json", "boot").read(NOW + 60)
    assert ERRORS[1:] == XidFile(tmp_path / "xids.json", "boot").read(NOW + MAX_XID_AGE_SECONDS + 1)
    assert ["xids.json"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(("written", "read"), [("before", "after"), ("", "")])
def test_errors_of_another_boot_are_not_read(tmp_path: Path, written: str, read: str) -> None:
    """Nor are they where the machine does not say which boot it is."""

    file = XidFile(tmp_path / "xids.json", written)
    file.xids = ERRORS
    file.write()

    assert [] == XidFile(tmp_path / "xids.json", read).read(NOW)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"boot": "b"}',
        '{"boot": "b", "xids": 5}',
        '{"boot": "b", "xids": [5]}',
        '{"boot": "b", "xids": [{"code": 79}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_makes_no_sense_has_no_errors(tmp_path: Path, text: str) -> None:
    """Whatever is in it, the agent starts."""

    (tmp_path / "xids.json").write_text(text)

    assert [] == XidFile(tmp_path / "xids.json", "b").read(NOW)


def test_a_disk_that_takes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent says so and goes on."""

    XidFile(tmp_path / "missing" / "xids.json", "b").write()

    assert "cannot write" in caplog.text
    assert [] == XidFile(tmp_path / "missing" / "xids.json", "b").read(NOW)
