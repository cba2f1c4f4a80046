from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.device import format_ranges
from gpulse.model.formatting import long_size, quantity
from gpulse.terminal import value_format as f


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ("-", None),
        ("0B", 0),
        ("1B", 1),
        ("999B", 999),
        ("1.0K", 1023),
        ("612M", 612 << 20),
        ("9.4G", 9.4 * 2**30),
    ],
)
def test_sizes_are_binary_and_short(expected: str, value: float | None) -> None:
    """Bytes take at most three digits and a letter."""

    assert expected == f.size(value)


@given(st.floats(0, 1e18))
def test_no_size_is_wider_than_five_columns(value: float) -> None:
    """A column of sizes has a width that people can rely on."""

    assert len(f.size(value)) <= 5


@pytest.mark.parametrize(
    ("expected", "used", "total"),
    [
        ("-", None, None),
        ("-/80.0G", None, 80 << 30),
        ("10.0/140G", 10 << 30, 140 << 30),
        ("0.5/1007G", 1 << 29, 1007 << 30),
        ("8.5/13.7T", 8.5 * 2**40, 13.7 * 2**40),
    ],
)
def test_used_of_total_shares_one_unit(expected: str, used: float | None, total: float | None) -> None:
    """Both are said in the unit of the total, and nothing is said twice when both are unknown."""

    assert expected == f.sizes(used, total)


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ("-", None),
        ("0%", 0),
        ("<0.1%", 0.0001),
        ("1.4%", 0.014),
        ("5%", 0.05),
        ("10%", 0.0996),
        ("97%", 0.974),
    ],
)
def test_shares_tell_tenths_when_they_are_small(expected: str, value: float | None) -> None:
    """A GPU that is used a little is not one that is not used."""

    assert expected == f.share(value)


@pytest.mark.parametrize(
    ("expected", "value"),
    [("-", None), ("0.0 s", 0), ("3.6 s", 3.63), ("45 s", 45.2), ("1:00", 59.7), ("4:25", 265.6)],
)
def test_short_times_have_tenths(expected: str, value: float | None) -> None:
    """A pause of 1.2 s is not one of 1 s."""

    assert expected == f.seconds(value)


@pytest.mark.parametrize(
    ("expected", "value"),
    [("-", None), ("0", 0), ("0", 0.003), ("0.03", 0.0316), ("2", 1.954), ("13.1", 13.09), ("256", 256)],
)
def test_quantities_are_as_short_as_they_can_be(expected: str, value: float | None) -> None:
    """How many workers, CPUs or waiting processes there were on average."""

    assert expected == quantity(value)


@pytest.mark.parametrize(
    ("expected", "value"), [("-", None), ("0 B", 0), ("612 MiB", 612 << 20), ("17.8 GiB", 17.8 * 2**30)]
)
def test_long_sizes_say_that_they_are_binary(expected: str, value: float | None) -> None:
    """Beside rates, which are decimal, it matters."""

    assert expected == long_size(value)


@pytest.mark.parametrize(
    ("expected", "seconds"),
    [(r"since \d\d:\d\d:50 \(3:05\)", 185), (r"since 11-1[34] \d\d:\d\d \(1d12h\)", 129600 + 30)],
)
def test_since_when_and_for_how_long(expected: str, seconds: float) -> None:
    """The time of day; of something older than a day the day."""
    now = 1_700_049_600.0 + 115

    assert re.fullmatch(expected, f.since(now - seconds, now)) is not None


@pytest.mark.parametrize(
    ("expected", "value"), [("-", None), ("0 B/s", 0), ("34.0 MB/s", 34e6), ("1.2 GB/s", 1.2e9)]
)
def test_rates_are_decimal(expected: str, value: float | None) -> None:
    """Bytes a second are counted as disks and links count them."""

    assert expected == f.rate(value)


@pytest.mark.parametrize(("expected", "value"), [("-", None), ("0 b/s", 0), ("100 Gb/s", 1e11)])
def test_link_speeds_are_bits(expected: str, value: float | None) -> None:
    """Links are named as their data sheets name them."""

    assert expected == f.bits(value)


@pytest.mark.parametrize(
    ("expected", "seconds"),
    [
        ("-", None),
        ("0s", -3),
        ("59s", 59.9),
        ("1:00", 60),
        ("2:13:05", 7985),
        ("3d04h", 3 * 86400 + 4 * 3600),
    ],
)
def test_durations(expected: str, seconds: float | None) -> None:
    """A duration has two or three parts; a clock that was set back makes none negative."""

    assert expected == f.duration(seconds)


@pytest.mark.parametrize(
    ("expected", "seconds"), [("-", None), ("0.42ms", 0.00042), ("17ms", 0.017), ("75s", 75.0)]
)
def test_waits(expected: str, seconds: float | None) -> None:
    """A wait is said in milliseconds until it is absurd."""

    assert expected == f.milliseconds(seconds)


@pytest.mark.parametrize(
    ("expected", "labels"),
    [
        ("", []),
        ("0", ["0"]),
        ("0,1", ["0", "1"]),
        ("0-3,7", ["0", "1", "2", "3", "7"]),
        ("0,0:1,1", ["0", "0:1", "1"]),
    ],
)
def test_neighbours_are_said_as_a_range(expected: str, labels: list[str]) -> None:
    """Many GPUs take little room."""

    assert expected == format_ranges(labels)


def test_a_command_is_told_from_others_by_what_follows_its_directory() -> None:
    """The directory of the program goes, its arguments stay."""

    assert "python3 /data/train.py -v" == f.shorten_command(
        ["/opt/conda/bin/python3", "/data/train.py", "-v"], "x"
    )


def test_a_hidden_command_line_is_named_by_its_program() -> None:
    """Another user's process may show its name alone."""

    assert "python3" == f.shorten_command([], "python3")


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("-", None),
        ("plain", "plain"),
        ("größe 日本", "größe 日本"),
        ("^[]0;owned^G", "\x1b]0;owned\x07"),
        ("^[[2J", "\x1b[2J"),
        ("a^Jb", "a\nb"),
        ("<202E>gpj", "\u202egpj"),
        ("<9B>31m", "\x9b31m"),
        ("?", "\udcff"),
        ("<2028>", "\u2028"),
        ("<7F>", "\x7f"),
        ("[red]x[/red]", "[red]x[/red]"),
    ],
)
def test_foreign_text_is_harmless(expected: str, text: str | None) -> None:
    """What could move the cursor or change the reading order is shown, not done."""

    assert expected == f.plain(text)


@given(st.text())
def test_no_text_reaches_the_terminal_raw(text: str) -> None:
    """Whatever somebody calls a process, the terminal gets printable characters only."""

    assert f.plain(text).replace("\u00a0", " ").isprintable() or not f.plain(text).isascii()
    assert not set(f.plain(text)) & {chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0x202E)}
