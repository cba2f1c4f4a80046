"""The prolog and the epilog by themselves: what they write, and that nothing makes them fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from tests.integration.opened import open_to_all

CONTRIB = Path(__file__).parents[2] / "contrib" / "slurm"
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0,2"}
SAYS = '#!/bin/sh\necho "$@ $GPULSE_HEAD $GPULSE_TOKEN_FILE"\n'


class Scripts:
    """Both scripts with a configuration of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.map = folder / "map"
        self.reports = folder / "reports"
        self.configure()

    def configure(self, says: str = SAYS, **words: str) -> None:
        """What they are to know, and what gpulse answers."""
        program = self.folder / "gpulse"
        program.write_text(says, encoding="utf-8")
        program.chmod(0o755)
        known = {"GPULSE": program, "GPULSE_HEAD": "h:1", "MAP": self.map, "REPORTS": self.reports, **words}
        lines = [f"{name}={word}\n" for name, word in known.items()]
        (self.folder / "slurm.conf").write_text("".join(lines), encoding="utf-8")

    def run(self, name: str, **env: str) -> str:
        """Run one as Slurm does, without a search path; what it printed. It ended well."""
        text = (CONTRIB / name).read_text(encoding="utf-8")
        script = self.folder / name
        script.write_text(text.replace("/etc/gpulse", str(self.folder)), encoding="utf-8")
        script.chmod(0o755)
        done = subprocess.run([script], env=env, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mapped(self) -> dict[str, str]:
        """What is in the directory."""
        files = [path for path in self.map.glob("*") if not path.name.startswith(".")]
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(files)}


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    """In a place of their own."""
    return Scripts(tmp_path)


def test_the_gpus_of_a_job_are_written_down_and_given_back(scripts: Scripts) -> None:
    """Two jobs that share a GPU both stand there, and only the one that ends is taken out; of MIG instances the UUIDs count."""

    scripts.run("prolog.sh", **JOB)
    scripts.run("prolog.sh", SLURM_JOB_ID="77", SLURM_JOB_UID="0", CUDA_VISIBLE_DEVICES="2,MIG-1-2")
    parts = {"SLURM_JOB_GPUS": "5", "CUDA_VISIBLE_DEVICES": "MIG-1-2"}
    scripts.run("prolog.sh", SLURM_JOB_ID="78", SLURM_JOB_UID="0", **parts)
    during = scripts.mapped()
    scripts.run("epilog.sh", **JOB)

    assert {"nvidia0": "7 1000\n", "nvidia2": "7 1000\n77 0\n", "MIG-1-2": "77 0\n78 0\n"} == during
    assert {"nvidia2": "77 0\n", "MIG-1-2": "77 0\n78 0\n"} == scripts.mapped()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0"},
        {"SLURM_JOB_ID": "../7", "SLURM_JOB_UID": "0", "SLURM_JOB_GPUS": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0", "SLURM_JOB_GPUS": "MIG-../../x,*,a,NoDevFiles"},
    ],
)
def test_what_names_no_gpu_is_not_written(scripts: Scripts, env: dict[str, str]) -> None:
    """A job without GPUs, and words that would lead out of the directory."""

    scripts.run("prolog.sh", **env)
    scripts.run("epilog.sh", **env)

    assert {} == scripts.mapped()


def test_the_epilog_asks_the_head_that_is_configured(scripts: Scripts) -> None:
    """For one line, with its token, and writes it down and out."""

    scripts.configure(GPULSE_TOKEN_FILE="/etc/token")
    printed = scripts.run("epilog.sh", **JOB)

    assert "job 7 --line h:1 /etc/token\n" == printed == scripts.reports.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "says", ["#!/bin/sh\necho half; exit 1\n", "#!/bin/sh\nexit 0\n", "#!/no/such/program\n"]
)
def test_an_epilog_without_an_answer_says_nothing(scripts: Scripts, says: str) -> None:
    """A head that is away, a job that nobody knows, a gpulse that is not installed: none of them is Slurm's business."""

    scripts.configure(says)

    assert "" == scripts.run("epilog.sh", **JOB)
    assert not scripts.reports.exists()


@pytest.mark.parametrize("line", ["GPULSE_HEAD=(a,b", "exit 3", ": ${NOWHERE:?}", "set -e; false"])
def test_a_mistake_in_the_configuration_takes_no_node_out_of_service(scripts: Scripts, line: str) -> None:
    """A shell ends at once on some of them: then nothing is done, and it ends well."""

    scripts.configure(MAP=f"{scripts.map}\n{line}")
    printed = [scripts.run(name, **JOB) for name in ("prolog.sh", "epilog.sh")]

    assert ["", ""] == printed
    assert {} == scripts.mapped()


def test_a_directory_that_cannot_be_locked_takes_no_node_out_of_service(scripts: Scripts) -> None:
    """Nothing is written there, and the epilog still reports; neither is anything where no directory can be."""

    (scripts.map / ".lock").mkdir(parents=True)
    printed = [scripts.run(name, **JOB) for name in ("prolog.sh", "epilog.sh")]
    scripts.configure(MAP=f"{scripts.folder}/gpulse/below-a-file")
    printed += [scripts.run(name, **JOB) for name in ("prolog.sh", "epilog.sh")]

    assert 2 * ["", "job 7 --line h:1 \n"] == printed
    assert {} == scripts.mapped()


