"""`gpulse dask` without a cluster: addresses, lists, custom metrics of files, completion, and what was exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from distributed.protocol import pickle

from gpulse.cli import common, dask, dask_client
from gpulse.errors import GpulseError, MissingExtraError, UsageError, install_command
from gpulse.integrations.dask.trackable_metrics import find_unit

RECORD = """job,dag,timestamp,tasks,mem-util
0,0,0.0,[],"[90, 1]"
1,1,0.2,"[""inc-1""]","[10.5, null]"
2,1,0.4,[],"[20, 30]"
"""
LOAD = """
from gpulse.integrations.dask.monitor_settings import custom_metric

def factor():
    return 2

@custom_metric("twice", per_device=False)
def twice(worker, handles):
    return factor() * worker
"""


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://head:8786", "head"),
        ("tcp://head:8786", " tcp://head "),
        ("tcp://head:1234", "head:1234"),
        ("tcp://10.0.0.5:8786", "tcp://10.0.0.5:8786/"),
        ("tls://a_b.c-d:8786", "TLS://a_b.c-d"),
        ("tcp://[::1]:9", "[::1]:9"),
        ("ucx://head:8786", "ucx://head:8786"),
    ],
)
def test_an_address_is_written_as_dask_writes_it(address: str, text: str) -> None:
    """Whatever is left out is what Dask would take."""

    assert address == dask_client.parse_address(text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("is not the address", ""),
        ("is not the address", "head:0"),
        ("is not the address", "head:99999"),
        ("is not the address", "a b"),
        ("is not the address", "tcp://head:8786/path"),
        ("is not the address", "::1"),
        ("is not the address", "-h"),
        ("is the address of a dashboard", "http://head:8787"),
        ("inproc:// is not a protocol", "inproc://head/1/2"[:13]),
    ],
)
def test_what_is_no_address_is_refused(words: str, text: str) -> None:
    """With what would be one."""
    with pytest.raises(UsageError, match=words) as caught:
        dask_client.parse_address(text)

    assert "://" in str(caught.value.hint)


def given(**more: Any) -> dict[str, Any]:
    """What options say when none is given."""
    return {"scheduler": None, "scheduler_file": None, "timeout": 5.0, **more}


def test_a_file_says_where_the_scheduler_is(tmp_path: Path) -> None:
    """The argument that comes after SCHEDULER stands alone then."""
    file = tmp_path / "scheduler.json"
    file.write_text('{"type": "Scheduler", "address": "tcp://head:1234"}')
    options = given(scheduler="out", scheduler_file=file, folder=None, timeout=2.0)

    assert ("tcp://head:1234", 2.0) == dask_client.pop_scheduler(options, "folder")
    assert {"folder": "out"} == options


@pytest.mark.parametrize(
    ("words", "content"),
    [
        ("No such file", None),
        ("is not JSON", b"\xff\x00"),
        ("has no address", b"[]"),
        ("has no address", b'{"address": 7}'),
        ("is not the address", b'{"address": "?"}'),
    ],
)
def test_a_file_without_an_address_is_refused(words: str, content: bytes | None, tmp_path: Path) -> None:
    """It is named."""
    file = tmp_path / "scheduler.json"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(UsageError, match=words):
        dask_client.pop_scheduler(given(scheduler_file=file))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("'SCHEDULER'", given(folder=None)),
        ("'FOLDER'", given(scheduler="head", folder=None)),
        ("cannot be used together", given(scheduler="head", scheduler_file=Path("x"), folder="out")),
    ],
)
def test_arguments_that_are_missing_or_too_much_are_named(words: str, options: dict[str, Any]) -> None:
    """Also where one of them is another than it seems."""
    with pytest.raises(click.UsageError, match=words):
        dask_client.pop_scheduler(options, "folder")


def test_workers_are_indices_and_ranges() -> None:
    """Each once, in the order in which they were asked for."""

    assert [8, 0, 1, 2] == dask._parse_indices("8, 0-2,1")


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "1-", "1-0", "0-99999999999", "0.5"])
def test_what_is_no_list_of_workers_is_refused(text: str) -> None:
    """With what would be one."""
    with pytest.raises(click.UsageError, match="such as 0,8"):
        dask._parse_indices(text)


def test_a_custom_metric_of_a_file_runs_where_the_file_is_not(tmp_path: Path) -> None:
    """Workers get the function itself with what it uses, not the name of a module that they do not have."""
    file = tmp_path / "metrics.py"
    file.write_text(LOAD)
    (metric,) = dask.load_custom_metrics((f"{file}:twice",))
    sent = pickle.dumps(metric)  # type: ignore[no-untyped-call]
    code = f"import pickle; print(pickle.loads(bytes.fromhex('{sent.hex()}'))(21, []))"

    file.unlink()
    told = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)

    assert "42\n" == told.stdout


def test_a_custom_metric_of_a_module_is_found() -> None:
    """What is installed is named as in an import."""

    assert [os.getpid] == dask.load_custom_metrics(("os:getpid",))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("does not name a custom metric", "metrics.py"),
        ("does not name a custom metric", ":power"),
        ("there is no file nosuch.py", "nosuch.py:power"),
        ("is not a Python file", "/etc/hostname:power"),
        ("No module named 'nosuch'", "nosuch:power"),
        ("there is no 'nosuch' in os", "os:nosuch"),
    ],
)
def test_a_custom_metric_that_is_not_there_is_named(words: str, text: str) -> None:
    """With how one is written."""
    with pytest.raises(UsageError, match=words) as caught:
        dask.load_custom_metrics((text,))

    assert "--custom " in str(caught.value.hint)


@pytest.mark.parametrize("code", ["1/0", "raise SystemExit(3)", "(", "import nosuch"])
def test_code_that_fails_says_so(code: str, tmp_path: Path) -> None:
    """As one line that names the file."""
    file = tmp_path / "metrics.py"
    file.write_text(code)

    with pytest.raises(GpulseError, match=r"metrics\.py"):
        dask.load_custom_metrics((f"{file}:power",))


def completed(incomplete: str, **params: Any) -> list[str]:
    """What a shell is told."""
    ctx = click.Context(dask.attach)
    ctx.params = params
    return [item.value for item in dask.complete_names(ctx, dask.attach.params[0], incomplete)]


def test_names_are_completed() -> None:
    """The last of a list, and none twice."""

    assert ["mem-util"] == completed("mem-")
    assert ["tasks,mem-util"] == completed("tasks,mem-")
    assert [] == completed("mem-util,mem-")
    assert "power_watts" in completed("")


def test_names_of_an_export_are_completed(tmp_path: Path) -> None:
    """A folder or file knows what was tracked, and nothing else can be drawn of it."""
    file = tmp_path / "worker-0.csv"
    file.write_text("job,dag,timestamp,mem-util,mine\n")

    assert ["mem-util", "mine"] == completed("m", scheduler=str(tmp_path))
    assert ["mem-util", "mine"] == completed("m", place=file)
    file.write_text("foreign\n")
    assert ["mem-util"] == completed("mem-", place=file)


@pytest.mark.parametrize(
    "words", [("plot", "{}", "--metric"), ("plot", "{}", "-o", "x.png", "--metric"), ("peaks", "{}")]
)
def test_a_shell_completes_the_names_of_an_export(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also where the folder was named, and the option that is completed has no value yet."""
    (tmp_path / "worker-0.csv").write_text("job,dag,timestamp,mem-util,mine\n")
    shell = ShellComplete(dask.command, {}, "dask", "_DASK_COMPLETE")
    items = shell.get_completions([word.format(tmp_path) for word in words], "m")

    assert ["mem-util", "mine"] == [item.value for item in items]


