from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from textual.widgets import Button, Input

from gpulse.errors import GpulseError
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.sources.demo_machine import DemoMachine
from gpulse.sources.frame_source import EndOfRecordingError
from gpulse.sources.procfs import parse_pid_stat, parse_stat
from gpulse.terminal.top import TopApp, TopOptions
from gpulse.terminal.top.app import SignalError, signal_process
from gpulse.terminal.top.live_view import EndDialog, Page, Panel
from gpulse.terminal.top.styled_text import UNICODE

if TYPE_CHECKING:
    from textual.pilot import Pilot

SMALL = (80, 24)
_PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every view ends the thread it sampled on."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "gpulse-top"] == []


class Scripted:
    """A source that plays given frames, then repeats the last one, ends or fails."""

    def __init__(self, *frames: Frame, then: Exception | None = None) -> None:
        self.frames = list(frames)
        self.then = then
        self.sampled = 0
        self.closed = False

    def sample(self, now: float) -> Frame:
        """The next frame of the script."""
        del now
        self.sampled += 1
        if self.sampled > len(self.frames):
            if self.then is not None:
                raise self.then
            return self.frames[-1]._replace(time=1000.0 + self.sampled, monotonic=1000.0 + self.sampled)
        return self.frames[self.sampled - 1]

    def close(self) -> None:
        """Note it."""
        self.closed = True


def demo_frame(gpus: int = 8, seconds: float = 1.0) -> Frame:
    """One frame of the demo machine."""
    return DemoMachine(1000.0, gpus=gpus).sample(1000.0 + seconds)


def app_on(
    *frames: Frame,
    then: Exception | None = None,
    interval_seconds: float = 60.0,
    readonly: bool = False,
    killable: bool = True,
    findings: tuple[Finding, ...] = (),
) -> TopApp:
    """A view of given frames."""
    options = TopOptions(
        interval_seconds=interval_seconds,
        readonly=readonly,
        killable=killable,
        findings=lambda _: findings,
        glyphs=UNICODE,
    )
    return TopApp(Scripted(*frames, then=then), options)


async def until(pilot: Pilot[GpulseError], condition: Callable[[], bool]) -> None:
    """Let the application work until something is so."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await pilot.pause()


def seen(app: TopApp, part: str) -> str:
    """What a part of the screen says, dialogs aside."""
    return app.screen_stack[0].query_one(f"#{part}", Panel).text


def has_open(app: TopApp, kind: type[Page | EndDialog]) -> bool:
    """Whether a dialog of this kind is in front."""
    return isinstance(app.screen, kind)


async def started(pilot: Pilot[GpulseError], app: TopApp) -> None:
    """Wait for the first picture."""
    await until(pilot, lambda: "GPU" in seen(app, "gpus"))


def listed_pids(app: TopApp) -> list[int]:
    """The processes in the table."""
    lines = seen(app, "processes").splitlines()[1:]
    return [int(line.lstrip("▌ ").split()[0]) for line in lines if line.strip()]


def marked_pid(app: TopApp) -> int:
    """The process under the cursor."""
    (line,) = [line for line in seen(app, "processes").splitlines() if line.startswith("▌")]
    return int(line.lstrip("▌ ").split()[0])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own that can be ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def identity_of(
    pid: int, *, command: tuple[str, ...] = ("python3", "child.py"), later: float = 0.0
) -> ProcessIdentity:
    """Who a living process is, as a source would tell."""
    stat = parse_pid_stat(Path(f"/proc/{pid}/stat").read_bytes())
    boot = parse_stat(Path("/proc/stat").read_bytes()).boot_time
    assert stat is not None
    assert boot is not None
    began = boot + stat.start_ticks / os.sysconf("SC_CLK_TCK") + later
    return ProcessIdentity(
        pid=pid,
        parent_pid=os.getpid(),
        start_time=began,
        name="python3",
        command=command,
        owner=Owner(user="me"),
    )


def frame_with(identity: ProcessIdentity) -> Frame:
    """A frame with one process on one GPU."""
    gpu = GpuReading(
        Device(index=0, uuid="GPU-0", name="NVIDIA H200"),
        {"gpu_utilization_ratio": 0.5},
        (GpuProcess(identity.pid, "compute", 1 << 30),),
    )
    return Frame(
        time=time.time(),
        monotonic=1.0,
        node=Node("box"),
        gpus=(gpu,),
        processes=(ProcessReading(identity, "S", {}, on_gpu=True),),
    )


async def test_it_shows_eight_gpus_and_their_processes() -> None:
    """At 80 by 24 all eight GPUs and the processes on them are in view."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)

        assert [line.split()[0] for line in seen(app, "gpus").splitlines()[1:]] == list("01234567")
        assert listed_pids(app) == [61781, 2201, 51625, 41525, 12638, 32568, 21351]
        assert "CPU" in seen(app, "host")
        assert "q quit" in seen(app, "keys")


