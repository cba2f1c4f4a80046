from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.safe_text import csv_cell, one_line, printable, quoted, replace_surrogates


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("Überprüfung 日本", "Überprüfung 日本"),
        ("a?[31mb", "a\x1b[31mb"),
        ("two?lines", "two\nlines"),
        ("?evil", "\u202eevil"),
    ],
)
def test_what_cannot_be_seen_is_a_question_mark(expected: str, text: str) -> None:
    """No control character and no direction override of another machine reaches a terminal or a picture."""

    assert expected == printable(text)


@given(st.text(), st.integers(1, 40))
def test_printable_text_keeps_its_limit(text: str, most: int) -> None:
    """A long text is cut, one that fits keeps its length."""

    shown = printable(text, most)

    assert shown.isprintable()
    assert len(shown) == min(len(text), most)
    assert shown.endswith("…") or len(text) <= most


def test_the_mark_of_a_cut_can_be_ascii() -> None:
    """Tables of a terminal cut with a tilde."""

    assert "abc~" == printable("abcdef", 4, ellipsis="~")


def test_a_message_of_another_program_is_one_line() -> None:
    """Line breaks become spaces."""

    assert "no such host: ?" == one_line("no such\r\n  host:\t\x1b\n")


@pytest.mark.parametrize(
    ("expected", "value"),
    [
        ("'a\\x1bb'", "a\x1bb"),
        (f"'{'x' * 60}'…", "x" * 61),
        ("[1, 2]", [1, 2]),
        ("[0, 1, 2, 3, 4, 5, ...]", list(range(1000))),
    ],
)
def test_a_refused_value_is_quoted(expected: str, value: object) -> None:
    """Messages show the beginning of a value, as ASCII."""

    assert expected == quoted(value)


@pytest.mark.parametrize(
    ("expected", "text"),
    [("'=1+1", "=1+1"), ("'\uff1d1", "\uff1d1"), ("'-1", "-1"), ("a=1", "a=1"), ("^[[31m", "\x1b[31m")],
)
def test_a_cell_of_csv_is_not_a_formula(expected: str, text: str) -> None:
    """Names that other people chose stay text in a spreadsheet."""

    assert expected == csv_cell(text)


@given(st.text(st.characters(exclude_categories=[])))
def test_every_text_can_be_encoded(text: str) -> None:
    """Halves of surrogate pairs become question marks."""

    assert len(replace_surrogates(text)) == len(text)
    replace_surrogates(text).encode()
