"""Make untrusted text safe to print, store and quote, and sort names in natural order."""

from __future__ import annotations

import re
import reprlib
import unicodedata

from gpulse.model.formatting import UNKNOWN

_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters, including full-width forms, that start a formula in a spreadsheet."""
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def plain(text: str | None) -> str:
    """Make untrusted text safe for a terminal: no control characters, escape sequences or direction overrides.

    Process names and command lines are chosen by other people. Printed unchanged, they could move the cursor, change
    the window title or imitate another line.
    """
    if text is None:
        return UNKNOWN
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_harmless(character) else _shown(character) for character in text)


def printable(text: object, max_characters: int | None = None, *, ellipsis: str = "…") -> str:
    """Return untrusted text with a question mark for each unprintable character.

    Args:
        text: The text, or a value to show as text.
        max_characters: Maximum length; None for no limit.
        ellipsis: Character that marks a cut.
    """
    shown = str(text)
    if max_characters is not None and len(shown) > max_characters:
        shown = f"{shown[: max_characters - 1]}{ellipsis}"
    if shown.isprintable():
        return shown
    return "".join(character if character.isprintable() else "?" for character in shown)


def one_line(text: str, max_characters: int | None = None) -> str:
    """Return an untrusted message as one printable line."""
    return printable(" ".join(text.split()), max_characters)


def quoted(value: object, max_characters: int = 60) -> str:
    """Return the beginning of an untrusted value in quotes, as ASCII, for a message."""
    if not isinstance(value, str):
        text = _SHORT.repr(value)
        return text if len(text) <= max_characters else f"{text[:max_characters]}…"
    return ascii(value) if len(value) <= max_characters else f"{value[:max_characters]!a}…"


def csv_cell(text: str) -> str:
    """Return untrusted text as a CSV cell that is safe in spreadsheets and terminals.

    Control characters, escape sequences and direction overrides are shown as on the terminal (`^[`, `<202E>`), and
    text that a spreadsheet would treat as a formula is prefixed with an apostrophe.
    """
    shown = plain(text)
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


def replace_surrogates(text: str) -> str:
    """Return the text with a question mark for each lone surrogate, which no encoding can store."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _is_harmless(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] != "C" and category not in ("Zl", "Zp")


def _shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return f"^{chr(code + 0x40)}"
    return "?" if code in range(0xD800, 0xE000) else f"<{code:02X}>"


_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_MAX_DIGITS = 4000
"""Python does not parse longer numbers; no machine name contains them."""

NaturalKey = tuple[tuple[tuple[str, int], ...], str]


def natural_key(name: str) -> NaturalKey:
    """Return the key for natural sorting: numbers by value, letters regardless of case."""
    parts = _NUMBERS.split(name.casefold())
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=True)
    return tuple((text, int(number[:_MAX_DIGITS]) if number else -1) for text, number in pairs), name
