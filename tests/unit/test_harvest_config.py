"""gpu_mon's INI files mean what they meant, and are refused with a line and a reason."""

from __future__ import annotations

import configparser
import io
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulse.harvest.config.gpu_mon_ini import read_sections
from gpulse.harvest.config.validation import ConfigFaults
from gpulse.harvest.settings import ConfigError, PeopleSettings, Program
from tests.unit.harvest_config_lab import INI, Lab

ONE_FOR_ALL = """\
[defaults]
; how frequently perform GPU and tty checks
interval_seconds=10

[gpu-all]
; list of comma-separated gpu indices or ALL to handle all available gpus
gpus=ALL
ignore_programs=nvidia-smi

; program which will be started on gpu during idle time
[process-all]
dir=/tmp
cmd=miner-run
gpus=ALL
log=/dev/null

[tty]
enabled=True
whitelist=user1,user2
idle_seconds=300
"""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A directory to load configurations in."""
    return Lab(tmp_path)


def seen(*gpus: int) -> tuple[tuple[str, str], ...]:
    """What a program on these GPUs finds in its environment."""
    return (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpus))))


def test_one_program_for_all_gpus(lab: Lab) -> None:
    """gpu_mon's first example: all GPUs, preferred, in its directory, with nothing hidden from it."""
    settings = lab.ini(ONE_FOR_ALL)

    assert {0: frozenset({"nvidia-smi"}), 1: frozenset({"nvidia-smi"})} == settings.gpus
    program = Program("all", ("miner-run",), (0, 1), whole=True, directory="/tmp", log="/dev/null")
    assert (program,) == settings.programs
    assert (10, 0, 0) == (settings.interval_seconds, settings.idle_seconds, settings.cooldown_seconds)
    assert 30 == lab.ini(f"[defaults]\ncooldown_seconds=30\n{INI}").cooldown_seconds
    assert (
        PeopleSettings(enabled=True, whitelist=frozenset({"user1", "user2"}), idle_seconds=300)
        == settings.people
    )


def test_a_program_for_each_gpu(lab: Lab) -> None:
    """gpu_mon's second example: each sees its own GPU; those on several see these, in their order."""
    settings = lab.ini(
        "[process-0]\ncmd=worker -x\ngpus=0\n[process-1]\ncmd=worker\ngpus=1\n[process-2]\ncmd=worker\ngpus=1, 0\n"
    )

    expected = [("0", (0,), seen(0)), ("1", (1,), seen(1)), ("2", (1, 0), seen(1, 0))]
    assert expected == [(program.name, program.gpus, program.environment) for program in settings.programs]
    assert not any(program.whole for program in settings.programs)


def test_without_sections_everything_is_as_gpu_mon_had_it(lab: Lab) -> None:
    """All GPUs watched, none ignored, nobody at the machine counts, output to the console, ten seconds."""
    settings = lab.ini(INI)

    assert {0: frozenset(), 1: frozenset()} == settings.gpus
    assert PeopleSettings(enabled=False) == settings.people
    assert (10, 0, 0) == (settings.interval_seconds, settings.idle_seconds, settings.cooldown_seconds)
    assert 30 == lab.ini(f"[defaults]\ncooldown_seconds=30\n{INI}").cooldown_seconds
    assert (os.getcwd(), None) == (settings.programs[0].directory, settings.programs[0].log)


def test_all_means_the_watched_gpus(lab: Lab) -> None:
    """A program for ALL GPUs gets those of the sections, and sees no other."""
    settings = lab.ini(
        "[gpu-a]\ngpus=0\nignore_programs=a\n[gpu-b]\ngpus=0,GPU-AAAA\nignore_programs=b, c\n"
        "[process-x]\ncmd=worker\ngpus=all\n",
        count=4,
    )

    assert {0: frozenset("abc"), 2: frozenset("bc")} == settings.gpus
    program = settings.programs[0]
    assert ((0, 2), True, seen(0, 2)) == (program.gpus, program.whole, program.environment)


def test_values_are_read_as_configparser_reads_them(lab: Lab) -> None:
    """Keys of any case, blanks, `:`, `%`, comments and lines that go on."""
    settings = lab.ini(
        "\ufeff# first\n[process-x]\r\n  CMD : worker 'a b' 100% ;no comment\n    --more\n  ; one\n Gpus =  aLL  \n"
        "[tty]\nENABLED=oN\n"
    )

    assert ("worker", "a b", "100%", ";no", "comment", "--more") == settings.programs[0].command
    assert settings.people.enabled


