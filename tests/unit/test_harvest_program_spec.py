from __future__ import annotations

import os
import pwd

import pytest

from gpulse.errors import UsageError
from gpulse.harvest.settings import Program
from gpulse.harvest.supervise.launch import ProgramUser, spec_from_json
from gpulse.harvest.supervise.runner import build_spec, io_priority


def test_a_specification_survives_the_connection() -> None:
    """What a supervisor reads is what was written, bytes that are no text included."""

    program = Program(
        "name", ("run", os.fsdecode(b"\xff")), (0,), log="log", nice=3, ionice="idle", cpus=(1, 2)
    )
    spec = build_spec("mark/run", program, {"A": os.fsdecode(b"\xfe\n")}, "/proc")
    somebody = spec._replace(user=ProgramUser("ada", 1, 2, [2, 3]))

    assert "\n" not in spec.to_json()
    for written in (spec, somebody):
        read = spec_from_json(written.to_json())
        assert written == read._replace(command=tuple(read.command), cpus=tuple(read.cpus))


def test_the_configuration_wins_over_the_environment_and_marks_over_both() -> None:
    """A program cannot pass for another run; paths mean what they mean to harvest."""

    program = Program(
        "name",
        ("run",),
        (0,),
        directory="here",
        log="log",
        environment=(("A", "2"), ("GPULSE_HARVEST_RUN", "no")),
    )
    spec = build_spec("mark/run", program, {"A": "1", "B": "1"}, "/proc")

    assert {
        "A": "2",
        "B": "1",
        "GPULSE_HARVEST_RUN": "mark/run",
        "GPULSE_HARVEST_PROGRAM": "name",
    } == spec.environment
    assert (os.path.abspath("here"), os.path.abspath("log")) == (spec.directory, spec.log)


SERVICE = {
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "LISTEN_FDS": "1",
    "LISTEN_PID": "1",
    "WATCHDOG_USEC": "1",
    "WATCHDOG_PID": "1",
}
SECRETS = {
    "TOKEN": "secret",
    "SSH_AUTH_SOCK": "/run/agent",
    "XDG_RUNTIME_DIR": "/run/user/0",
    "DBUS_SESSION_BUS_ADDRESS": "unix:/run/bus",
    "PYTHONPATH": "/root",
}
HARMLESS = {
    "PATH": "/bin",
    "LANG": "C",
    "LC_ALL": "C",
    "LANGUAGE": "en",
    "TZ": "UTC",
    "TERM": "dumb",
    "LD_LIBRARY_PATH": "/cuda",
    "CUDA_HOME": "/cuda",
}
MARKS = {"GPULSE_HARVEST_RUN": "mark/run", "GPULSE_HARVEST_PROGRAM": "name"}


def test_what_the_service_was_given_is_not_for_its_programs() -> None:
    """A program speaks to no service manager in our name, unless the configuration says so."""

    program = Program("name", ("run",), (0,), environment=(("LISTEN_FDS", "2"),))
    spec = build_spec("mark/run", program, {**SERVICE, **SECRETS, **HARMLESS, "HOME": "/root"}, "/proc")

    assert {**SECRETS, **HARMLESS, **MARKS, "HOME": "/root", "LISTEN_FDS": "2"} == spec.environment


def test_another_user_gets_no_secrets() -> None:
    """They get what every program needs, their own home, and what the configuration gives them."""

    other = next(account for account in pwd.getpwall() if account.pw_uid != os.geteuid())
    program = Program("name", ("run",), (0,), user=other.pw_name, environment=(("TOKEN", "theirs"),))
    spec = build_spec("mark/run", program, {**SERVICE, **SECRETS, **HARMLESS, "HOME": "/root"}, "/proc")

    assert {
        **HARMLESS,
        **MARKS,
        "HOME": other.pw_dir,
        "USER": other.pw_name,
        "LOGNAME": other.pw_name,
        "SHELL": other.pw_shell,
        "TOKEN": "theirs",
    } == spec.environment


@pytest.mark.parametrize(
    ("ionice", "value"),
    [
        ("idle", 3 << 13),
        ("best-effort", 2 << 13 | 4),
        ("best-effort:0", 2 << 13),
        ("best-effort:7", 2 << 13 | 7),
    ],
)
def test_ionice_is_the_kernels(ionice: str, value: int) -> None:
    """Class and level in one number."""

    assert value == io_priority(ionice)


@pytest.mark.parametrize(
    "ionice", ["", "realtime", "best-effort:8", "best-effort:x", "best-effort:-1", "idle:x"]
)
def test_no_other_ionice_is_taken(ionice: str) -> None:
    """What the kernel has no word for is refused."""

    with pytest.raises(UsageError, match="is not a valid I/O priority"):
        io_priority(ionice)
