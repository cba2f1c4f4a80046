"""Machines to deploy to, all of them this one: each an sshd of its own, with its own host name, home and port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.integration.cluster import free_port, until
from tests.prerequisites import find, require

SSHD = find("sshd")


def require_sshd() -> None:
    """Skip the test that runs where no node can be reached over ssh."""
    require("OpenSSH", "util-linux")
    if not _can_rename():
        pytest.skip("needs root, to give processes a host name of their own")


@cache
def _can_rename() -> bool:
    words = ["unshare", "--uts", "hostname", "probe"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


BIN = Path(sys.executable).parent
PLAIN_PATH = f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"


def make_key(path: Path) -> Path:
    """A key without a passphrase; the other half is beside it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


class SshNode:
    """One machine that can be reached over ssh."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        key: Path,
        home: Path | None = None,
        path: str = f"{BIN}:{PLAIN_PATH}",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.port = free_port()
        self.home = home or directory / f"home {name}"
        self.home.mkdir(parents=True, exist_ok=True)
        place = directory / f"sshd-{name}"
        place.mkdir()
        Path("/run/sshd").mkdir(exist_ok=True)
        host_key = make_key(place / "host_key")
        self.public_key = " ".join(host_key.with_suffix(".pub").read_text().split()[:2])
        environment = {"HOME": str(self.home), "PATH": path, **(env or {})}
        told = " ".join(f'"{key}={value}"' for key, value in environment.items())
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {host_key}",
            f"PidFile {place / 'pid'}",
            f"AuthorizedKeysFile {key.with_suffix('.pub')}",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "MaxStartups 100",
            f"SetEnv {told}",
            *options,
        ]
        config = place / "config"
        config.write_text("\n".join([*lines, ""]))
        self.log = place / "log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [
                    *prefix,
                    *("unshare", "--uts", "sh", "-c", 'hostname "$1" && exec "$2" -D -e -f "$3"', "sh"),
                    *(name, str(SSHD), config),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(lambda: b"Server listening" in self.log.read_bytes(), f"{name} listens")

    @property
    def known_host(self) -> str:
        """Its line in a file of known hosts."""
        return f"[127.0.0.1]:{self.port} {self.public_key}\n"

    @property
    def state(self) -> Path:
        """Where deploy keeps its state."""
        return self.home / ".local" / "state" / "gpulse" / self.name / "deploy"

    @property
    def pid(self) -> int:
        """The agent that deploy started."""
        return int((self.state / "pid").read_text().split()[0])

    def close(self) -> None:
        """End the machine, and an agent that is left on it."""
        with suppress(OSError, ValueError):
            os.kill(self.pid, signal.SIGKILL)
        self.popen.terminate()
        self.popen.wait(60.0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; those that ended and that nobody has waited for do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False
