"""The list of nodes that a head should hear of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.cli.expectation import NodeList
from gpulse.errors import GpulseError


def test_a_list_that_is_edited(tmp_path: Path) -> None:
    """What was added is expected from then on; a list that cannot be read changes nothing."""
    path = tmp_path / "node-list.txt"
    path.write_text("# the lab\ngpu01\nada@gpu02\n", encoding="utf-8")
    expected = NodeList(path)

    assert ("gpu01", "gpu02") == expected()
    path.write_text("gpu01\nada@gpu02\ngpu03.lab\n", encoding="utf-8")
    assert ("gpu01", "gpu02", "gpu03.lab") == expected()
    path.unlink()
    assert ("gpu01", "gpu02", "gpu03.lab") == expected()
    path.write_text("gpu04\n-oProxyCommand=x\ndoor:2222\n", encoding="utf-8")
    assert ("gpu04", "door:2222") == expected(), "what cannot be meant is left out"


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    """A head that is given none says so at once."""
    with pytest.raises(GpulseError):
        NodeList(tmp_path / "none.txt")


def test_names_that_no_machine_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are left out, and that is said."""
    path = tmp_path / "node-list.txt"
    path.write_text("alpha\nmy node\n; rm -rf ~\n", encoding="utf-8")

    assert ("alpha",) == NodeList(path)()
    assert 2 == sum("is left out" in message for message in caplog.messages)
