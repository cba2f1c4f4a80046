"""The only humaniser of numbers: quantities and times as people read them."""

from __future__ import annotations

import time

UNKNOWN = "-"
"""How a reading that could not be had is shown. Never 0."""

_BINARY = ("B", "K", "M", "G", "T", "P")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def ratio(value: float | None) -> str:
    """`0.873` as `87%`."""
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def share(value: float | None) -> str:
    """`0.014` as `1.4%`: a ratio whose tenths matter when it is small."""
    if value is None:
        return UNKNOWN
    hundredths = value * 100
    if abs(hundredths) >= 9.95 or hundredths == 0:
        return f"{hundredths:.0f}%"
    return f"{_short(hundredths, 1)}%" if abs(hundredths) >= 0.05 else "<0.1%"


def percent(value: float | None) -> str:
    """`87.3` as `87%`, for quantities whose unit is percent (CPU use, where 100 is one CPU)."""
    return UNKNOWN if value is None else f"{value:.0f}%"


def size(value: float | None) -> str:
    """Bytes in binary units, three digits wide: `0B`, `612M`, `9.4G`, `141G`."""
    return UNKNOWN if value is None else _scaled(value, 1024, _BINARY)


def long_size(value: float | None) -> str:
    """Bytes in binary units as prose writes them, so that nobody takes them for decimal: `17.8 GiB`."""
    text = size(value)
    if value is None or text.endswith("B"):
        return text.replace("B", " B")
    return f"{text[:-1]} {text[-1]}iB"


def sizes(used: float | None, total: float | None) -> str:
    """`10.1/140G`: used of total in the unit of the total."""
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
    """Bytes a second in decimal units: `0 B/s`, `34 MB/s`, `1.2 GB/s`."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, 1000, _DECIMAL)
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return f"{number} {unit}B/s"


def bits(value: float | None) -> str:
    """Link speed in bits a second: `100 Gb/s`."""
    if value is None:
        return UNKNOWN
    text = _scaled(value, 1000, _DECIMAL)
    return f"{text[:-1]} {text[-1]}b/s" if text[-1].isalpha() else f"{text} b/s"


def count(value: float | None) -> str:
    """A number in decimal units: `0`, `34`, `1.2k`."""
    return UNKNOWN if value is None else _scaled(value, 1000, _DECIMAL)


def number(value: float | None, digits: int = 0) -> str:
    """A plain number with so many digits after the point."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def quantity(value: float | None) -> str:
    """How many of something, on average: `2`, `1.4`, `0.35`, `128`."""
    if value is None:
        return UNKNOWN
    return _short(value, 2 if abs(value) < 0.995 else 1 if abs(value) < 99.95 else 0)


def watts(value: float | None) -> str:
    """`258.8` as `259W`."""
    return UNKNOWN if value is None else f"{value:.0f}W"


def celsius(value: float | None) -> str:
    """`51` as `51C`."""
    return UNKNOWN if value is None else f"{value:.0f}C"


def megahertz(value: float | None) -> str:
    """Hertz as `1905MHz`."""
    return UNKNOWN if value is None else f"{value / 1e6:.0f}MHz"


def milliseconds(value: float | None) -> str:
    """Seconds as `0.42ms`, `17ms`, `75s`."""
    if value is None:
        return UNKNOWN
    if value >= 10:
        return f"{value:.0f}s"
    return f"{value * 1000:.2f}ms" if value < 0.01 else f"{value * 1000:.0f}ms"


def seconds(value: float | None) -> str:
    """`3.6 s`, `45 s`, and from a minute on as `duration`."""
    if value is None:
        return UNKNOWN
    if value >= 59.5:
        return duration(value)
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def hours(value: float) -> str:
    """A length of work added up over many GPUs: `3.2 h`, `12 min`, `8 s`."""
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.0f} min" if value >= 60 else f"{value:.0f} s"


def energy(joules: float | None) -> str:
    """Energy in watt-hours, as bills have it: `0.35 Wh`, `120 Wh`, `9.31 kWh`."""
    if joules is None:
        return UNKNOWN
    watt_hours = joules / 3600
    if watt_hours >= 1000:
        return f"{watt_hours / 1000:.3g} kWh" if watt_hours < 1e6 else f"{watt_hours / 1000:,.0f} kWh"
    return f"{watt_hours:.0f} Wh" if watt_hours >= 10 else f"{watt_hours:.2g} Wh"


def duration(seconds: float | None) -> str:
    """`45s`, `12:03`, `2:13:05`, `3d04h`."""
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


def local_time(when: float) -> str:
    """A moment in local time, with its day; unknown when no calendar has it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


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
