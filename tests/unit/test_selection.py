from __future__ import annotations

import click
import pytest

from gpulse.cli.selection import parse
from gpulse.errors import CollectionError
from gpulse.model.frame import Frame
from gpulse.model.process import GpuProcess
from tests.unit.frames import frame, gpu, process

MACHINE = frame(
    *(gpu(index, None, (GpuProcess(10 + index, "compute"),)) for index in range(4)),
    gpu(3, mig=0),
    gpu(3, mig=1),
    processes=tuple(process(10 + index) for index in range(4)),
)


def labels(kept: Frame) -> list[str]:
    """The GPUs that were kept."""
    return [item.device.label for item in kept.gpus]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("0", "0"),
        ("0 2", "2,0"),
        ("0 2", " 0 , 2 ,"),
        ("1 2", "1-2"),
        ("1", "GPU-0001"),
        ("1", "gpu-0001"),
        ("0 1 2 3", "GPU-"),
        ("3 3:0 3:1", "3"),
        ("3:1", "3:1"),
        ("3:0", "MIG-0003-0"),
    ],
)
def test_gpus_are_chosen_by_index_range_uuid_or_instance(expected: str, text: str) -> None:
    """They stay in the machine's order."""

    assert expected.split() == labels(parse(text)(MACHINE))


def test_without_a_choice_nothing_is_left_out() -> None:
    """The frame is passed on as it is."""

    assert MACHINE is parse(None)(MACHINE)


def test_only_the_processes_of_the_chosen_gpus_are_kept() -> None:
    """Other people's processes are not shown beside one's own GPU."""

    assert [12] == [item.pid for item in parse("2")(MACHINE).processes]


@pytest.mark.parametrize("text", ["", ",", "x", "1-", "3-1", "0-99999", "-1", "1:2:3", "GPU", "٣x"])
def test_what_names_no_gpu_is_a_usage_error(text: str) -> None:
    """Before anything is read."""
    with pytest.raises(click.UsageError, match="--gpus"):
        parse(text)


def test_a_gpu_that_is_not_here_is_named_with_those_that_are() -> None:
    """People see at once what they could have meant."""
    with pytest.raises(click.UsageError, match=r"no GPU 9 here; there are: 0-3,3:0,3:1"):
        parse("0,9")(MACHINE)


@pytest.mark.parametrize(
    ("expected", "variable"),
    [
        ("0 1", "1,0"),
        ("0", "0,-1,1"),
        ("0", "0,9,1"),
        ("1", "GPU-0001"),
        ("2", "2,,1"),
        ("3:1", "MIG-0003-1"),
    ],
)
def test_visible_is_what_cuda_would_see(
    expected: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA ignores everything from the first entry on that is no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)

    assert expected.split() == labels(parse("visible")(MACHINE))


def test_visible_is_everything_when_nothing_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset variable hides nothing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert MACHINE is parse("visible")(MACHINE)


@pytest.mark.parametrize("variable", ["", "-1", "9", "NoDevFiles"])
def test_a_variable_that_hides_everything_is_said_to(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty table would look like a machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(CollectionError, match="hides every GPU"):
        parse("visible")(MACHINE)
