"""Build wheelhouses: the wheels that a node needs to install gpulse offline, for its Python and platform.

If this machine's Python and platform match, the wheels are repacked from what is installed here; otherwise pip
downloads them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform as this_platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpulse._version import __version__
from gpulse.atomic_files import replace_file
from gpulse.errors import GpulseError, UsageError
from gpulse.model.safe_text import quoted

_PIP_SECONDS = 600.0
_PLATFORM_PATTERN = re.compile(r"([a-z]+)3(\d\d) ([A-Za-z0-9_]+) (musl|glibc2\.(\d{1,3})|glibc)", re.ASCII)
_OLDEST_GLIBC = 17
_NEWEST_MUSL = 2
_FILE_DATE = (1980, 1, 1, 0, 0, 0)
"""One timestamp for all files, so that wheels are reproducible."""
_EXCLUDED_METADATA = frozenset(
    {"RECORD", "INSTALLER", "REQUESTED", "WHEEL", "direct_url.json", "uv_cache.json"}
)
"""Files in the metadata of an installation that do not belong in a wheel."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_REQUIREMENT = re.compile(rf"({_NAME.pattern})\s*(\[[^\]]*\])?")
_PROJECT = "gpulse"


class Platform(NamedTuple):
    """Python version and platform that a wheel must match."""

    minor: int
    """The minor version of Python 3."""
    machine: str
    glibc: int | None
    """The minor version of glibc 2; None for musl."""

    @property
    def text(self) -> str:
        """The platform as part of a file name."""
        return f"cp3{self.minor}-{self.machine}"


class Wheelhouse(NamedTuple):
    """Wheels packed into one archive."""

    key: str
    """A hash of its content."""
    archive: bytes
    wheels: int


def parse_platform(facts: str) -> Platform:
    """Return the platform that a node reports.

    Raises:
        GpulseError: gpulse cannot run there.
    """
    found = _PLATFORM_PATTERN.fullmatch(facts)
    if found is None or found[1] != "cp":
        raise GpulseError(
            f"gpulse does not support {quoted(facts)}", hint="install CPython 3.11 or later on the node"
        )
    glibc = None if found[4] == "musl" else int(found[5] or _OLDEST_GLIBC)
    return Platform(int(found[2]), found[3], glibc)


def own_platform() -> Platform:
    """Return the platform of this Python."""
    is_musl = "musl" in str(sysconfig.get_config_var("SOABI") or "")
    minor = this_platform.libc_ver()[1].rpartition(".")[2]
    glibc = None if is_musl else int(minor) if minor.isdecimal() else _OLDEST_GLIBC
    return Platform(sys.version_info.minor, this_platform.machine(), glibc)


def make_wheelhouse(directory: Path, platform: Platform, programs: ProgramRunner) -> None:
    """Write wheels to a directory: repacked from what is installed here if it matches, else downloaded by pip.

    Args:
        directory: The directory.
        platform: The platform of the wheels.
        programs: Runs pip.

    Raises:
        GpulseError: Some wheels are not available, or cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        own = Path(place)
        wheels = _make_own_wheels(own, platform) if _matches_own_platform(platform) else None
        try:
            if wheels is None:
                _download(directory, platform, programs)
            for wheel in wheels or ():
                shutil.copyfile(wheel, directory / wheel.name)
        except OSError as error:
            raise GpulseError(
                f"cannot write {directory}: {error.strerror}", hint="check whether the disk is full"
            ) from error


def _matches_own_platform(platform: Platform) -> bool:
    own = own_platform()
    return platform[:2] == own[:2] and (platform.glibc is None) == (own.glibc is None)


def _make_own_wheels(directory: Path, platform: Platform) -> list[Path] | None:
    """Repack what is installed here; return None if not all wheels match the platform."""
    try:
        wheels = make_wheels(directory)
    except NotRepackableError:
        return None
    return wheels if all(_fits_platform(wheel.name, platform) for wheel in wheels) else None


def _fits_platform(name: str, platform: Platform) -> bool:
    """Return whether a wheel of this machine works on a platform with an older glibc."""
    if platform.glibc is None or platform == own_platform() or name.endswith("-any.whl"):
        return True
    needed = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", name)]
    needed += [_OLDEST_GLIBC] * ("manylinux2014" in name)
    return bool(needed) and min(needed) <= platform.glibc


def pack_wheelhouse(directory: Path) -> Wheelhouse:
    """Pack the wheels of a directory into one archive.

    Raises:
        UsageError: The wheel of gpulse or of pip is missing.
    """
    wheels = sorted(directory.glob("*.whl"))
    names = [path.name for path in wheels]
    for needed in (f"gpulse-{__version__}-", "pip-"):
        if not any(name.startswith(needed) for name in names):
            raise UsageError(
                f"{directory} has no wheel for {needed.rstrip('-').replace('-', ' ')}",
                hint=f"download the wheel with: gpulse deploy wheelhouse {directory}",
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


def make_packed_wheelhouse(platform: Platform, programs: ProgramRunner) -> Wheelhouse:
    """Build the packed wheelhouse for a platform, without leaving files here.

    Raises:
        GpulseError: Some wheels are not available.
    """
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        make_wheelhouse(Path(place), platform, programs)
        return pack_wheelhouse(Path(place))


def _download(directory: Path, platform: Platform, programs: ProgramRunner) -> None:
    """Download the wheels with pip, from the package index that this user's pip is configured with."""
    with tempfile.TemporaryDirectory(prefix="gpulse-wheels-") as place:
        own = Path(place)
        ours = make_own_wheel(own)
        try:
            make_pip_wheel(directory)
        except NotRepackableError:
            _run_pip_download(programs, directory, own, platform, "pip")
        _run_pip_download(programs, directory, own, platform, f"gpulse=={__version__}")
        shutil.copyfile(ours, directory / ours.name)  # pip keeps an older one of the same name


