"""The file of a configuration: who may have written it, and what `gpulse harvest init` begins it with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulse.cli.common import print_error
from gpulse.harvest.config import gpu_mon_ini, toml
from gpulse.harvest.config.config_file import build_template
from gpulse.harvest.settings import ConfigError
from tests.unit.harvest_config_lab import GPUS, INI, TOML, Lab

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "harvest-configuration.md"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A directory to load configurations in."""
    return Lab(tmp_path)


def why(lab: Lab, path: Path, *, root: bool = False) -> str:
    """The reason for which a file is refused."""
    with pytest.raises(ConfigError) as caught:
        lab.load_file(path, root=root)
    assert caught.value.hint
    return caught.value.message.removeprefix(f"{path}: ")


def test_a_file_that_is_not_there(lab: Lab) -> None:
    """The hint says how to get one."""

    assert "no such file" == why(lab, lab.directory / "none.toml")
    assert "cannot be read: Not a directory" == why(lab, lab.bin / "worker" / "x.toml")


def test_a_directory(lab: Lab) -> None:
    """It is named for what it is."""

    assert "is a directory" == why(lab, lab.bin)


def test_a_pipe_is_not_waited_for(lab: Lab) -> None:
    """What is not a regular file is not read."""
    os.mkfifo(lab.directory / "pipe")

    assert "not a regular file" == why(lab, lab.directory / "pipe")
    assert "not a regular file" == why(lab, Path("/dev/null"))


def test_a_name_that_no_file_can_have(lab: Lab) -> None:
    """It is refused, not a fault of ours."""

    assert "cannot be read: embedded null byte" == why(lab, Path("a\0b"))


def test_a_file_that_may_not_be_read(lab: Lab) -> None:
    """The reason is the system's."""
    path = lab.write("secret.toml", TOML)
    path.chmod(0)

    with somebody_else():
        assert "cannot be read: Permission denied" == why(lab, path)