def test_paths_begin_at_the_current_directory(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """And programs with a slash at their own directory, `~` at home."""
    (lab.directory / "here" / "jobs").mkdir(parents=True)
    lab.program(lab.directory / "here" / "jobs" / "run")
    monkeypatch.chdir(lab.directory / "here")

    program = lab.ini("[process-x]\ncmd=./run\ndir=jobs\ngpus=0\nlog=~/out.log\n").programs[0]

    assert ("./run",) == program.command
    assert str(lab.directory / "here" / "jobs") == program.directory
    assert str(lab.directory / "out.log") == program.log
    home = lab.ini("[process-x]\ncmd=~/bin/worker\ngpus=0\n").programs[0]
    assert (str(lab.bin / "worker"),) == home.command


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpus=0\n" + INI, "1: 'gpus=0' is not in any section"),
        ("[defaults]\nnonsense\n" + INI, "2: 'nonsense' is neither a section header nor KEY=VALUE"),
        ("[defaults]\n=1\n" + INI, "2: '=1' is neither a section header nor KEY=VALUE"),
        ("[default]\n" + INI, "1: unknown section [default]"),
        ("[DEFAULT]\n" + INI, "1: unknown section [DEFAULT]"),
        ("[gpu]\ngpus=0\n" + INI, "1: unknown section [gpu]"),
        ("[defaults]\n\nintervall=1\n" + INI, "3: unknown key 'intervall' in [defaults]"),
        (INI + "dir=/tmp\nuser=me\n", "5: unknown key 'user' in [process-all]"),
        ("[tty]\n[tty]\n" + INI, "2: duplicate section [tty], first defined on line 1"),
        (INI + "gpus=0\n", "4: 'gpus' is already set on line 3"),
        (
            "[defaults]\ninterval_seconds=0\n" + INI,
            "2: interval_seconds: must be a number from 0.1 to 86400, not 0.0",
        ),
        ("[defaults]\ninterval_seconds=nan\n" + INI, "2: interval_seconds: 'nan' is not a number"),
        (
            "[defaults]\ninterval_seconds=-3\n" + INI,
            "2: interval_seconds: must be a number from 0.1 to 86400, not -3.0",
        ),
        (
            "[defaults]\ninterval_seconds=1e9\n" + INI,
            "2: interval_seconds: must be a number from 0.1 to 86400, not 1000000000.0",
        ),
        (
            "[defaults]\ninterval_seconds=1e999\n" + INI,
            "2: interval_seconds: must be a number from 0.1 to 86400, not inf",
        ),
        ("[defaults]\ninterval_seconds=\n" + INI, "2: interval_seconds: '' is not a number"),
        ("[defaults]\ninterval_seconds=5 ; s\n" + INI, "2: interval_seconds: '5 ; s' contains a comment"),
        ("[tty]\nidle_seconds=ten\n" + INI, "2: idle_seconds: 'ten' is not a number"),
        ("[tty]\nenabled=maybe\n" + INI, "2: enabled: 'maybe' is neither true nor false"),
        ("[gpu-a]\nignore_programs=x\n" + INI, "1: [gpu-a] has no gpus"),
        ("[gpu-a]\ngpus=\n" + INI, "2: gpus: the list of GPUs is empty"),
        ("[gpu-a]\ngpus=2\n" + INI, "2: gpus: there is no GPU 2"),
        ("[gpu-a]\ngpus=0,0\n" + INI, "2: gpus: GPU 0 is listed twice"),
        ("[gpu-a]\ngpus=GPU-1f\n" + INI, "2: gpus: 'GPU-1f' matches GPUs 0 and 1"),
        ("[gpu-a]\ngpus=GPU-ff\n" + INI, "2: gpus: there is no GPU 'GPU-ff'"),
        ("[gpu-a]\ngpus=each\n" + INI, "2: gpus: 'each' is not a GPU"),
        ("[gpu-a]\ngpus=0\nignore_programs=/bin/x\n" + INI, "3: ignore_programs: '/bin/x' is a path"),
        ("[gpu-a]\ngpus=0\n[process-x]\ncmd=worker\ngpus=1\n", "5: gpus: GPU 1 is not watched"),
        ("[process-x]\ncmd=worker\ngpus=-1\n", "3: gpus: '-1' is not a GPU"),
        ("[process-x]\ncmd=worker\n", "1: [process-x] has no gpus"),
        ("[process-x]\ngpus=0\n", "1: [process-x] has no cmd"),
        ("[process-x]\ngpus=0\ncmd=\n", "3: cmd: the command is empty"),
        ("[process-x]\ngpus=0\ncmd=''\n", "3: cmd: the command is empty"),
        ("[process-x]\ngpus=0\ncmd=worker 'x\n", '3: cmd: unbalanced quotes in "worker \'x"'),
        ("[process-x]\ngpus=0\ncmd=nobody-has-this\n", "3: cmd: there is no program 'nobody-has-this'"),
        ("[process-x]\ngpus=0\ncmd=/tmp\n", "3: cmd: '/tmp' is not a program file"),
        ("[process-x]\ngpus=0\ncmd=worker\ndir=/none/x\n", "4: dir: there is no directory '/none/x'"),
        ("[process-x]\ngpus=0\ncmd=worker\ndir=/dev/null\n", "4: dir: '/dev/null' is not a directory"),
        ("[process-x]\ngpus=0\ncmd=worker\nlog=/none/x\n", "4: log: there is no directory '/none'"),
        ("[process-x]\ngpus=0\ncmd=worker\nlog=/tmp\n", "4: log: '/tmp' is a directory"),
        ("[process-]\ngpus=0\ncmd=worker\n", "1: [process-] has no program name"),
        ("[gpu-all]\ngpus=ALL\n", " no program is configured"),
        ("", " no program is configured"),
        ('[[program]]\nname = "x"\n', "1: this file is TOML, but its name does not end in .toml"),
        (
            "# x\n[harvest]\ninterval_seconds = 1\n",
            "2: this file is TOML, but its name does not end in .toml",
        ),
        (b"[defaults]\n\xff\n", "2: not UTF-8 text"),
        (b"#" * (1 << 20) + b"#", " larger than 1 MiB"),
    ],
)
def test_what_is_refused(lab: Lab, text: str | bytes, expected: str) -> None:
    """The line, and the reason in words."""

    assert lab.refused("gpu_mon.conf", text).startswith(expected)


