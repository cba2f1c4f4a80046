"""Our TOML: every key means what its name says, and what cannot be meant is refused with its line."""

from __future__ import annotations

import signal
import tomllib
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulse.harvest.config.toml import KeyLines
from gpulse.harvest.config.validation import hours
from gpulse.harvest.settings import DayWindow, HarvestSettings, OpenHours, PeopleSettings, Program
from tests.unit.harvest_config_lab import TOML, Lab

EVERY_DAY = frozenset(range(7))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A directory to load configurations in."""
    return Lab(tmp_path)


def test_a_program_alone_gets_every_default(lab: Lab) -> None:
    """All GPUs are watched, and it runs beside the configuration."""
    settings = lab.toml(TOML)

    program = Program("fold", ("worker",), (0, 1), whole=True, directory=str(lab.directory))
    path = str(lab.directory / "harvest.toml")
    lookers = frozenset({"gpulse", "nvidia-smi"})
    assert HarvestSettings(path, {0: lookers, 1: lookers}, (program,)) == settings


def test_every_key_has_its_meaning(lab: Lab) -> None:
    """Nothing that can be written is lost on the way."""
    (lab.directory / "jobs").mkdir()
    settings = lab.toml(
        """
        [harvest]
        interval_seconds = 2.5
        max_gpus = 1
        hours = "22:00-07:00"
        [idle]
        idle_seconds = 1
        cooldown_seconds = 2
        quiet_holder_seconds = 3
        max_utilization_percent = 5
        max_memory = "1.5GiB"
        ignore_programs = ["nvidia-smi"]
        ignore_users = ["root", "12345"]
        always_users = "root"
        [people]
        whitelist = ["root"]
        idle_seconds = 4
        [[gpu]]
        gpus = [1, "GPU-aaaa"]
        ignore_programs = "nvtop, gpustat"
        [[program]]
        name = "fold it"
        command = ["worker", "a b", "{gpu}"]
        gpus = 1
        dir = "jobs"
        log = "fold.log"
        env = { A = "x", THREADS = 4 }
        user = "root"
        nice = -5
        ionice = "best-effort:7"
        cpus = "0-2,5"
        grace_seconds = 0.5
        stop_signal = "usr1"
        restart = "on-failure"
        backoff_seconds = 6
        max_backoff_seconds = 7
        hours = ["sat,sun", "mon-fri 20:00-24:00"]
        """,
        root=True,
        count=4,
    )

    program = Program(
        "fold it",
        ("worker", "a b", "{gpu}"),
        (1,),
        directory=str(lab.directory / "jobs"),
        log=str(lab.directory / "fold.log"),
        environment=(
            ("A", "x"),
            ("THREADS", "4"),
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
            ("CUDA_VISIBLE_DEVICES", "1"),
        ),
        user="root",
        nice=-5,
        ionice="best-effort:7",
        cpus=(0, 1, 2, 5),
        grace_seconds=0.5,
        stop_signal=signal.SIGUSR1,
        hours=OpenHours((DayWindow(frozenset({5, 6}), 0, 1440), DayWindow(frozenset(range(5)), 1200, 1440))),
        restart="on-failure",
        backoff_seconds=6,
        max_backoff_seconds=7,
    )
    ignored = frozenset({"nvidia-smi", "nvtop", "gpustat"})
    expected = HarvestSettings(
        str(lab.directory / "harvest.toml"),
        {1: ignored, 2: ignored},
        (program,),
        interval_seconds=2.5,
        idle_seconds=1,
        cooldown_seconds=2,
        quiet_seconds=3,
        utilization_ratio=0.05,
        memory_bytes=3 << 29,
        max_gpus=1,
        hours=OpenHours((DayWindow(EVERY_DAY, 1320, 420),)),
        people=PeopleSettings(enabled=True, whitelist=frozenset({"root"}), idle_seconds=4),
        ignore_users=frozenset({"root", "12345"}),
        always_users=frozenset({"root"}),
    )
    assert expected == settings


def test_each_makes_a_program_for_every_watched_gpu(lab: Lab) -> None:
    """With its index in the command, the log and the environment, and CPUs of its own."""
    settings = lab.toml(
        """
        gpu = [{gpus = [0, 2]}]
        [[program]]
        name = "w"
        command = "worker --port 80{gpu}0 {gpu}"
        gpus = "each"
        log = "w-{gpu}.log"
        env.NAME = "w{gpu}"
        cpus = 3
        """,
        count=4,
    )

    first, second = settings.programs
    assert ("w-0", "w-2") == (first.name, second.name)
    assert ("worker", "--port", "8020", "2") == second.command
    assert ((2,), False) == (second.gpus, second.whole)
    assert str(lab.directory / "w-2.log") == second.log
    assert {"NAME": "w2", "CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} == dict(
        second.environment
    )
    assert ((5, 6, 7), (2, 3, 4)) == (first.cpus, second.cpus)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"all"', (0, 1, 2, 3)),
        ('"ALL"', (0, 1, 2, 3)),
        ("3", (3,)),
        ('"2"', (2,)),
        ("[2, 0]", (2, 0)),
        ('"0-2"', (0, 1, 2)),
        ('["0-1", "gpu-BBBB"]', (0, 1, 3)),
    ],
)
def test_gpus_can_be_written_in_many_ways(lab: Lab, written: str, expected: tuple[int, ...]) -> None:
    """Indices, ranges, beginnings of UUIDs, and words for all."""
    settings = lab.toml(TOML.replace('"all"', written), count=4)

    assert expected == settings.programs[0].gpus


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ('"7 B"', 7),
        ('"1kB"', 1000),
        ('"1KiB"', 1024),
        ('"2 GB"', 2 * 10**9),
        ('"0.5mib"', 1 << 19),
    ],
)
def test_sizes(lab: Lab, written: str, expected: int) -> None:
    """As bytes, in powers of 1000 and of 1024."""

    assert expected == lab.toml(f"[idle]\nmax_memory = {written}\n{TOML}").memory_bytes


def test_programs_are_looked_for_in_their_own_path(lab: Lab) -> None:
    """The one of its environment wins, seen from its directory."""
    (lab.directory / "jobs" / "mine").mkdir(parents=True)
    lab.program(lab.directory / "jobs" / "mine" / "own")
    text = TOML.replace('"worker"', '"own"') + 'dir = "jobs"\n'

    assert lab.toml(text + 'env = {PATH = "mine"}\n').programs
    assert "3: command: there is no program 'own'" in lab.refused("harvest.toml", text)


def program(line: str) -> str:
    """A program with one more key, on line 5."""
    return f"{TOML}{line}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[harvest\n" + TOML, "1: invalid TOML: "),
        ('[harvest]\na = "\n' + TOML, "2: invalid TOML: "),
        ("x = [", "1: invalid TOML: "),
        (f"x = {'[' * 9999}", " invalid TOML: nested too deeply"),
        (f"[harvest]\ninterval_seconds = {'9' * 5000}\n{TOML}", " invalid TOML: "),
        ("[harvest]\nhours = 'sat'\nhours = 'sun'\n", "3: invalid TOML: "),
        ("[idle]\n[people]\n[idle]\n", "3: invalid TOML: "),
        (TOML + "[harvst]\n", "5: unknown table or key 'harvst'"),
        ("interval_seconds = 1\n" + TOML, "1: unknown table or key 'interval_seconds'"),
        ("harvest = 1\n" + TOML, "1: harvest is not a table"),
        ('[program]\nname = "x"\n', "1: [program] must be [[program]]"),
        ("gpu = [1]\n" + TOML, "1: [gpu] must be [[gpu]]"),
        ("[idle]\n\nidle_second = 1\n" + TOML, "3: unknown key 'idle_second' in [idle]"),
        (program('cmd = "x"'), "5: unknown key 'cmd' in [[program]]"),
        ("[harvest]\ninterval_seconds = 0\n" + TOML, "2: interval_seconds: must be a number from 0.1"),
        ("[harvest]\ninterval_seconds = nan\n" + TOML, "2: interval_seconds: must be a number from 0.1"),
        ("[harvest]\ninterval_seconds = true\n" + TOML, "2: interval_seconds: true is not a number"),
        ('[harvest]\ninterval_seconds = "5"\n' + TOML, "2: interval_seconds: '5' is not a number"),
        (
            f"[harvest]\ninterval_seconds = 0x{'f' * 9999}\n{TOML}",
            "2: interval_seconds: must be a number from",
        ),
        ("[harvest]\nmax_gpus = 0\n" + TOML, "2: max_gpus: must be a whole number from 1 to 1024, not 0"),
        (
            "[harvest]\nmax_gpus = 1\n" + TOML,
            "6: 'fold' needs 2 GPUs, but max_gpus is 1, so it could never start",
        ),
        ("[idle]\ncooldown_seconds = -1\n" + TOML, "2: cooldown_seconds: must be a number from 0"),
        (
            "[idle]\nmax_utilization_percent = 101\n" + TOML,
            "2: max_utilization_percent: must be a number from 0 to 100, not 101",
        ),
        ('[idle]\nmax_memory = "1G"\n' + TOML, "2: max_memory: '1G' is not a size"),
        ("[idle]\nmax_memory = -1\n" + TOML, "2: max_memory: -1 is out of range for a memory size"),
        ('[idle]\nmax_memory = "9999999PiB"\n' + TOML, "2: max_memory: '9999999PiB' is out of range"),
        ('[idle]\nignore_users = ["nobody-has-it"]\n' + TOML, "2: ignore_users: there is no user"),
        ('[idle]\nalways_users = ["nobody-has-it"]\n' + TOML, "2: always_users: there is no user"),
        ('[people]\nwhitelist = ["nobody-has-it"]\n' + TOML, "2: whitelist: there is no user"),
        ('[people]\nenabled = "yes"\n' + TOML, "2: enabled: 'yes' is neither true nor false"),
        ("[people]\nidle_seconds = 22:00:00\n" + TOML, "2: idle_seconds: a date or time is not a number"),
        ("[idle]\nignore_programs = [1]\n" + TOML, "2: ignore_programs: 1 is not a string"),
        ("[idle]\nignore_programs = 1\n" + TOML, "2: ignore_programs: 1 is not a list"),
        ("[[gpu]]\ngpus = 5\n" + TOML, "2: gpus: there is no GPU 5"),
        ("[[gpu]]\ngpus = true\n" + TOML, "2: gpus: true is not a GPU"),
        ("[[gpu]]\ngpus = []\n" + TOML, "2: gpus: the list of GPUs is empty"),
        ("[[gpu]]\ngpus = [[0]]\n" + TOML, "2: gpus: a list is not a GPU"),
        ('[[gpu]]\ngpus = "each"\n' + TOML, "2: gpus: 'each' is not a GPU"),
        ('[[gpu]]\ngpus = "3-1"\n' + TOML, "2: gpus: there is no GPU 3"),
        ("[[gpu]]\ngpus = 0\n" + TOML.replace('"all"', "1"), "6: gpus: GPU 1 is not watched"),
        ('[[program]]\ncommand = "worker"\ngpus = 0\n', "1: [[program]] has no name"),
        ('[[program]]\nname = "x"\ngpus = 0\n', "1: [[program]] has no command"),
        ('[[program]]\nname = "x"\ncommand = "worker"\n', "1: [[program]] has no gpus"),
        (TOML.replace("fold", "a\\nb"), "2: name: 'a\\nb' contains a line break"),
        (TOML.replace("fold", "a" * 65), "2: name: '"),
        (TOML.replace("fold", ""), "2: name: the value is empty"),
        (TOML + TOML, "6: duplicate program 'fold', first defined on line 1"),
        (
            TOML.replace('"all"', '"each"') + TOML.replace("fold", "fold-1"),
            "6: duplicate program 'fold-1', first defined on line",
        ),
        (TOML.replace('"worker"', '""'), "3: command: the command is empty"),
        (TOML.replace('"worker"', "[]"), "3: command: the command is empty"),
        (TOML.replace('"worker"', "['worker', 1]"), "3: command: 1 is not a string"),
        (TOML.replace('"worker"', "1"), "3: command: 1 is not a command"),
        (TOML.replace('"worker"', "'''\n\nworker \"'''"), "3: command: unbalanced quotes in '"),
        (
            TOML.replace('"worker"', "'worker\\u0000'").replace("'", '"'),
            "3: command: 'worker\\x00' contains a NUL",
        ),
        (TOML.replace('"worker"', '"./worker"'), "3: command: there is no program './worker' in '"),
        (program('dir = "none"'), "5: dir: there is no directory '"),
        (program('dir = ""'), "5: dir: the value is empty"),
        (program('dir = "~nobody-has-it/x"'), "5: dir: '~nobody-has-it': unknown home directory"),
        (program('dir = "a\\u0000b"'), "5: dir: 'a\\x00b' contains a line break or a NUL character"),
        (program('log = "none/log"'), "5: log: there is no directory '"),
        (program('env = "A=1"'), "5: env: 'A=1' is not a table"),
        (program("env = {A = true}"), "5: env: 'A' is true, not a string"),
        (program('env = {"A=B" = "1"}'), "5: env: 'A=B' is not a valid variable name"),
        (program("env = {CUDA_VISIBLE_DEVICES = 1}"), "5: env: harvest sets CUDA_VISIBLE_DEVICES itself"),
        (program('user = "root"'), "5: user: only root can run programs as another user"),
        (program("nice = 20"), "5: nice: must be a whole number from -20 to 19, not 20"),
        (program("nice = -1"), "5: nice: -1 requires root"),
        (program('ionice = "realtime"'), "5: ionice: 'realtime' is not a valid I/O priority"),
        (program('ionice = "best-effort:8"'), "5: ionice: 'best-effort:8' is not a valid I/O priority"),
        (program("cpus = 9"), "5: cpus: the number of CPUs must be between 1 and 8, not 9"),
        (program("cpus = 0"), "5: cpus: the number of CPUs must be between 1 and 8, not 0"),
        (program('cpus = "4-8"'), "5: cpus: CPU 8 is not available"),
        (program('cpus = "3-1"'), "5: cpus: '3-1' is not a valid CPU selection"),
        (program("cpus = []"), "5: cpus: a list is not a valid CPU selection"),
        (program('cpus = ""'), "5: cpus: '' is not a valid CPU selection"),
        (program("grace_seconds = 3601"), "5: grace_seconds: must be a number from 0 to 3600, not 3601"),
        (program('stop_signal = "NONE"'), "5: stop_signal: 'NONE' is not a signal"),
        (program("stop_signal = 0"), "5: stop_signal: 0 is not a signal"),
        (program('stop_signal = "SIGSTOP"'), "5: stop_signal: 'SIGSTOP' does not make a program exit"),
        (program("restart = true"), "5: restart: true is not a valid restart policy"),
        (program("backoff_seconds = 0"), "5: backoff_seconds: must be a number from 0.1"),
        (
            program("backoff_seconds = 5\nmax_backoff_seconds = 4"),
            "6: max_backoff_seconds: must be a number from 5",
        ),
        (program('hours = "later"'), "5: hours: 'later' is not a weekday"),
        (program("hours = []"), "5: hours: the list is empty"),
        ("", " no program is configured"),
        ("[[program]]\n", "1: [[program]] has no name"),
    ],
)
def test_what_is_refused(lab: Lab, text: str, expected: str) -> None:
    """The line, and the reason in words."""

    assert lab.refused("harvest.toml", text).startswith(expected)


def test_a_user_who_does_not_exist(lab: Lab) -> None:
    """Root is told."""
    text = program('user = "nobody-has-it"')

    assert "5: user: there is no user 'nobody-has-it'" == lab.refused("harvest.toml", text, root=True)


def test_gpu_mons_form_under_the_name_of_ours(lab: Lab) -> None:
    """The hint says how it must be called."""

    assert "does not end in .toml" in lab.hint("harvest.toml", "[process-x]\ncmd=worker\ngpus=ALL\n")


def test_a_long_backoff_needs_no_longer_limit(lab: Lab) -> None:
    """The longest wait is never shorter than the first."""
    made = lab.toml(program("backoff_seconds = 900")).programs[0]

    assert (900, 900) == (made.backoff_seconds, made.max_backoff_seconds)


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        ("22:00-07:00", ["mon 22:00", "tue 06:59"], ["mon 07:00", "mon 21:59"]),
        ("Fri-Mon 20-7", ["fri 20:00", "tue 06:00"], ["fri 06:00", "tue 20:00", "wed 01:00"]),
        ("sat,sun", ["sat 00:00", "sun 23:59"], ["fri 23:59", "mon 00:00"]),
        ("Monday , wed-thu 9:30-24:00", ["mon 09:30", "thu 23:59"], ["tue 12:00", "fri 00:00"]),
        ("22:00-00:00", ["mon 23:59"], ["tue 00:00", "mon 21:59"]),
    ],
)
def test_hours_of_the_day(written: str, inside: list[str], outside: list[str]) -> None:
    """Days and times as people write them; a night belongs to the day it begins on."""
    open_hours = hours(written)

    assert all(open_hours.open_at(moment(text)) for text in inside)
    assert not any(open_hours.open_at(moment(text)) for text in outside)


def moment(text: str) -> datetime:
    """`mon 22:00` of some week."""
    day, time = text.split()
    number = ("mon", "tue", "wed", "thu", "fri", "sat", "sun").index(day)
    return datetime.fromisoformat(f"2024-01-0{number + 1}T{time}:00")


@pytest.mark.parametrize(
    "written",
    ["25:00-26:00", "08:00-08:00", "24:00-07:00", "08:60-09:00", "8:0-9:0", "mo", "", "mon-", "1-2-3", " "],
)
def test_hours_that_are_none(lab: Lab, written: str) -> None:
    """They are refused."""

    assert lab.refused("harvest.toml", program(f'hours = "{written}"')).startswith("5: hours: ")


NAMES = st.sampled_from(["a", "b-c", "1", '"x y"', "'q.r'", '"\\u00e9"', '"#["'])
DOTTED = st.lists(NAMES, min_size=1, max_size=2).map(" . ".join)
VALUES = st.sampled_from(
    [
        "1",
        '"# [x] = 1"',
        "'a\"'",
        '"\\"\\\\"',
        '"""\n[a]\nb = 1\n"""',
        '"""x""""',
        "'''\n\"[[z]]\n'''''",
        "[1, # ]\n  [2,\n 3]\n]",
        '{ k = "}", l = [ 1 ] }',
        "1979-05-27T07:32:00Z",
    ]
)
STATEMENTS = st.one_of(
    st.tuples(st.just("key"), DOTTED, VALUES),
    st.tuples(st.sampled_from(["[{}]", "[[{}]]", " [ {} ] # [x]"]), DOTTED, st.just("")),
    st.tuples(st.sampled_from(["", "# a = 1"]), st.just(""), st.just("")),
)


@example([("key", "a", '"""x"""""'), ("key", "b", "'''x''''"), ("[{}]", "c", "")], "\n")
@given(st.lists(STATEMENTS, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_lines_of_toml(statements: list[tuple[str, str, str]], end: str) -> None:
    """Every key and table of any document is found on the line where it stands."""
    kept: list[str] = []
    for kind, name, value in statements:
        made = f"{name} = {value}" if kind == "key" else kind.format(name)
        if _is_toml("\n".join([*kept, made])):
            before = _paths(tomllib.loads("\n".join(kept)))
            kept.append(made)
            text = "\n".join(kept)
            line = text.count("\n", 0, len(text) - len(made)) + 1
            lines = KeyLines(text.replace("\n", end))
            for path in _paths(tomllib.loads(text)) - before:
                assert line == lines.of(*path)


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _paths(value: object) -> set[tuple[str | int, ...]]:
    """Everything that has a name or a number in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {(key, *rest) for key, part in inner for rest in {(), *_paths(part)}}