def test_nobody_loses_a_gpu_when_there_is_no_room_to_write(scripts: Scripts) -> None:
    """A line that cannot be kept elsewhere stays where it is."""

    scripts.run("prolog.sh", **JOB)
    scripts.run("prolog.sh", SLURM_JOB_ID="77", SLURM_JOB_UID="0", SLURM_JOB_GPUS="0")
    (scripts.map / ".left").symlink_to("/dev/full")
    scripts.run("epilog.sh", **JOB)

    assert {"nvidia0": "7 1000\n77 0\n"} == scripts.mapped()


@pytest.mark.parametrize(
    ("nodes", "node", "is_first"),
    [
        ("n1", "n1", True),
        ("n[1-2]", "n1", True),
        ("n[1-2]", "n2", False),
        ("n[01,03-32],m7", "n01", True),
        ("n[01,03-32],m7", "m7", False),
        ("rack[1-2]n[3-4]", "rack1n3", True),
        ("a,b[1-2]", "b1", False),
    ],
)
@pytest.mark.parametrize("name", ["SLURM_NODELIST", "SLURM_JOB_NODELIST"])
def test_the_first_node_of_a_job_reports(
    scripts: Scripts, name: str, nodes: str, node: str, is_first: bool
) -> None:
    """The others are silent; the list goes by one name or the other, as the version has it."""

    printed = scripts.run("epilog.sh", **JOB, **{name: nodes, "SLURMD_NODENAME": node})

    assert is_first == bool(printed)


def test_an_epilog_does_not_wait_for_long(scripts: Scripts) -> None:
    """A head that does not answer keeps no node, nor does a program that does not want to end."""

    scripts.configure('#!/bin/sh\ntrap "" TERM\nwhile :; do sleep 600; done\n', PATIENCE="0.2")

    assert "" == scripts.run("epilog.sh", **JOB)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
class TestTellUser:
    """The line at the end of the job's own output."""

    USER: ClassVar = {**JOB, "SLURM_JOB_UID": "65534", "SLURM_JOB_GID": "65534", "SLURM_JOB_USER": "nobody"}

    @pytest.fixture
    def folder(self, scripts: Scripts, tmp_path: Path) -> Path:
        """Where the user may write."""
        open_to_all(tmp_path)
        scripts.configure(TELL_USER="yes")
        folder = tmp_path / "home"
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        return folder

    def test_it_is_written_as_the_user(self, scripts: Scripts, folder: Path) -> None:
        """At the end of a file that the user may write, and nowhere that only root may."""

        own, roots = folder / "own.out", folder / "roots.out"
        for file in (own, roots):
            file.write_text("training\n", encoding="utf-8")
        os.chown(own, 65534, 65534)
        for file in (own, roots):
            scripts.run("epilog.sh", **self.USER, SLURM_JOB_STDOUT=str(file))

        assert "training\njob 7 --line h:1 \n" == own.read_text(encoding="utf-8")
        assert "training\n" == roots.read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("env", "name"),
        [
            ({"SLURM_JOB_STDOUT": "{}/%j.out"}, "7.out"),
            ({"SLURM_JOB_STDOUT": "{}/%u-%J-100%%-%n%t-%s"}, "nobody-7-100%-00-batch"),
            ({"SLURM_JOB_STDOUT": "{}/%A_%a", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "5_2"),
            ({"SLURM_JOB_STDOUT": "{}/%x", "SLURM_JOB_NAME": "50%j &\\1"}, "50%j &\\1"),
            ({"SLURM_JOB_WORK_DIR": "{}"}, "slurm-7.out"),
        ],
    )
    def test_a_pattern_stands_for_a_name(
        self, scripts: Scripts, folder: Path, env: dict[str, str], name: str
    ) -> None:
        """Slurm tells the epilog what the job asked for; nothing when that was nothing."""

        output = folder / name
        output.touch()
        os.chown(output, 65534, 65534)
        scripts.run("epilog.sh", **self.USER, **{key: word.format(folder) for key, word in env.items()})

        assert "job 7 --line h:1 \n" == output.read_text(encoding="utf-8")

    @pytest.mark.parametrize("pattern", ["%j", "%A", "%5j", "%q", "x\\%j", "%"])
    def test_no_other_file_is_written(self, scripts: Scripts, folder: Path, pattern: str) -> None:
        """Neither one that the job has removed is made, nor is one taken whose name is not known here."""

        literal = folder / pattern
        literal.touch()
        os.chown(literal, 65534, 65534)
        scripts.run("epilog.sh", **self.USER, SLURM_JOB_STDOUT=f"{folder}/{pattern}")

        assert [(literal, "")] == [(file, file.read_text(encoding="utf-8")) for file in folder.iterdir()]