async def test_the_source_is_not_closed() -> None:
    """Whoever made the source closes it."""
    source = Scripted(demo_frame())
    app = TopApp(source, TopOptions(interval_seconds=60.0, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)

    assert not source.closed


async def test_frames_go_on() -> None:
    """Rates appear with the second frame: a trainer keeps one CPU busy."""
    frames = demo_frame(seconds=1.0), demo_frame(seconds=2.0)
    app = app_on(*frames, then=EndOfRecordingError("over"), interval_seconds=0.05)
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: "100%" in seen(app, "processes"))


async def test_keys_sort() -> None:
    """Keys sort by column, through the columns, and the other way round."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("P")
        assert "PID▲" in seen(app, "processes")
        assert listed_pids(app) == sorted(listed_pids(app))
        await pilot.press("r")
        assert "PID▼" in seen(app, "processes")
        assert listed_pids(app) == sorted(listed_pids(app), reverse=True)
        await pilot.press("M", "s")
        assert "SM▼" in seen(app, "processes")
        await pilot.press("S")
        assert "GMEM" in seen(app, "processes")


async def test_keys_filter_by_user_and_gpu() -> None:
    """The keys for users and GPUs go through them; Esc shows everything again."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("u")
        assert listed_pids(app) == [2201]
        assert "user:ada" in seen(app, "processes")
        await pilot.press("escape", "g", "g")
        assert listed_pids(app) == [12638]
        await pilot.press("escape")
        assert len(listed_pids(app)) == 7


async def test_a_filter_is_typed() -> None:
    """A filter works while it is typed, keys are text then, and Enter keeps it."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("slash", *"user:grace")
        assert listed_pids(app) == [12638, 32568]
        await pilot.press("space", *"laion", "enter")
        assert listed_pids(app) == [32568]
        assert not app.query_one(Input).display
        await pilot.press("slash", "escape")
        assert len(listed_pids(app)) == 7


async def test_a_filter_that_nothing_passes() -> None:
    """When nothing passes the table says so instead of being empty."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("slash", *"nonsense")
        assert "no processes match the filter" in seen(app, "processes")


async def test_the_tree_unfolds() -> None:
    """Workers are a count until their trainer is unfolded, and a line each afterwards."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        assert "+2 workers" in seen(app, "processes")
        await pilot.press("down", "down", "down", "down")
        assert marked_pid(app) == 12638
        await pilot.press("right")
        assert listed_pids(app)[4:7] == [12638, 12664, 12665]
        assert "├─ pt_data" in seen(app, "processes")
        await pilot.press("down", "left")
        assert marked_pid(app) == 12638
        assert "+2 workers" in seen(app, "processes")
        await pilot.press("e")
        assert "worker" not in seen(app, "processes").splitlines()[5]
        await pilot.press("t")
        assert "├─" not in seen(app, "processes")


async def test_the_cursor_stays_with_its_process() -> None:
    """Sorting moves the rows but not the choice."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("down")
        pid = marked_pid(app)
        await pilot.press("P", "r", "U")
        assert marked_pid(app) == pid


