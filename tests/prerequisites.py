"""Programs that some tests need and that pip cannot install: how to find them, and which Debian packages have them.

`make test` installs what is missing with `python3 tests/prerequisites.py install test`, where it may. The
tests themselves call `require`, and are skipped where a program is missing. This needs nothing but the standard library:
it runs before there is a virtual environment.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Servers are in directories that are not in an ordinary user's PATH."""
_MARK = "missing here: "
_MAX_PROBE_SECONDS = 60


class Tool(NamedTuple):
    """One program, or one set of programs that belong together."""

    is_installed: Callable[[], bool]
    packages: tuple[str, ...]
    """Debian packages that have it."""


def find(*names: str) -> str | None:
    """Return the path of the first of these programs that is installed."""
    return next((path for name in names if (path := shutil.which(name, path=_PATH))), None)


def _all(*names: str) -> Callable[[], bool]:
    return lambda: all(find(name) for name in names)


def _runs(*command: str) -> bool:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MAX_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _compiles() -> bool:
    """Whether there is a C compiler with the C library's headers, which Debian packages apart."""
    return _runs("cc", "-fsyntax-only", "-include", "stdio.h", "-x", "c", os.devnull)


def find_faketime() -> str | None:
    """Return the path of libfaketime for programs with threads."""
    places = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
    return next((found for place in places for found in glob.glob(place)), None)


def find_postgres() -> str | None:
    """Return the directory of PostgreSQL's programs, the newest where there are several."""
    found = find("initdb")
    if found is not None and find("postgres") is not None:
        return os.path.dirname(os.path.realpath(found))
    places = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda path: (len(path), path))
    return os.path.dirname(places[-1]) if places else None


def _has_machine_id() -> bool:
    """Whether the machine has an id of its own, which systemd makes when it is installed."""
    return any(
        os.path.exists(path) and os.path.getsize(path)
        for path in ("/etc/machine-id", "/var/lib/dbus/machine-id")
    )


TOOLS = {
    "C compiler": Tool(_compiles, ("gcc", "libc6-dev")),
    "Chromium": Tool(
        lambda: find("chromium", "chromium-browser", "google-chrome") is not None, ("chromium",)
    ),
    "OpenSSH": Tool(_all("ssh", "ssh-keygen", "sshd"), ("openssh-client", "openssh-server")),
    "PostgreSQL": Tool(lambda: find_postgres() is not None, ("postgresql", "util-linux")),
    "Prometheus": Tool(_all("prometheus", "promtool"), ("prometheus",)),
    "VictoriaMetrics": Tool(_all("victoria-metrics"), ("victoria-metrics",)),
    "Slurm": Tool(_all("slurmctld", "slurmd", "sbatch", "munged"), ("slurm-wlm", "slurm-client", "munge")),
    "systemd-analyze": Tool(_all("systemd-analyze"), ("systemd",)),
    "machine id": Tool(_has_machine_id, ("systemd",)),
    "openssl": Tool(_all("openssl"), ("openssl",)),
    "curl": Tool(_all("curl"), ("curl",)),
    "ip and nft": Tool(_all("ip", "nft"), ("iproute2", "nftables")),
    "libfaketime": Tool(lambda: find_faketime() is not None, ("libfaketime",)),
    "busybox": Tool(_all("busybox"), ("busybox",)),
    "man": Tool(_all("man"), ("man-db",)),
    "mksh": Tool(_all("mksh"), ("mksh",)),
    "User-mode Linux": Tool(_all("linux.uml"), ("user-mode-linux",)),
    "util-linux": Tool(_all("runuser", "setpriv", "setsid", "unshare"), ("util-linux",)),
}
"""Every program that tests may `require`, by the name under which they do."""

