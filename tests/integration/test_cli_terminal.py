"""What a terminal gets: colours, widths, and a screen that is left as it was found."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.integration.cluster import Process, until
from tests.integration.commands import run, terminal

IGNORING = ("env", "--ignore-signal=INT")
SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(
    ("colours", "env", "flags"),
    [
        (True, {}, ()),
        (False, {"NO_COLOR": "1"}, ()),
        (False, {"TERM": "dumb"}, ()),
        (False, {}, ("--no-color",)),
        (False, {"NO_COLOR": "1", "FORCE_COLOR": "1"}, ()),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, ()),
    ],
)
def test_colours_on_a_terminal(colours: bool, env: dict[str, str], flags: tuple[str, ...]) -> None:
    """A person gets colours unless they said no or the terminal cannot show them."""
    with terminal("--demo", *flags, env=env) as shown:
        assert colours == (b"\x1b[" in shown.to_the_end())


@pytest.mark.parametrize(("colours", "env"), [(False, {}), (True, {"FORCE_COLOR": "1"})])
def test_colours_in_a_pipe(colours: bool, env: dict[str, str]) -> None:
    """A program gets none unless it asks."""

    assert colours == ("\x1b[" in run("--demo", env=env).out)


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_look_fits_the_terminal(columns: int) -> None:
    """Without COLUMNS the terminal itself is asked."""
    with terminal("--demo", "-a", "-v", columns=columns) as shown:
        lines = SEQUENCE.sub(b"", shown.to_the_end()).decode().splitlines()

    assert [] == [line for line in lines if len(line) > columns]


def test_watching_redraws_in_place_and_ends_on_ctrl_c() -> None:
    """The screen is drawn over without scrolling, the history is kept, and the code is 130."""
    with terminal("--demo", "-a", "-w", "0.1", rows=12) as shown:
        shown.until(b"\x1b[J\r\n\x1b[H")
        shown.press_ctrl_c()
        seen = shown.to_the_end()

    assert 130 == shown.child.returncode
    assert b"\x1b[3J" not in seen
    assert b"enlarge the window" in seen
    assert 12 >= max(frame.count(b"\r\n") for frame in seen.split(b"\x1b[H"))
    assert seen.endswith(b"\r\n")
    assert b"Traceback" not in seen


def test_watching_on_a_dumb_terminal_prints_one_look_after_the_other() -> None:
    """Nothing that it would show as garbage."""
    with terminal("--demo", "-w", "0.1", env={"TERM": "dumb"}) as shown:
        shown.until(b"demo  ")
        shown.until(b"\r\n\r\ndemo  ")
        shown.press_ctrl_c()

        assert b"\x1b" not in shown.to_the_end()


def test_ctrl_c_works_on_a_terminal_though_the_parent_ignores_it() -> None:
    """As everything does that a background job of a script has started."""
    with terminal("--demo", "-w", "0.1", env={"TERM": "dumb"}, prefix=IGNORING) as shown:
        shown.until(b"demo  ")
        shown.press_ctrl_c()
        shown.to_the_end()

    assert 130 == shown.child.returncode


def test_ctrl_c_that_a_script_ignores_is_ignored_away_from_a_terminal(tmp_path: Path) -> None:
    """It is meant for the script's other commands; a polite kill ends this one."""
    watching = Process("--demo", "-w", "0.1", "--csv", cwd=tmp_path, prefix=IGNORING)
    try:
        watching.said("demo")
        watching.popen.send_signal(signal.SIGINT)
        seen = len(watching.lines)
        until(lambda: len(watching.lines) > seen + 30, "more looks")
    finally:
        code = watching.end(signal.SIGTERM)

    assert -signal.SIGTERM == code


def test_csv_on_a_terminal_is_harmless() -> None:
    """Lines stay lines."""
    with terminal("--demo", "--csv") as shown:
        assert 9 == shown.to_the_end().count(b"\r\n")


def test_top_refuses_a_gpu_that_is_not_here() -> None:
    """It ends and says which there are, instead of an empty screen."""
    with terminal("top", "--demo", "--gpus", "99") as shown:
        seen = shown.to_the_end()

    assert 2 == shown.child.returncode
    assert b"gpulse: there is no GPU 99; available: 0-7" in seen