@pytest.mark.parametrize(
    ("unit", "metric"),
    [
        ("bytes", "total-mem"),
        ("percent", "mem-util"),
        ("percent", "compute-util"),
        ("ratio", "sm_active_ratio"),
        ("bytes", "host.memory_total_bytes"),
        ("percent", "cpu_percent"),
        ("bits/second", "network.link_bits_per_second"),
        ("", "tasks"),
        ("", "heap_bytes"),
        ("", "my-util"),
    ],
)
def test_units_are_those_of_the_catalogue(unit: str, metric: str) -> None:
    """What somebody's own metric means is not guessed, whatever its name."""

    assert unit == find_unit(metric)


def test_the_help_loads_neither_dask_nor_a_drawing_library() -> None:
    """It is there at once."""
    code = (
        "import sys, gpulse.cli.dask\n"
        "print(sorted({'distributed', 'dask', 'matplotlib', 'pandas', 'pyarrow', 'numpy', 'grpc'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]\n" == told.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An export of two workers, of which pictures may be drawn."""
    for index in (0, 1):
        (tmp_path / f"worker-{index}.csv").write_text(RECORD)
    yield tmp_path
    if "matplotlib.font_manager" in sys.modules:  # which keeps the files of its fonts open
        vars(sys.modules["matplotlib.font_manager"])["_get_font"].cache_clear()


def invoked(*words: object) -> Result:
    """`gpulse dask` in this process."""
    return CliRunner().invoke(dask.command, [str(word) for word in words])


def test_peaks_of_a_folder(folder: Path) -> None:
    """A cluster is not needed for what was exported; what ran between jobs counts in the total alone."""

    assert (
        "highest mem-util\nworker  job  GPU 0  GPU 1\n     1    1  10.5%      -\n     1    2    20%    30%\n"
    ) == invoked("peaks", folder, "mem-util", "--workers", "1").stdout
    assert {
        "metric": "mem-util",
        "peaks": [{"worker": index, "job": None, "values": [90, 30]} for index in (0, 1)],
    } == json.loads(invoked("peaks", folder, "mem-util", "--total", "--json").stdout)


def test_without_a_job_there_are_no_peaks(folder: Path) -> None:
    """Which is said, with what there is."""
    for index in (0, 1):
        (folder / f"worker-{index}.csv").write_text(RECORD.partition("1,1,")[0])

    assert "no job was recorded" in invoked("peaks", folder, "mem-util").stdout


@pytest.mark.parametrize(
    ("words", "hint", "arguments"),
    [
        ("'x' was not tracked", "peaks --help", "peaks FOLDER x"),
        ("there is no worker 7", "peaks --help", "peaks FOLDER mem-util --workers 7"),
        ("contains no worker-0.csv", "you passed to `gpulse dask csv`", "peaks / mem-util"),
        (
            "there is no file or directory nosuch",
            "a directory that `gpulse dask csv` wrote",
            "plot nosuch -o x.png",
        ),
        ("there is no file or directory nosuch", "or one of its", "plot nosuch -o x.png --kind cluster"),
        ("is not the address", "wrote ('./nosuch' is not such a directory)", "peaks ./nosuch mem-util"),
        ("cannot draw 'x.foo'", "-o x.png", "plot FOLDER -o x.foo"),
        ("FOLDER has files of 2", "FOLDER/worker-0.csv", "plot FOLDER -o x.png --kind lines"),
        (
            "is the file of one worker",
            "give the directory FOLDER",
            "plot FOLDER/worker-0.csv -o x.png --kind cluster",
        ),
        ("there is no job 9", "plot --help", "plot FOLDER/worker-0.csv -o x.png --job 9"),
    ],
)
def test_what_an_export_does_not_have_is_named(words: str, hint: str, arguments: str, folder: Path) -> None:
    """With what to try, in the words of the command line."""
    error = invoked(*arguments.replace("FOLDER", str(folder)).split()).exception

    assert isinstance(error, UsageError)
    assert words.replace("FOLDER", str(folder)) in error.message
    assert hint.replace("FOLDER", str(folder)) in str(error.hint)


@pytest.mark.parametrize(
    "arguments",
    ["FOLDER", "FOLDER/worker-0.csv", "FOLDER/worker-0.csv --kind boxes --job 1 --metric mem-util"],
)
def test_an_export_is_drawn(arguments: str, folder: Path) -> None:
    """All of it, or one worker."""
    picture = folder / "picture.svg"
    size = ("--width", 4, "--height", 3)
    said = invoked("plot", *arguments.replace("FOLDER", str(folder)).split(), "-o", picture, *size)

    assert f"wrote {picture}\n" == said.stdout
    assert "mem-util" in picture.read_text(encoding="utf-8")


def test_the_one_worker_of_a_folder_needs_no_name(folder: Path) -> None:
    """Lines of it are lines of that one."""
    (folder / "worker-1.csv").unlink()

    assert 0 == invoked("plot", folder, "--kind", "lines", "-o", folder / "x.png", "--width", 2).exit_code


@pytest.mark.parametrize(
    ("commands", "python"),
    [
        ("`gpulse dask stop`, or `gpulse dask detach` which", "stop(), or detach() which"),
        ("`gpulse dask start` begins it", "monitor.start() begins it"),
        ("--mem-limit, --dump-loc and --job-type", "mem_limit, dump_loc and job_type"),
        (
            "--mem-limit is at least 1, or left out for no limit, not 0",
            "mem_limit is at least 1, or None for no limit, not 0",
        ),
        ("restart() and my_mem_limit", "restart() and my_mem_limit"),
        ("a file that `gpulse dask csv` wrote", "a file that Monitor.to_csv() wrote"),
        ("it failed: ^[[2J^Jno", "it failed: \x1b[2J\nno"),
    ],
)
def test_python_is_said_as_commands(commands: str, python: str) -> None:
    """Who writes no code is not told to call a method."""
    with (
        click.Context(dask.attach, info_name="attach"),
        pytest.raises(GpulseError) as caught,
        dask_client.reword_errors(),
    ):
        raise GpulseError(python)

    assert (commands, "attach --help") == (caught.value.message, caught.value.hint)


def test_without_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every extra does."""
    monkeypatch.setattr(dask_client, "find_spec", lambda _: None)
    error = invoked("start", "head").exception

    assert isinstance(error, MissingExtraError)
    assert install_command("dask") == error.hint


def test_the_usual_token_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was named, that of the environment, or this user's when there is one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    usual = common.default_token_file()

    assert None is dask._find_token_file(None)
    usual.parent.mkdir(parents=True)
    usual.touch()
    assert usual == dask._find_token_file(None)
    monkeypatch.setenv("GPULSE_TOKEN_FILE", "elsewhere")
    assert Path("elsewhere") == dask._find_token_file(None)
    assert Path("here") == dask._find_token_file(Path("here"))
