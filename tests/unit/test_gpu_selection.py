from __future__ import annotations

import click
import pytest

from gpulse.cli.gpu_selection import parse_gpus
from gpulse.errors import CollectionError, UsageError
from gpulse.model.device import Device
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.process import GpuProcess
from gpulse.model.source_health import Health
from tests.unit.frames import NOON, frame, gpu, process

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

    assert expected.split() == labels(parse_gpus(text)(MACHINE))


def test_without_a_choice_nothing_is_left_out() -> None:
    """The frame is passed on as it is."""

    assert MACHINE is parse_gpus(None)(MACHINE)


def test_only_the_processes_of_the_chosen_gpus_are_kept() -> None:
    """Other people's processes are not shown beside one's own GPU."""

    assert [12] == [item.pid for item in parse_gpus("2")(MACHINE).processes]


@pytest.mark.parametrize("text", ["", ",", "x", "1-", "3-1", "0-99999", "-1", "1:2:3", "GPU", "٣x"])
def test_what_names_no_gpu_is_a_usage_error(text: str) -> None:
    """Before anything is read."""
    with pytest.raises(click.UsageError, match="--gpus"):
        parse_gpus(text)


def test_a_gpu_that_is_not_here_is_named_with_those_that_are() -> None:
    """People see at once what they could have meant."""
    with pytest.raises(UsageError, match=r"no GPU 9; available: 0-3,3:0,3:1"):
        parse_gpus("0,9")(MACHINE)


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

    assert expected.split() == labels(parse_gpus("visible")(MACHINE))


def test_visible_is_everything_when_nothing_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset variable hides nothing."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert MACHINE is parse_gpus("visible")(MACHINE)


@pytest.mark.parametrize("variable", ["", "-1", "9", "NoDevFiles"])
def test_a_variable_that_hides_everything_is_said_to(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty table would look like a machine without GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with pytest.raises(CollectionError, match="hides every GPU"):
        parse_gpus("visible")(MACHINE)


def without(*gone: str) -> Frame:
    """The machine after these GPUs went away, those behind them moved up."""
    left = [item for item in MACHINE.gpus if item.device.label.partition(":")[0] not in gone]
    indices = {uuid: index for index, uuid in enumerate(dict.fromkeys(_board(item) for item in left))}
    return MACHINE._replace(
        gpus=tuple(item._replace(device=item.device._replace(index=indices[_board(item)])) for item in left)
    )


def _board(item: GpuReading) -> str:
    return item.device.parent_uuid or item.device.uuid


def test_the_choice_is_kept_when_another_gpu_goes_away() -> None:
    """The same GPU under another index, not another GPU under the same index."""
    choose = parse_gpus("2")
    choose(MACHINE)

    assert ["GPU-0002"] == [item.device.uuid for item in choose(without("0")).gpus]


def test_a_chosen_gpu_that_goes_away_is_no_error() -> None:
    """Nor is a driver that goes away altogether, and what comes back is shown again."""
    choose = parse_gpus("0,2")

    assert [["0", "2"], ["0"], [], ["0", "2"]] == [
        labels(choose(seen)) for seen in (MACHINE, without("2"), frame(), MACHINE)
    ]


def test_the_first_frame_with_gpus_decides() -> None:
    """A driver that starts late is waited for, and then a wrong choice is still an error."""
    choose = parse_gpus("9")

    assert () == choose(frame()).gpus
    with pytest.raises(UsageError, match="no GPU 9; available"):
        choose(MACHINE)


def test_visible_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a program that runs since then."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    choose = parse_gpus("visible")

    assert [["1"], []] == [labels(choose(seen)) for seen in (MACHINE, without("1"))]


def test_nothing_left_of_a_choice_is_said() -> None:
    """It must not look like a machine without GPUs."""
    choose = parse_gpus("1")
    choose(MACHINE)

    assert ["none of the selected GPUs is available any longer"] == [
        entry.detail for entry in choose(without("1")).health
    ]


def test_a_chosen_gpu_that_was_silent_at_first_is_kept_when_it_has_a_name() -> None:
    """Before that it is known by its index alone."""
    silent = gpu(1)._replace(device=Device(1, "unknown-1", "not answering"), values={})
    choose = parse_gpus("1")

    assert [["unknown-1"], ["GPU-0001"]] == [
        [item.device.uuid for item in choose(seen).gpus] for seen in (frame(gpu(0), silent), MACHINE)
    ]


def test_what_is_wrong_with_other_gpus_is_left_out() -> None:
    """By their label or by their UUID; what concerns the whole machine stays."""
    health = tuple(
        Health("nvml", "gpu_lost", "lost", NOON, subject) for subject in ("gpu 0", "gpu 1", "GPU-0002", None)
    )

    assert ["gpu 1", None] == [
        entry.subject for entry in parse_gpus("1")(MACHINE._replace(health=health)).health
    ]
