"""Whatever is in a file: settings that can be carried out, or a refusal with the file and a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpulse.harvest.config import gpu_mon_ini, toml
from gpulse.harvest.settings import ConfigError, HarvestSettings
from tests.unit.harvest_config_lab import INI, TOML, Lab

fuzz = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

WORDS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "nan",
        "inf",
        "1e400",
        "true",
        "ALL",
        "all",
        "each",
        "worker",
        "./worker",
        "~",
        "~x/",
        "/",
        "/tmp",
        "0-9999",
        "GPU-",
        "GPU-1f2e",
        "root",
        "idle",
        "1GiB",
        "TERM",
        "%",
        "[",
        "{gpu}",
        ".",
        ":",
        "always",
        "",
        "9" * 400,
        "0x" + "f" * 400,
        "worker '",
        "\x00",
        "mon-sun 1-2",
        "\n  x",
        "é\u2028",
        "\t",
        "\x85",
    ]
)
INI_KEYS = st.sampled_from(
    [
        *gpu_mon_ini.DEFAULTS_KEYS,
        *gpu_mon_ini.GPU_KEYS,
        *gpu_mon_ini.PROCESS_KEYS,
        *gpu_mon_ini.TTY_KEYS,
        "x",
        "",
        "\x1c",
    ]
)
INI_LINES = st.one_of(
    st.sampled_from(
        ["[defaults]", "[gpu-a]", "[process-a]", "[process-b]", "[process-]", "[tty]", "[", "[x\x85]"]
    ),
    st.tuples(INI_KEYS, st.sampled_from(["=", ":", " "]), WORDS).map("".join),
    st.text(max_size=10),
)
TOML_VALUES = st.recursive(
    st.one_of(
        WORDS.filter(lambda word: word not in ("", "\t", "all")),
        WORDS.map(lambda word: '"' + "".join(f"\\u{ord(letter):04x}" for letter in word) + '"'),
        st.sampled_from(["22:00:00", "1979-05-27", "-0.0", "+inf", '"""\n[x]\n"""', "''"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(st.sampled_from(["A", '""', '"="', "PATH"]), inner).map(
            lambda pair: f"{{{pair[0]} = {pair[1]}}}"
        ),
    ),
    max_leaves=4,
)
TOML_LINES = st.one_of(
    st.sampled_from(
        [f"[{name}]" for name in toml.TABLES] + ["[[gpu]]", "[[program]]", "[program.env]", "[x]", "[[idle]]"]
    ),
    st.tuples(st.sampled_from([key for keys in toml.TABLES.values() for key in keys]), TOML_VALUES).map(
        " = ".join
    ),
    st.text(max_size=10),
)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A directory to load configurations in."""
    return Lab(tmp_path)


def check(lab: Lab, name: str, content: str | bytes, *, root: bool) -> None:
    """Settings that hold together, or a refusal that names the file."""
    made = attempt(lab, name, content, root=root)
    if isinstance(made, HarvestSettings):
        hold(made)
    else:
        assert made.message.startswith(f"{lab.directory / name}:")
        assert "\n" not in made.message + (made.hint or "")


def attempt(lab: Lab, name: str, content: str | bytes, *, root: bool) -> HarvestSettings | ConfigError:
    """What comes of a configuration."""
    try:
        return lab.load(name, content, root=root)
    except ConfigError as error:
        return error


def hold(made: HarvestSettings) -> None:
    """What everything that is built on settings relies on."""
    names = [program.name for program in made.programs]
    assert names
    assert len(set(names)) == len(names)
    assert 0 < made.interval_seconds <= 86_400
    for program in made.programs:
        assert program.command[0]
        assert program.gpus
        assert set(program.gpus) <= set(made.gpus) <= {0, 1}
        assert program.directory.startswith("/")
        assert all("\0" not in part for part in program.command)
        assert all("\0" not in part for pair in program.environment for part in pair)
        assert 0 < program.backoff_seconds <= program.max_backoff_seconds
        assert set(program.cpus) <= set(range(8))


@fuzz
@example(b"\xff\xfe[\0")
@given(st.binary(max_size=60))
def test_any_bytes(lab: Lab, data: bytes) -> None:
    """Under both names."""
    check(lab, "fuzz.toml", data, root=True)
    check(lab, "fuzz.conf", data, root=True)


@fuzz
@given(st.lists(INI_LINES, max_size=12), st.booleans())
def test_any_lines_of_gpu_mons_form(lab: Lab, lines: list[str], root: bool) -> None:
    """Alone, and after a program that is right."""
    check(lab, "fuzz.conf", "\n".join(lines), root=root)
    check(lab, "fuzz.conf", INI + "\n".join(lines), root=root)


@fuzz
@given(st.lists(TOML_LINES, max_size=8), st.booleans())
def test_any_lines_of_toml(lab: Lab, lines: list[str], root: bool) -> None:
    """Alone, and after a program that is right."""
    check(lab, "fuzz.toml", "\n".join(lines), root=root)
    check(lab, "fuzz.toml", TOML + "\n".join(lines), root=root)


@fuzz
@given(
    st.sampled_from([(table, key) for table, keys in toml.TABLES.items() for key in keys]),
    TOML_VALUES,
    st.booleans(),
)
def test_any_value_of_any_key(lab: Lab, place: tuple[str, str], value: str, root: bool) -> None:
    """One key at a time, so that every one of them is reached."""
    table, key = place
    if table == "program":
        lines = [line for line in TOML.splitlines() if not line.startswith(f"{key} ")]
        check(lab, "fuzz.toml", "\n".join([*lines, f"{key} = {value}"]), root=root)
        return
    header = f"[[{table}]]" if table == "gpu" else f"[{table}]"
    check(lab, "fuzz.toml", f"{header}\n{key} = {value}\n{TOML}", root=root)


@fuzz
@given(
    st.sampled_from(
        [("defaults", "interval_seconds"), ("gpu-a", "gpus"), ("gpu-a", "ignore_programs")]
        + [("tty", key) for key in gpu_mon_ini.TTY_KEYS]
        + [("process-a", key) for key in gpu_mon_ini.PROCESS_KEYS]
    ),
    st.one_of(WORDS, st.text(max_size=12)),
)
def test_any_value_of_any_key_of_gpu_mons(lab: Lab, place: tuple[str, str], value: str) -> None:
    """One key at a time, so that every one of them is reached."""
    section, key = place
    others = {"process-a": "cmd=worker\ngpus=0\n", "gpu-a": "gpus=ALL\n"}.get(section, "")
    kept = "".join(f"{line}\n" for line in others.splitlines() if not line.startswith(f"{key}="))
    check(lab, "fuzz.conf", f"[{section}]\n{kept}{key}={value}\n{INI}", root=False)