async def test_pause_freezes_the_picture() -> None:
    """While paused the picture stands still, sampling goes on, and afterwards the newest frame is shown."""
    source = Scripted(demo_frame())
    app = TopApp(source, TopOptions(interval_seconds=0.05, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("space")
        assert "PAUSED" in seen(app, "top")
        before, sampled = seen(app, "top"), source.sampled
        await until(pilot, lambda: source.sampled > sampled + 40)
        assert seen(app, "top") == before
        await pilot.press("p")
        assert "PAUSED" not in seen(app, "top")
        assert seen(app, "top") != before


async def test_help_lists_the_keys() -> None:
    """The question mark opens the help and Esc closes it; keys do nothing behind it."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("question_mark")
        assert has_open(app, Page)
        assert "sort&#160;by&#160;the&#160;next" in app.export_screenshot()
        await pilot.press("u", "down", "pagedown")
        await pilot.press("escape")
        assert not has_open(app, Page)
        assert len(listed_pids(app)) == 7


async def test_details_and_findings_open() -> None:
    """Enter shows a process in full and f everything that is wrong."""
    finding = Finding("x", "input", "high", 0.9, "the loader [b]is[/b] slow\x1b[2J", 1)
    app = app_on(demo_frame(), findings=(finding,))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        assert "HIGH     GPU 1  the loader [b]is[/b] slow^[[2J" in seen(app, "findings")
        await pilot.press("enter")
        assert "kernel-4f1c.json" in app.export_screenshot()
        await pilot.press("escape", "f")
        assert has_open(app, Page)
        assert "[b]is[/b]" in app.export_screenshot()


async def test_gpus_have_a_cursor() -> None:
    """Tab moves to the GPUs, where Enter shows the processes of one."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("tab", "down", "enter")
        assert seen(app, "gpus").splitlines()[2].startswith("▌1")
        assert listed_pids(app) == [12638]
        await pilot.press("enter")
        assert len(listed_pids(app)) == 7


async def test_the_mouse_moves_the_cursor() -> None:
    """A click puts the cursor on a row of either table, the wheel moves it."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.click("#processes", offset=(5, 3))
        assert marked_pid(app) == listed_pids(app)[2]
        await pilot.click("#gpus", offset=(5, 8))
        assert seen(app, "gpus").splitlines()[8].startswith("▌7")


async def test_sixty_four_gpus_scroll() -> None:
    """With more GPUs than lines the table scrolls with its cursor and the processes keep their place."""
    app = app_on(demo_frame(64))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        assert "/64" in seen(app, "gpus")
        await pilot.press("tab", "end")
        assert seen(app, "gpus").splitlines()[-1].startswith("▌63")
        await pilot.press("home", "pagedown")
        assert "▌" in seen(app, "gpus")
        assert len(listed_pids(app)) >= 5


@pytest.mark.parametrize("size", [(60, 20), (40, 12), (20, 6), (200, 50)])
async def test_any_size(size: tuple[int, int]) -> None:
    """Narrow, tiny and large terminals work, also when the size changes."""
    app = app_on(demo_frame())
    async with app.run_test(size=size) as pilot:
        await started(pilot, app)
        assert (
            max(len(line) for part in ("gpus", "processes") for line in seen(app, part).splitlines())
            <= size[0]
        )
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: len(seen(app, "gpus").splitlines()) == 9)


async def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the picture is the same, and the cursor is still to be seen."""
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        panel = app.query_one("#processes", Panel)
        styles = [segment.style for segment in panel.render_line(1) if segment.style is not None]
        assert app.no_color
        assert any(style.reverse for style in styles)


async def test_escape_sequences_in_a_command_are_harmless() -> None:
    """What a process calls itself is shown, not obeyed, in the table, the details and the question."""
    nasty = ("evil\x1b[2J\x1b]0;title\x07", "[bold red]x[/]")
    identity = ProcessIdentity(
        pid=4, start_time=1.0, name="evil", command=nasty, owner=Owner(user="m\x1b[31mx")
    )
    app = app_on(frame_with(identity))
    async with app.run_test(size=(120, 24)) as pilot:
        await started(pilot, app)
        assert "evil^[[2J^[]0;title^G [bold red]x[/]" in seen(app, "processes")
        for key in ("enter", "k"):
            await pilot.press(key)
            screenshot = app.export_screenshot()
            assert "\x1b" not in screenshot
            assert "evil^[[2J" in screenshot
            await pilot.press("escape")


async def test_the_end_of_a_recording() -> None:
    """When a recording ends the last frame stays and the first line says so."""
    app = app_on(demo_frame(), then=EndOfRecordingError("over"), interval_seconds=0.05)
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: "end of recording" in seen(app, "top"))
        assert len(listed_pids(app)) == 7
        await pilot.press("plus")


@pytest.mark.parametrize("error", [ValueError("broken pipe\x1b[2J"), GpulseError("broken pipe\x1b[2J")])
async def test_a_source_that_raises_is_a_notice(error: Exception) -> None:
    """An error of the source is shown, sampling is tried again, and the view lives on."""
    source = Scripted(demo_frame(), then=error)
    app = TopApp(source, TopOptions(interval_seconds=0.05, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: "broken pipe^[[2J" in seen(app, "keys"))
        assert "NOT SAMPLING" in seen(app, "top")
        source.then = None
        await until(pilot, lambda: "NOT SAMPLING" not in seen(app, "top"))
        assert len(listed_pids(app)) == 7


async def test_a_frame_that_comes_while_it_is_taken_down_is_nothing() -> None:
    """The last one may arrive after the panels are gone."""
    app = TopApp(Scripted(demo_frame()), TopOptions(interval_seconds=60.0, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await app.screen.remove_children()
        app.on_live_view_arrived()


async def test_a_slow_source_does_not_hold_up_the_keys() -> None:
    """Keys work while the source has not answered yet."""
    answer = threading.Event()

    class Slow(Scripted):
        def sample(self, now: float) -> Frame:
            answer.wait(_PATIENCE_SECONDS)
            return super().sample(now)

    app = TopApp(Slow(demo_frame()), TopOptions(interval_seconds=60.0, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("question_mark")
        assert has_open(app, Page)
        await pilot.press("escape", "k", "enter", "down", "right", "tab", "g", "u", "f")
        assert "waiting" in seen(app, "host")
        answer.set()
        await started(pilot, app)


async def test_the_interval_changes_at_once() -> None:
    """A shorter interval does not wait for the end of the longer one."""
    source = Scripted(demo_frame())
    app = TopApp(source, TopOptions(interval_seconds=60.0, glyphs=UNICODE))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("minus")
        assert "30 s" in seen(app, "top")
        await until(pilot, lambda: source.sampled >= 2)
        await pilot.press("plus")
        assert "60 s" in seen(app, "top")


async def test_gpus_are_left_out() -> None:
    """What the caller leaves out of the frames is not shown."""
    options = TopOptions(
        interval_seconds=60.0, gpus=lambda frame: frame._replace(gpus=frame.gpus[2:3]), glyphs=UNICODE
    )
    app = TopApp(Scripted(demo_frame()), options)
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        assert [line.split()[0] for line in seen(app, "gpus").splitlines()[1:]] == ["2"]


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_keys_quit(key: str) -> None:
    """Both keys end the view."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press(key)
        await until(pilot, lambda: not app.is_running)


async def test_ctrl_c_quits_out_of_a_dialog() -> None:
    """Ctrl-C is never swallowed."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("k", "ctrl+c")
        await until(pilot, lambda: not app.is_running)


async def test_a_signal_quits() -> None:
    """SIGTERM ends the view in order, so that the terminal is restored."""
    app = app_on(demo_frame())
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(pilot, lambda: not app.is_running)


async def test_ending_is_cancelled_by_default(child: subprocess.Popen[bytes]) -> None:
    """The question names the process; Enter alone ends nothing, nor does Esc."""
    app = app_on(frame_with(identity_of(child.pid)))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        for answer in ("enter", "escape", "q"):
            await pilot.press("k")
            assert has_open(app, EndDialog)
            screenshot = app.export_screenshot()
            for word in (str(child.pid), "me", "child.py", "Cancel", "TERM", "KILL"):
                assert word in screenshot
            await pilot.press(answer)
            assert not has_open(app, EndDialog)
        assert child.poll() is None


@pytest.mark.parametrize(
    ("keys", "expected"), [(["right"], signal.SIGTERM), (["tab", "right"], signal.SIGKILL)]
)
async def test_ending_a_process(
    child: subprocess.Popen[bytes], keys: list[str], expected: signal.Signals
) -> None:
    """Who chooses TERM or KILL and confirms ends the process."""
    app = app_on(frame_with(identity_of(child.pid)))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("k", *keys)
        assert isinstance(app.focused, Button)
        await pilot.press("enter")
        await until(pilot, lambda: f"sent {expected.name} to process {child.pid}" in seen(app, "keys"))
        assert child.wait(_PATIENCE_SECONDS) == -expected


async def test_a_reused_pid_is_never_hit(child: subprocess.Popen[bytes]) -> None:
    """When the number belongs to another process by now, that one is left alone and the view says so."""
    app = app_on(frame_with(identity_of(child.pid, later=-100.0)))
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("k", "right", "enter")
        assert "belongs to another process" in seen(app, "keys")
        assert child.poll() is None


@pytest.mark.parametrize(
    ("readonly", "killable", "words"),
    [(True, True, "read-only"), (False, False, "they are not running on this machine")],
)
async def test_ending_is_refused(
    child: subprocess.Popen[bytes], readonly: bool, killable: bool, words: str
) -> None:
    """A read-only view, a demo and a recording do not even ask."""
    app = app_on(frame_with(identity_of(child.pid)), readonly=readonly, killable=killable)
    async with app.run_test(size=SMALL) as pilot:
        await started(pilot, app)
        await pilot.press("k")
        assert not has_open(app, EndDialog)
        assert words in seen(app, "keys")


def test_ending_needs_a_start_time() -> None:
    """A process about which it is not known when it started is not sent anything."""
    with pytest.raises(SignalError, match="start time is unknown"):
        signal_process(ProcessIdentity(pid=os.getpid()), signal.SIGTERM)


def test_ending_what_has_ended(child: subprocess.Popen[bytes]) -> None:
    """A process that is gone is reported as gone."""
    identity = identity_of(child.pid)
    child.kill()
    child.communicate()

    with pytest.raises(SignalError, match="already ended"):
        signal_process(identity, signal.SIGTERM)


def test_ending_without_permission(monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]) -> None:
    """The kernel's refusal is told in words."""

    def refuse(descriptor: int, number: int) -> None:
        raise PermissionError(1, f"not {descriptor} {number}")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(SignalError, match="no permission"):
        signal_process(identity_of(child.pid), signal.SIGTERM)
