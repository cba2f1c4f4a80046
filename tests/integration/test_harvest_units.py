"""The systemd units in contrib/: systemd understands them, and gpulse understands what they start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.commands import BIN, run

UNITS = Path(__file__).parents[2] / "contrib" / "systemd"
SYSTEM, USER = "gpulse-harvest.service", "user/gpulse-harvest.service"


def settings(unit: str) -> dict[str, str]:
    """What a unit sets."""
    lines = (UNITS / unit).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.requires("systemd-analyze")
@pytest.mark.parametrize(("unit", "options"), [(SYSTEM, ()), (USER, ("--user",))])
def test_systemd_has_nothing_to_say_of_them(tmp_path: Path, unit: str, options: tuple[str, ...]) -> None:
    """Every setting is known and has a value that it can have."""

    text = (UNITS / unit).read_text(encoding="utf-8")
    program = shlex.split(settings(unit)["ExecStart"])[0]
    installed = tmp_path / "gpulse-harvest.service"
    installed.write_text(text.replace(program, str(BIN / "gpulse")), encoding="utf-8")

    done = subprocess.run(
        ["systemd-analyze", "verify", *options, str(installed)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize("unit", [SYSTEM, USER])
def test_what_they_start_is_understood(
    tmp_path: Path, unit: str, fake_nvml: FakeNvml, nvml_library: Path
) -> None:
    """The command line is one that gpulse takes; a configuration that is not there ends it for good."""

    places = {"/etc": str(tmp_path), "%E": str(tmp_path), "${STATE_DIRECTORY}": str(tmp_path / "state")}
    words = settings(unit)["ExecStart"]
    for written, meant in places.items():
        words = words.replace(written, meant)

    ended = run(*shlex.split(words)[1:], env=fake_nvml.env(nvml_library))

    assert settings(unit)["RestartPreventExitStatus"] == str(ended.code), ended.err
    assert f"{tmp_path}/gpulse/harvest.toml" in ended.err


@pytest.mark.parametrize("unit", [SYSTEM, USER])
def test_programs_are_ended_by_harvest_alone(unit: str) -> None:
    """The end is told to harvest, which ends each program in its own way; SIGHUP is how it reads its configuration again."""

    found = settings(unit)

    assert ("mixed", "continue") == (found["KillMode"], found["OOMPolicy"])
    assert found["ExecReload"].endswith("kill -HUP $MAINPID")


def test_it_is_not_made_blind() -> None:
    """Hardening that hides devices, processes or terminals would make every GPU look idle."""

    blinding = {
        *("PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"),
        *("ProtectProc", "ProcSubset", "PrivateUsers", "PrivatePIDs", "PrivateIPC"),
    }

    assert set() == blinding & settings(SYSTEM).keys()
