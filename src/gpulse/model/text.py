"""Text from outside made safe to print: names and commands that other people choose."""

from __future__ import annotations

import unicodedata

from gpulse.model.units import UNKNOWN


def plain(text: str | None) -> str:
    """Make foreign text harmless: no control characters, no escape sequences, no direction overrides.

    Process names and command lines are chosen by other people; printed as they are they could move the
    cursor, retitle the window or pretend to be another line.
    """
    if text is None:
        return UNKNOWN
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _shown(character) for character in text)


def encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which no encoding can store."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _is_harmless(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp")


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return f"^{chr(code + 0x40)}"
    return "?" if code in range(0xD800, 0xE000) else f"<{code:02X}>"
