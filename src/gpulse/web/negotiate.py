"""What kind of answer a client prefers, from its Accept header."""

from __future__ import annotations


def prefers_html(accept: str | None) -> bool:
    """Whether HTML is wanted more than JSON. Who does not care gets JSON."""
    if not accept:
        return False
    ranges = [_range(part) for part in accept.split(",")]
    return _quality(ranges, "text", "html") > _quality(ranges, "application", "json")


def _range(part: str) -> tuple[str, float]:
    media, *parameters = (piece.strip().lower() for piece in part.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return media, 0.0
            return media, quality if 0 <= quality <= 1 else 0.0
    return media, 1.0


def _quality(ranges: list[tuple[str, float]], kind: str, subtype: str) -> float:
    """The most exact entry that covers a media type decides."""
    for wanted in (f"{kind}/{subtype}", f"{kind}/*", "*/*"):
        found = [quality for media, quality in ranges if media == wanted]
        if found:
            return max(found)
    return 0.0