def _run_pip_download(
    programs: ProgramRunner, directory: Path, own: Path, platform: Platform, what: str
) -> None:
    """Download a package with all its dependencies.

    Raises:
        GpulseError: There is no pip, or it did not find all packages.
    """
    bundled = find_bundled_pip()
    pip = ["-m", "pip"] if find_spec("pip") is not None else [f"{bundled}/pip"] if bundled else None
    if pip is None:
        raise GpulseError(
            "cannot download wheels: pip is not installed on this machine",
            hint="install pip with python3 -m ensurepip, or give a directory of wheels with --wheelhouse DIR",
        )
    words = [sys.executable, *pip, "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    words += ["--only-binary=:all:", "--implementation=cp", f"--python-version=3.{platform.minor}"]
    words += [f"--platform={name}" for name in _platform_tags(platform)]
    words += [f"--find-links={own}", f"--dest={directory}", what]
    try:
        code, errors = programs.run(words, seconds=_PIP_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpulseError(
            f"pip cannot download wheels: {error}", hint="give a directory of wheels with --wheelhouse DIR"
        ) from error
    if code:
        reasons = [line for line in errors.splitlines() if line.startswith("ERROR")]
        reason = (reasons or ["ERROR: no error message"])[-1].removeprefix("ERROR: ")
        raise GpulseError(
            f"pip cannot download wheels for {platform.text}: {reason[:300]}",
            hint="run `gpulse deploy wheelhouse DIR` on a machine with internet access, then copy DIR to this machine and give --wheelhouse DIR",
        )


def _platform_tags(platform: Platform) -> Iterator[str]:
    if platform.glibc is None:
        yield from (f"musllinux_1_{minor}_{platform.machine}" for minor in range(_NEWEST_MUSL, -1, -1))
        return
    for minor in range(platform.glibc, 4, -1):
        yield f"manylinux_2_{minor}_{platform.machine}"
        if minor == _OLDEST_GLIBC:
            yield f"manylinux2014_{platform.machine}"
    yield f"linux_{platform.machine}"


class NotRepackableError(Exception):
    """No wheel can be made from a distribution: some of its files are unknown or missing."""


def make_wheels(directory: Path) -> list[Path]:
    """Make wheels of gpulse, its dependencies and pip in a directory.

    Raises:
        GpulseError: gpulse is not installed, but only on the import path.
        NotRepackableError: No wheel can be made from a dependency.
    """
    wheels = [make_own_wheel(directory)]
    wheels += [repack_distribution(distribution, directory) for distribution in _dependencies()]
    return [*wheels, make_pip_wheel(directory)]


def make_own_wheel(directory: Path) -> Path:
    """Make a wheel of gpulse as it is installed here, including editable installs (`pip install -e`).

    Raises:
        GpulseError: gpulse is not installed, but only on the import path.
    """
    try:
        distribution = metadata.distribution(_PROJECT)
    except metadata.PackageNotFoundError as error:
        raise GpulseError(
            "cannot copy gpulse to the nodes: gpulse is not installed as a package on this machine",
            hint="install gpulse with pip, or give a directory of wheels with --wheelhouse",
        ) from error
    home = Path(__file__).parents[1]
    code = ((f"{_PROJECT}/{path.relative_to(home).as_posix()}", path) for path in _files_under(home))
    return _write_wheel(directory, distribution, "py3-none-any", [*code, *_metadata_of(distribution)])


def repack_distribution(distribution: metadata.Distribution, directory: Path) -> Path:
    """Make a wheel from an installed distribution.

    Raises:
        NotRepackableError: It was not installed from a wheel.
    """
    name = distribution.metadata["Name"]
    tags = re.findall(r"^Tag: *(\S+)-(\S+)-(\S+) *$", distribution.read_text("WHEEL") or "", re.MULTILINE)
    if not tags or distribution.files is None or _is_editable(distribution):
        raise NotRepackableError(name)
    tag = "-".join(".".join(sorted({words[place] for words in tags})) for place in range(3))
    code = [
        (file.as_posix(), Path(str(distribution.locate_file(file))))
        for file in distribution.files
        if ".." not in file.parts
        and "__pycache__" not in file.parts
        and not file.parts[0].endswith(".dist-info")
    ]
    if not all(path.is_file() for _, path in code):
        raise NotRepackableError(name)
    return _write_wheel(directory, distribution, tag, [*code, *_metadata_of(distribution)])


def make_pip_wheel(directory: Path) -> Path:
    """Make a wheel of pip, which nodes run without installing it.

    Raises:
        NotRepackableError: There is no pip here.
    """
    try:
        return repack_distribution(metadata.distribution("pip"), directory)
    except (metadata.PackageNotFoundError, NotRepackableError):
        bundled = find_bundled_pip()
        if bundled is None:
            raise NotRepackableError("pip") from None
        path = directory / bundled.name
        replace_file(path, bundled.read_bytes())
        return path


def find_bundled_pip() -> Path | None:
    """Return the pip wheel that Python bundles; None if the Linux distribution removed it."""
    try:
        import ensurepip  # noqa: PLC0415  Debian has it in a separate package
    except ImportError:
        return None
    return next(iter(sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))), None)


