from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulse.terminal.table import (
    TableCell,
    TableColumn,
    display_width,
    make_painter,
    render_table,
    truncate,
    wrap,
    wrap_items,
)

PLAIN = make_painter(color=False)
COLUMNS = (
    TableColumn("GPU"),
    TableColumn("Name", right=False, drop=2, least=6),
    TableColumn("Util", drop=1),
    TableColumn("Who", right=False, drop=3),
)


def test_numbers_stand_right_and_words_left() -> None:
    """Columns line up under their titles, and lines have no blanks at their ends."""
    rows = [["0", "H200", "7%", "ada"], ["11", "L4", "100%", ""]]

    assert ["GPU  Name  Util  Who", "  0  H200    7%  ada", " 11  L4    100%"] == render_table(
        COLUMNS, rows, 80, PLAIN
    )


def test_a_column_says_less_before_any_is_cut() -> None:
    """Each cell says the most that fits."""
    rows: list[list[TableCell | str]] = [
        ["0", "H200", "7%", TableCell("ada:python3/17", "", ("ada/17", "ada"))],
        ["1", "H200", "7%", "bo/2"],
    ]

    assert "  0  H200    7%  ada/17" == render_table(COLUMNS, rows, 23, PLAIN)[1]


def test_a_long_column_is_cut_before_any_is_left_out() -> None:
    """A mark says that something is missing."""
    rows = [["0", "GeForce RTX 2080", "7%", "ada"]]

    assert "  0  GeForc~    7%  ada" == render_table(COLUMNS, rows, 23, PLAIN)[1]


def test_the_least_important_column_goes_first() -> None:
    """Columns go by their priority, those without one never."""
    rows = [["0", "H200", "7%", "ada"]]

    assert ["GPU  Name  Util", "GPU  Util", "GPU"] == [
        render_table(COLUMNS, rows, w, PLAIN)[0] for w in (19, 14, 8)
    ]


def test_a_column_about_which_nothing_is_known_is_left_out() -> None:
    """A card without GPM has no column of dashes."""
    columns = (TableColumn("GPU"), TableColumn("SM", optional=True))

    assert ["GPU", "  0"] == render_table(columns, [["0", "-"]], 80, PLAIN)


def test_what_may_not_go_is_cut_in_the_end() -> None:
    """Even the last columns keep to the terminal's width."""

    assert ["Mou~  Use~"] == render_table(
        (TableColumn("Mounted", right=False), TableColumn("Used x")), [], 10, PLAIN
    )


def test_colours_take_no_room() -> None:
    """Escape sequences do not disturb the alignment."""
    columns = (TableColumn("A"), TableColumn("B"))
    rows: list[list[TableCell | str]] = [[TableCell("1", "warn"), "2"]]

    assert "\x1b[31;1m1\x1b[0m  2" == render_table(columns, rows, 80, make_painter(color=True))[1]


def test_wide_characters_take_two_columns() -> None:
    """Text in Chinese or Japanese is measured as the terminal shows it."""

    assert ["日本~", 5] == [truncate("日本語です", 5), display_width("日本~")]


def test_prose_is_wrapped_with_an_indent() -> None:
    """Long messages stay readable in a narrow terminal."""

    assert ["[high] the GPU is", "  too hot"] == list(wrap("[high] the GPU is too hot", 18, "  "))


def test_words_that_belong_together_stay_whole() -> None:
    """A line is broken between readings, never inside one."""

    assert ["CPU 7%, load 1", "  RAM 3G"] == list(wrap_items(["CPU 7%", "load 1", "RAM 3G"], 16, ", ", "  "))


@given(
    st.lists(st.lists(st.text("ab日", max_size=30), min_size=4, max_size=4), max_size=4),
    st.integers(min_value=12, max_value=120),
)
def test_no_table_is_wider_than_the_terminal(rows: list[list[str]], width: int) -> None:
    """Whatever the cells hold, lines do not wrap."""

    assert all(display_width(line) <= width for line in render_table(COLUMNS, rows, width, PLAIN))