GROUPS = {
    "venv": {
        "venv and ensurepip": Tool(
            lambda: _runs(sys.executable, "-c", "import ensurepip, venv"), ("python3-venv",)
        )
    },
    "node": {"Node.js and npm": Tool(_all("node", "npm"), ("nodejs", "npm"))},
    "test": TOOLS,
    "walk": {"mmdebstrap": Tool(_all("mmdebstrap"), ("mmdebstrap",))},
}
"""Tools that are installed together: for the virtual environment, the checks of JavaScript, the tests, the walk through the documentation."""
_CONSEQUENCES = {
    "venv": f"{sys.executable} cannot make a virtual environment without these modules.",
    "node": "The dashboard's JavaScript cannot be checked without them.",
    "test": "The tests that need them are skipped, and listed at the end.",
    "walk": "The documentation cannot be tried out without it.",
}


@cache
def is_installed(name: str) -> bool:
    """Whether this machine has one of the TOOLS."""
    return TOOLS[name].is_installed()


def require(*names: str) -> None:
    """Skip the test that runs when this machine does not have these TOOLS."""
    missing = [name for name in names if not is_installed(name)]
    if missing:
        import pytest  # noqa: PLC0415  there may be no virtual environment yet

        pytest.skip(_MARK + ", ".join(missing))


def summary(reasons: Iterable[str]) -> list[str]:
    """Return lines that say which tools the skipped tests lack, and how to get them; none without skipped tests.

    Args:
        reasons: Why tests were skipped, one reason for each of them.
    """
    counts = Counter(reasons)
    if not counts:
        return []
    lines = []
    lacking: dict[str, None] = {}
    for reason, count in counts.most_common():
        names = reason.removeprefix(_MARK).split(", ") if reason.startswith(_MARK) else []
        lacking |= dict.fromkeys(name for name in names if name in TOOLS)
        lines.append(f"{count:5} skipped, {reason}")
    if lacking:
        packages = packages_of([TOOLS[name] for name in lacking])
        lines.append(f"To run those with something missing: {shlex.join(install_command(packages))}")
    return lines


def packages_of(tools: Iterable[Tool]) -> list[str]:
    """Return the Debian packages of these tools, each once."""
    return list(dict.fromkeys(package for tool in tools for package in tool.packages))


def install_command(packages: Sequence[str]) -> list[str]:
    """Return the command that installs packages, as a person would type it."""
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    return [*sudo, "apt-get", "install", "--no-install-recommends", *packages]


def _may_install() -> bool:
    """Whether packages can be installed without asking anybody for a password."""
    if find("apt-get") is None:
        return False
    return os.geteuid() == 0 or (find("sudo") is not None and _runs("sudo", "-n", "true"))


def _apt_get(*words: str) -> bool:
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    command = [*sudo, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0


def install(group: str) -> int:
    """Install what is missing of a group, where that is allowed; return the exit code.

    What is missing is an error where nothing works without it, and everywhere when CI is set: nothing is skipped there.
    """
    missing = _missing(group)
    if missing and _may_install():
        packages = packages_of(missing.values())
        print(f"Installing: {' '.join(packages)}", flush=True)
        if _apt_get("update"):
            _apt_get("install", "--yes", "--no-install-recommends", *packages)
        missing = _missing(group)
    if not missing:
        return 0
    is_error = group != "test" or bool(os.environ.get("CI"))
    print(
        f"Not installed: {', '.join(missing)}. {_CONSEQUENCES[group]}\n"
        f"To install on Debian and Ubuntu: {shlex.join(install_command(packages_of(missing.values())))}",
        file=sys.stderr,
        flush=True,
    )
    return 1 if is_error else 0


def _missing(group: str) -> dict[str, Tool]:
    return {name: tool for name, tool in GROUPS[group].items() if not tool.is_installed()}


def main(words: Sequence[str]) -> int:
    """Install what is missing of a group, or list what there is."""
    match list(words):
        case ["install", group] if group in GROUPS:
            return install(group)
        case ["list"]:
            for group, tools in GROUPS.items():
                for name, tool in tools.items():
                    state = "installed" if tool.is_installed() else "missing"
                    print(f"{group:5} {name:16} {state:10} {' '.join(tool.packages)}")
            return 0
    print(f"usage: {sys.argv[0]} list | install {'|'.join(GROUPS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