@contextmanager
def somebody_else() -> Iterator[None]:
    """Not root, for whom there are no permissions."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_links_are_followed(lab: Lab) -> None:
    """Paths of the configuration begin where the link is."""
    (lab.directory / "real").mkdir(mode=0o755)
    lab.write("real/harvest.toml", TOML)
    link = lab.directory / "harvest.toml"
    link.symlink_to("real/../real/harvest.toml")

    assert str(lab.directory) == lab.load_file(link, root=True).programs[0].directory


@pytest.mark.parametrize("mode", [0o646, 0o666, 0o602])
def test_root_refuses_a_file_that_others_may_write(lab: Lab, mode: int) -> None:
    """Anybody else may use it as it is."""
    path = lab.write("harvest.toml", TOML)
    path.chmod(mode)

    assert "other users can write to this file, but its programs run as root" == why(lab, path, root=True)
    assert lab.load_file(path)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_root_refuses_a_directory_that_others_may_write(lab: Lab, mode: int) -> None:
    """They could put another file in its place."""
    open_directory = lab.directory / "open"
    open_directory.mkdir()
    path = lab.write("open/harvest.toml", TOML)
    open_directory.chmod(mode)

    expected = f"its directory {open_directory} is writable by other users, but the programs in this file run as root"
    assert expected == why(lab, path, root=True)
    assert lab.load_file(path)


def test_root_refuses_what_is_reached_through_such_a_directory(lab: Lab) -> None:
    """By a link in it, by a link that leads there, or as a directory above; a sticky one above is none."""
    shared = lab.directory / "open"
    (shared / "below").mkdir(parents=True)
    (shared / "below").chmod(0o755)
    safe = lab.write("harvest.toml", TOML)
    below = lab.write("open/below/harvest.toml", TOML)
    (shared / "link.toml").symlink_to(safe)
    (lab.directory / "onwards.toml").symlink_to(shared / "link.toml")
    (lab.directory / "directory").symlink_to("open/below")
    (shared / "way").symlink_to("below")
    shared.chmod(0o777)

    for path in (
        below,
        shared / "link.toml",
        lab.directory / "onwards.toml",
        lab.directory / "directory" / "harvest.toml",
    ):
        assert f"its directory {shared} is writable by other users" in why(lab, path, root=True)
    shared.chmod(0o1777)
    assert lab.load_file(below, root=True)
    assert "writable by other users" in why(lab, shared / "link.toml", root=True)
    assert "writable by other users" in why(lab, shared / "way" / "harvest.toml", root=True)


@as_root
def test_root_refuses_what_belongs_to_somebody_else(lab: Lab) -> None:
    """The file, a directory, and a group that may write."""
    (lab.directory / "hers").mkdir(mode=0o755)
    path = lab.write("hers/harvest.toml", TOML)
    os.chown(path, 4711, 0)

    assert "owned by another user (UID 4711)" == why(lab, path, root=True)
    os.chown(path, 0, 4711)
    path.chmod(0o664)
    assert "other users can write to this file" in why(lab, path, root=True)
    os.chown(path, 0, 0)
    assert lab.load_file(path, root=True)
    os.chown(path.parent, 4711, 0)
    expected = f"its directory {path.parent} is owned by another user (UID 4711)"
    assert expected == why(lab, path, root=True)


def test_the_template_of_toml_loads(lab: Lab) -> None:
    """As it is, it harvests each GPU with the program that is still to be named."""
    settings = lab.toml(build_template("toml", GPUS), count=4)

    assert ["work-0", "work-1", "work-2", "work-3"] == [program.name for program in settings.programs]
    assert all(("my-program",) == program.command for program in settings.programs)
    assert settings.people.enabled
    (ignored,) = set(settings.gpus.values())
    assert {"gpulse", "nvidia-smi"} < ignored


def test_every_key_of_the_template_can_be_used(lab: Lab) -> None:
    """Without their marks the keys load, those that are shown with defaults change nothing, and none is missing."""
    text = build_template("toml", GPUS)
    uncommented = re.sub(r"^#(?=\[|[a-z])", "", text, flags=re.MULTILINE)

    used = lab.toml(uncommented, root=True, count=4)

    assert "# GPUs of this machine: 0 NVIDIA H200, 1 NVIDIA H200" in text
    plain = lab.toml(text, root=True, count=4)
    assert ("interval_seconds", "idle_seconds", "cooldown_seconds", "quiet_seconds", "gpus") == tuple(
        name
        for name in ("interval_seconds", "idle_seconds", "cooldown_seconds", "quiet_seconds", "gpus")
        if getattr(plain, name) == getattr(used, name)
    )
    assert plain.people == used.people
    first = used.programs[0]
    assert first._replace(
        cpus=(), hours=plain.hours, log=None, user=None, nice=None, ionice=None
    ) == plain.programs[0]._replace(environment=(("OMP_NUM_THREADS", "4"), *plain.programs[0].environment))
    for keys in toml.TABLES.values():
        assert all(re.search(rf"^#?{key} = ", text, re.MULTILINE) for key in keys)


def test_the_template_of_gpu_mons_form_loads(lab: Lab) -> None:
    """With the lines that are commented out too."""
    text = build_template("ini", GPUS, "ada")

    assert lab.ini(text).programs[0].whole
    used = lab.ini(re.sub(r"^;(?=[a-z])", "", text, flags=re.MULTILINE))
    assert ("/dev/null", frozenset({"ada"})) == (used.programs[0].log, used.people.whitelist)
    keys = (
        *gpu_mon_ini.DEFAULTS_KEYS,
        *gpu_mon_ini.GPU_KEYS,
        *gpu_mon_ini.PROCESS_KEYS,
        *gpu_mon_ini.TTY_KEYS,
    )
    assert all(re.search(rf"^;?{key}=", text, re.MULTILINE) for key in keys)


@pytest.mark.parametrize("kind", ["toml", "ini"])
def test_a_template_cannot_be_broken_by_the_name_of_a_gpu(lab: Lab, kind: str) -> None:
    """What a driver says stays inside the comment."""
    odd = [GPUS[0]._replace(name="x\n[evil]\u2028{y}")]

    text = build_template("toml" if kind == "toml" else "ini", odd)

    assert "0 x?[evil]?{y}" in text
    assert lab.load(f"x.{kind}", text, count=1)


def test_the_document_shows_a_real_refusal(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that it shows is refused in the very words that it shows."""
    shown = re.search(
        r"^\$ cat harvest.toml\n(.*?)^\$ gpulse.*?\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown is not None
    with pytest.raises(ConfigError) as caught:
        lab.toml(shown[1])
    print_error("gpulse", caught.value.message, caught.value.hint)

    assert shown[2].replace("/home/ada", str(lab.directory)) == capsys.readouterr().err


def test_a_user_without_a_name_is_a_number_in_quotes(lab: Lab) -> None:
    """As the document says."""

    assert {"4711"} == lab.toml(f'[idle]\nignore_users = ["4711"]\n{TOML}').ignore_users
    assert lab.refused("harvest.toml", f"[idle]\nignore_users = [4711]\n{TOML}").startswith(
        "2: ignore_users: "
    )


def test_the_document_names_every_key(lab: Lab) -> None:
    """Each has a row in the table of its section, and every example in it loads."""
    document = DOCUMENT.read_text()
    sections = dict(
        re.findall(r"^### `\[+([a-z]+).*?\]+`.*?\n(.*?)(?=^##|\Z)", document, re.MULTILINE | re.DOTALL)
    )
    for table, keys in toml.TABLES.items():
        assert list(keys) == re.findall(r"^\| `(\w+)` ", sections[table], re.MULTILINE)
    for section, known in {
        "defaults": gpu_mon_ini.DEFAULTS_KEYS,
        "gpu": gpu_mon_ini.GPU_KEYS,
        "process": gpu_mon_ini.PROCESS_KEYS,
        "tty": gpu_mon_ini.TTY_KEYS,
    }.items():
        assert list(known) == re.findall(rf"^\| `\[{section}[^|]*\]` \| `(\w+)` ", document, re.MULTILINE)
    examples = re.findall(r"^```(toml|ini)\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    assert {"toml", "ini"} == {kind for kind, _ in examples}
    for kind, text in examples:
        assert lab.load(f"example.{kind}", text, count=4)


def test_the_current_directory_may_be_gone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form whose paths begin there is refused."""
    path = lab.write("gpu_mon.conf", INI)
    (lab.directory / "gone").mkdir()
    monkeypatch.chdir(lab.directory / "gone")
    (lab.directory / "gone").rmdir()

    assert "the current directory no longer exists" == why(lab, path)
