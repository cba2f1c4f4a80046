"""Format quantities and times for people to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

Unit = Literal[
    "share",
    "bytes",
    "bytes/second",
    "cpus",
    "number",
    "count",
    "seconds",
    "celsius",
    "watts",
    "hertz",
    "bits",
    "time",
]
"""Unit of a number in a table of quantities."""

UNKNOWN = "-"
"""Shown for an unknown value, never 0."""

_BINARY = ("B", "K", "M", "G", "T", "P")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def ratio(value: float | None) -> str:
    """Format `0.873` as `87%`."""
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def share(value: float | None) -> str:
    """Format `0.014` as `1.4%`: a ratio with a decimal when it is small."""
    if value is None:
        return UNKNOWN
    hundredths = value * 100
    if abs(hundredths) >= 9.95 or hundredths == 0:
        return f"{hundredths:.0f}%"
    return f"{_short(hundredths, 1)}%" if abs(hundredths) >= 0.05 else "<0.1%"


def percent(value: float | None) -> str:
    """Format `87.3` as `87%`, for quantities in percent (CPU use, where 100 is one CPU)."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def size(value: float | None) -> str:
    """Format bytes in binary units with three digits: `0B`, `612M`, `9.4G`, `141G`."""
    return UNKNOWN if value is None else _scaled(value, 1024, _BINARY)


def long_size(value: float | None) -> str:
    """Format bytes in explicit binary units, for sentences: `17.8 GiB`."""
    text = size(value)
    if value is None or text.endswith("B"):
        return text.replace("B", " B")
    return f"{text[:-1]} {text[-1]}iB"


def sizes(used: float | None, total: float | None) -> str:
    """Format used and total bytes in the unit of the total: `10.1/140G`."""
    if total is None and used is None:
        return UNKNOWN
    if total is None or used is None:
        return f"{size(used)}/{size(total)}"
    power = 0
    while total >= 10_000 * 1024**power and power < len(_BINARY) - 1:
        power += 1
    unit = 1024**power
    return f"{_three_digits(used / unit)}/{_three_digits(total / unit)}{_BINARY[power]}"


def rate(value: float | None) -> str:
    """Format bytes per second in decimal units: `0 B/s`, `34 MB/s`, `1.2 GB/s`."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, 1000, _DECIMAL)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return f"{number} {unit}B/s"


def bits(value: float | None) -> str:
    """Format a link speed in bits per second: `100 Gb/s`."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, 1000, _DECIMAL)
    return f"{text[:-1]} {text[-1]}b/s" if text[-1].isalpha() else f"{text} b/s"


def count(value: float | None) -> str:
    """Format a number in decimal units: `0`, `34`, `1.2k`."""
    return UNKNOWN if value is None else _scaled(value, 1000, _DECIMAL)


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with this many decimals."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def quantity(value: float | None) -> str:
    """Format an average count: `2`, `1.4`, `0.35`, `128`."""
    if value is None:
        return UNKNOWN
    return _short(value, 2 if abs(value) < 0.995 else 1 if abs(value) < 99.95 else 0)


def watts(value: float | None) -> str:
    """Format `258.8` as `259W`."""
    return UNKNOWN if value is None else f"{value:.0f}W"


def celsius(value: float | None) -> str:
    """Format `51` as `51C`."""
    return UNKNOWN if value is None else f"{value:.0f}C"


def megahertz(value: float | None) -> str:
    """Format hertz as `1905MHz`."""
    return UNKNOWN if value is None else f"{value / 1e6:.0f}MHz"


def milliseconds(value: float | None) -> str:
    """Format seconds as `0.42ms`, `17ms`, `75s`."""
    if value is None:
        return UNKNOWN
    if value >= 10:
        return f"{value:.0f}s"
    return f"{value * 1000:.2f}ms" if value < 0.01 else f"{value * 1000:.0f}ms"


def seconds(value: float | None) -> str:
    """Format seconds as `3.6 s`, `45 s`; from one minute like `duration`."""
    if value is None:
        return UNKNOWN
    if value >= 59.5:
        return duration(max(60.0, value))
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def short_duration(value: float | None) -> str:
    """Format seconds as `18 µs`, `4.2 ms`, `3.6 s`; from one minute like `duration`."""
    if value is None:
        return UNKNOWN
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs" if value >= 1e-6 or value == 0 else "<1 µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return seconds(value)


def hours(value: float) -> str:
    """Format a time summed over many GPUs: `3.2 h`, `12 min`, `8 s`."""
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.0f} min" if value >= 60 else f"{value:.0f} s"


def energy(joules: float | None) -> str:
    """Format joules in watt-hours: `0.35 Wh`, `120 Wh`, `9.31 kWh`."""
    if joules is None:
        return UNKNOWN
    watt_hours = joules / 3600
    if watt_hours >= 1000:
        return f"{watt_hours / 1000:.3g} kWh" if watt_hours < 1e6 else f"{watt_hours / 1000:,.0f} kWh"
    return f"{watt_hours:.0f} Wh" if watt_hours >= 10 else f"{watt_hours:.2g} Wh"


def duration(seconds: float | None) -> str:
    """Format seconds as `45s`, `12:03`, `2:13:05`, `3d04h`."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
    return f"{whole // 86400}d{whole // 3600 % 24:02}h"


def local_time(when: float, near: float | None = None) -> str:
    """Format epoch seconds as local time, without the date when `near` is on the same day."""
    day = local_text(when, "%Y-%m-%d")
    is_same_day = near is not None and day == local_text(near, "%Y-%m-%d")
    return UNKNOWN if day is None else clock_time(when) if is_same_day else f"{day} {clock_time(when)}"


def clock_time(when: float) -> str:
    """Format epoch seconds as local time of day: `14:03:10`."""
    return local_text(when, "%H:%M:%S") or UNKNOWN


def local_text(when: float, pattern: str) -> str | None:
    """Format epoch seconds as local time with a `strftime` pattern; None when out of range."""
    try:
        return time.strftime(pattern, time.localtime(when))
    except (OverflowError, ValueError, OSError):  # a damaged file can claim any time
        return None


def local_offset_seconds(when: float) -> int:
    """Return how many seconds local time is ahead of UTC; 0 when the time is out of range."""
    try:
        return time.localtime(when).tm_gmtoff
    except (OverflowError, ValueError, OSError):
        return 0


def time_zone(when: float) -> str:
    """Return the local time zone at a time: `UTC`, `UTC+01:00`."""
    minutes = local_offset_seconds(when) // 60
    sign = "-" if minutes < 0 else "+"
    return f"UTC{sign}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}" if minutes else "UTC"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value /= step
        power += 1
    return f"{_three_digits(value) if power else f'{value:.0f}'}{units[power]}"


def _short(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


_FORMATTERS: Mapping[Unit, Callable[[float], str]] = {
    "share": share,
    "bytes": long_size,
    "cpus": lambda value: number(value, 1),
    "bytes/second": rate,
    "number": quantity,
    "count": count,
    "seconds": seconds,
    "celsius": celsius,
    "watts": watts,
    "hertz": megahertz,
    "bits": lambda value: f"{int(value):#x}",
    "time": local_time,
}


def format_value(value: float, unit: Unit) -> str:
    """Format a number in its unit."""
    return _FORMATTERS[unit](value)