def _dependencies() -> Iterator[metadata.Distribution]:
    """Yield the installed dependencies of gpulse, without its own extras."""
    waiting: list[tuple[str, frozenset[str]]] = [(_PROJECT, frozenset())]
    seen, given = set(waiting), {_PROJECT}
    while waiting:
        name, extras = waiting.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed only by other Python versions
            continue
        if name not in given:
            given.add(name)
            yield distribution
        for wanted in _requirements(distribution, extras):
            if wanted not in seen:
                seen.add(wanted)
                waiting.append(wanted)


def _requirements(
    distribution: metadata.Distribution, extras: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the names that a distribution requires with these extras, each with its own extras."""
    for requirement in distribution.requires or ():
        text, _, marker = requirement.partition(";")
        if "extra" in marker and not extras & {
            _normalize_name(name) for name in re.findall(r"""['"]([^'"]+)['"]""", marker)
        }:
            continue
        if (found := _REQUIREMENT.match(text.strip())) is not None:
            yield (
                _normalize_name(found[1]),
                frozenset(_normalize_name(extra) for extra in _NAME.findall(found[2] or "")),
            )


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_editable(distribution: metadata.Distribution) -> bool:
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return True
    return bool(origin.get("dir_info", {}).get("editable"))


def _files_under(home: Path) -> Iterator[Path]:
    for directory, directories, names in os.walk(home):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        yield from (Path(directory, name) for name in sorted(names) if not name.endswith(".pyc"))


def _metadata_of(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    base = f"{_wheel_stem(distribution)}.dist-info"
    for file in distribution.files or ():
        if file.parts[0].endswith(".dist-info") and file.name not in _EXCLUDED_METADATA:
            yield "/".join((base, *file.parts[1:])), Path(str(distribution.locate_file(file)))


def _wheel_stem(distribution: metadata.Distribution) -> str:
    name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"]).lower()
    return f"{name}-{distribution.version.replace('-', '_')}"


def _write_wheel(
    directory: Path, distribution: metadata.Distribution, tag: str, files: Iterable[tuple[str, Path]]
) -> Path:
    stem = _wheel_stem(distribution)
    path = directory / f"{stem}-{tag}.whl"
    python, abi, platform = (part.split(".") for part in tag.split("-"))
    lines = ["Wheel-Version: 1.0", "Generator: gpulse", f"Root-Is-Purelib: {str('any' in platform).lower()}"]
    lines += [f"Tag: {first}-{second}-{third}" for first in python for second in abi for third in platform]
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:

        def add(name: str, data: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f'"{name}",sha256={digest},{len(data)}')
            entry = zipfile.ZipInfo(name, _FILE_DATE)
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)

        for name, file in sorted(files):
            add(name, file.read_bytes())
        add(f"{stem}.dist-info/WHEEL", "\n".join([*lines, ""]).encode())
        entry = zipfile.ZipInfo(f"{stem}.dist-info/RECORD", _FILE_DATE)
        entry.external_attr = 0o100644 << 16
        wheel.writestr(entry, "\n".join([*record, f"{stem}.dist-info/RECORD,,", ""]))
    return path


class ProgramRunner:
    """Runs programs such as pip, each in its own process group, until closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False

    def run(self, words: Sequence[str], *, seconds: float) -> tuple[int, str]:
        """Run a program to its end; return its exit code and error output.

        Raises:
            OSError: The program cannot be started, or the runner is closed.
            subprocess.TimeoutExpired: The program took too long and was killed.
        """
        with self._lock:
            if self._is_closed:
                raise InterruptedError("interrupted")
            process = subprocess.Popen(  # noqa: S603  our own Python
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            _, errors = process.communicate(timeout=seconds)
        finally:
            with self._lock:
                self._running.discard(process)
                _kill(process)
            process.wait()
        return process.returncode, errors

    def close(self) -> None:
        """Kill all programs and their children, and start no others."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
