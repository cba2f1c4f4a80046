"""Directories of wheels that a node can install gpulse from without a network, for its Python and its kind of machine."""

from __future__ import annotations

import hashlib
import io
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpulse._version import __version__
from gpulse.deploy.helpers import Helpers
from gpulse.deploy.wheels import NotRepackableError, bundled_pip, make_own_wheel, make_wheels, pip_wheel
from gpulse.errors import GpulseError, UsageError

_PIP_SECONDS = 600.0
_FACTS = re.compile(r"([a-z]+)3(\d\d) ([A-Za-z0-9_]+) (musl|glibc2\.(\d{1,3})|glibc)", re.ASCII)
_OLDEST_GLIBC = 17
_NEWEST_MUSL = 2


class Kind(NamedTuple):
    """What a wheel has to fit."""

    minor: int
    """Of Python 3."""
    machine: str
    glibc: int | None
    """The minor version of glibc 2; None for musl."""

    @property
    def text(self) -> str:
        """As part of a name."""
        return f"cp3{self.minor}-{self.machine}"


class Wheelhouse(NamedTuple):
    """Wheels, ready to be sent."""

    key: str
    """Names its content."""
    archive: bytes
    wheels: int


def kind_of(facts: str) -> Kind:
    """What a node said about its Python.

    Raises:
        GpulseError: gpulse cannot run there.
    """
    told = _FACTS.fullmatch(facts)
    if told is None or told[1] != "cp":
        raise GpulseError(
            f"gpulse is not made for {facts[:60]!a}", hint="install CPython 3.11 or later there"
        )
    glibc = None if told[4] == "musl" else int(told[5] or _OLDEST_GLIBC)
    return Kind(int(told[2]), told[3], glibc)


def own_kind() -> Kind:
    """What this very Python is."""
    is_musl = "musl" in str(sysconfig.get_config_var("SOABI") or "")
    minor = platform.libc_ver()[1].rpartition(".")[2]
    glibc = None if is_musl else int(minor) if minor.isdecimal() else _OLDEST_GLIBC
    return Kind(sys.version_info.minor, platform.machine(), glibc)


def make_wheelhouse(directory: Path, kind: Kind, helpers: Helpers) -> None:
    """Put wheels into a directory: of what is installed here where that fits, else as pip finds them.

    Args:
        directory: Where to.
        kind: What they have to fit.
        helpers: Runs pip.

    Raises:
        GpulseError: They cannot all be had, or not be written.
    """
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        own = Path(place)
        wheels = _own_wheels(own, kind) if _is_like_ours(kind) else None
        try:
            if wheels is None:
                _download(directory, kind, helpers)
            for wheel in wheels or ():
                shutil.copyfile(wheel, directory / wheel.name)
        except OSError as error:
            raise GpulseError(
                f"cannot write {directory}: {error.strerror}", hint="see whether the disk is full"
            ) from error


def _is_like_ours(kind: Kind) -> bool:
    own = own_kind()
    return kind[:2] == own[:2] and (kind.glibc is None) == (own.glibc is None)


def _own_wheels(directory: Path, kind: Kind) -> list[Path] | None:
    """Wheels of what is installed here, None when they do not all fit."""
    try:
        wheels = make_wheels(directory)
    except NotRepackableError:
        return None
    return wheels if all(_fits(wheel.name, kind) for wheel in wheels) else None


def _fits(name: str, kind: Kind) -> bool:
    """Whether a wheel that was made for this machine fits one with an older glibc."""
    if kind.glibc is None or kind == own_kind() or name.endswith("-any.whl"):
        return True
    needed = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", name)]
    needed += [_OLDEST_GLIBC] * ("manylinux2014" in name)
    return bool(needed) and min(needed) <= kind.glibc


def packed(directory: Path) -> Wheelhouse:
    """The wheels of a directory, ready to be sent.

    Raises:
        UsageError: gpulse or pip is not among them.
    """
    wheels = sorted(directory.glob("*.whl"))
    names = [path.name for path in wheels]
    for needed in (f"gpulse-{__version__}-", "pip-"):
        if not any(name.startswith(needed) for name in names):
            raise UsageError(
                f"{directory} holds no wheel of {needed.rstrip('-').replace('-', ' ')}",
                hint=f"gpulse deploy wheelhouse {directory}",
            )
    digest = hashlib.sha256()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in wheels:
            data = path.read_bytes()
            digest.update(f"{path.name} {hashlib.sha256(data).hexdigest()}\n".encode())
            entry = tarfile.TarInfo(path.name)
            entry.size = len(data)
            entry.mode = 0o600
            tar.addfile(entry, io.BytesIO(data))
    return Wheelhouse(digest.hexdigest()[:16], archive.getvalue(), len(wheels))


def pack_for(kind: Kind, helpers: Helpers) -> Wheelhouse:
    """Wheels for a kind of machine, of which nothing stays here.

    Raises:
        GpulseError: They cannot all be had.
    """
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        make_wheelhouse(Path(place), kind, helpers)
        return packed(Path(place))


def _download(directory: Path, kind: Kind, helpers: Helpers) -> None:
    """Let pip choose: from what is installed here, else from where this user's pip gets its packages."""
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        own = Path(place)
        ours = make_own_wheel(own)
        try:
            pip_wheel(directory)
        except NotRepackableError:
            _pip(helpers, directory, own, kind, "pip")
        _pip(helpers, directory, own, kind, f"gpulse=={__version__}")
        shutil.copyfile(ours, directory / ours.name)  # pip keeps an older one of the same name


def _pip(helpers: Helpers, directory: Path, own: Path, kind: Kind, what: str) -> None:
    """Download something with everything that it needs.

    Raises:
        GpulseError: pip is not there, or did not find it all.
    """
    bundled = bundled_pip()
    pip = ["-m", "pip"] if _has_pip() else [f"{bundled}/pip"] if bundled else None
    if pip is None:
        raise GpulseError(
            "there is no pip here to fetch wheels with", hint="python3 -m ensurepip, or --wheelhouse DIR"
        )
    words = [sys.executable, *pip, "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    words += ["--only-binary=:all:", "--implementation=cp", f"--python-version=3.{kind.minor}"]
    words += [f"--platform={name}" for name in _platforms(kind)]
    words += [f"--find-links={own}", f"--dest={directory}", what]
    try:
        code, errors = helpers.run(words, seconds=_PIP_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpulseError(f"pip could not fetch wheels: {error}", hint="--wheelhouse DIR") from error
    if code:
        reasons = [line for line in errors.splitlines() if line.startswith("ERROR")]
        reason = (reasons or ["ERROR: it did not say why"])[-1].removeprefix("ERROR: ")
        raise GpulseError(
            f"pip could not fetch wheels for {kind.text}: {reason[:300]}",
            hint="on a machine with internet: gpulse deploy wheelhouse DIR, then --wheelhouse DIR here",
        )


def _has_pip() -> bool:
    from importlib.util import find_spec  # noqa: PLC0415  pushing to other machines alone needs it

    return find_spec("pip") is not None


def _platforms(kind: Kind) -> Iterator[str]:
    if kind.glibc is None:
        yield from (f"musllinux_1_{minor}_{kind.machine}" for minor in range(_NEWEST_MUSL, -1, -1))
        return
    for minor in range(kind.glibc, 4, -1):
        yield f"manylinux_2_{minor}_{kind.machine}"
        if minor == _OLDEST_GLIBC:
            yield f"manylinux2014_{kind.machine}"
    yield f"linux_{kind.machine}"