def test_the_first_fault_is_reported_and_the_others_are_counted(lab: Lab) -> None:
    """By line, whatever was looked at first."""
    text = "[process-x]\ncmd=none\ngpus=9\n[defaults]\ninterval_seconds=0\nfoo=1\n"

    refused = lab.refused("gpu_mon.conf", text)

    assert refused.startswith("2: cmd: there is no program 'none'")
    assert refused.endswith("(and 3 more errors)")


def test_a_wrong_section_of_gpus_is_not_blamed_on_programs(lab: Lab) -> None:
    """One mistake is one fault."""

    assert "(and" not in lab.refused("gpu_mon.conf", "[gpu-a]\ngpus=7\n[process-x]\ncmd=worker\ngpus=1\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[defaults]\nintervall_seconds=1\n",
            "did you mean interval_seconds? valid: interval_seconds, cooldown_seconds",
        ),
        ("[TTY]\n", "did you mean tty? valid: defaults, gpu-NAME, process-NAME, tty"),
        ("[process-a]\ncommand=x\n", "did you mean cmd? valid: dir, cmd, gpus, log"),
        ("[process-a]\ncmd=worker\ngpus=5\n", "use one of 0, 1, or all"),
    ],
)
def test_hints_say_what_may_be_written_instead(lab: Lab, text: str, expected: str) -> None:
    """The nearest name, and all of them."""

    assert expected == lab.hint("gpu_mon.conf", text)


def test_a_program_that_is_not_executable(lab: Lab) -> None:
    """It is found, and cannot be run."""
    path = lab.program(lab.bin / "plain", 0o644)

    refused = lab.refused("gpu_mon.conf", "[process-x]\ngpus=0\ncmd=plain\n")

    assert f"3: cmd: {str(path)!a} is not executable" == refused


def test_a_machine_without_gpus(lab: Lab) -> None:
    """A program that waits for all of no GPUs would start at once."""

    assert " this machine has no GPU to harvest" == lab.refused("gpu_mon.conf", INI, count=0)


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "[a]",
                " [b]",
                "[a] x",
                "[]",
                "k=v",
                "K : v",
                "  more",
                "\tmore",
                "",
                "  ",
                "; no",
                " # no",
                "=",
                "x",
            ]
        ),
        st.text(alphabet="ab[]=:;# \t%", max_size=8),
    ),
    max_size=12,
)


@example(["[a]", "k = v", "", "  more", "; no", "  ", " again"], "\n")
@given(LINES, st.sampled_from(["\n", "\r\n", "\r"]))
def test_ini_is_read_as_configparser_reads_it(lines: list[str], end: str) -> None:
    """The same sections, keys and values, and faults in the same files."""
    text = end.join(lines)
    parser = configparser.RawConfigParser(default_section="\0")
    try:
        parser.read_file(io.StringIO(text, newline=None))
        expected = {name: dict(parser[name]) for name in parser.sections()}
    except configparser.Error:
        expected = None
    faults = ConfigFaults("x")

    tables = read_sections(text, faults)

    found = {
        name: {key: entry.value for key, entry in table._entries.items()} for name, table in tables.items()
    }
    assert expected == (None if faults else found)


def test_a_refusal_says_where(lab: Lab) -> None:
    """`FILE:LINE: reason`, with the exit code of wrong usage."""
    path = lab.write("gpu_mon.conf", "[what]\n")

    with pytest.raises(ConfigError) as caught:
        lab.load_file(path)

    assert f"{path}:1: unknown section [what] (and 1 more error)" == caught.value.message
    assert 2 == caught.value.exit_code
