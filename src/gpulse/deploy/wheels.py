"""Wheels of what is installed here, made without a network: gpulse itself, and everything that it needs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from gpulse.errors import GpulseError

_EARLIEST = (1980, 1, 1, 0, 0, 0)
"""One time for all files, so that the same files make the same wheel."""
_OURS = frozenset({"RECORD", "INSTALLER", "REQUESTED", "WHEEL", "direct_url.json", "uv_cache.json"})
"""In the metadata of an installation, and not of a wheel."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_REQUIREMENT = re.compile(rf"({_NAME.pattern})\s*(\[[^\]]*\])?")
_PROJECT = "gpulse"


class NotRepackableError(Exception):
    """A distribution whose files are not all known, or that is not where it seems to be."""


def make_wheels(directory: Path) -> list[Path]:
    """Wheels of gpulse, of all that it needs to run an agent, and of pip.

    Args:
        directory: Where they go.

    Raises:
        GpulseError: gpulse was not installed, but only put into the path.
        NotRepackableError: Something that it needs cannot be made a wheel of.
    """
    wheels = [make_own_wheel(directory)]
    wheels += [repack(distribution, directory) for distribution in _needed()]
    return [*wheels, pip_wheel(directory)]


def make_own_wheel(directory: Path) -> Path:
    """A wheel of gpulse as it is installed here, from its sources too (`pip install -e`).

    Raises:
        GpulseError: gpulse was not installed, but only put into the path.
    """
    try:
        distribution = metadata.distribution(_PROJECT)
    except metadata.PackageNotFoundError as error:
        raise GpulseError(
            "gpulse is not installed here, so that there is nothing to copy",
            hint="pip install it, or give a directory of wheels with --wheelhouse",
        ) from error
    home = Path(__file__).parents[1]
    code = ((f"{_PROJECT}/{path.relative_to(home).as_posix()}", path) for path in _files_under(home))
    return _write(directory, distribution, "py3-none-any", [*code, *_metadata_of(distribution)])


def repack(distribution: metadata.Distribution, directory: Path) -> Path:
    """A wheel of something that is installed here.

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
    return _write(directory, distribution, tag, [*code, *_metadata_of(distribution)])


def pip_wheel(directory: Path) -> Path:
    """A wheel of pip, which a node runs without installing it.

    Raises:
        NotRepackableError: There is none here.
    """
    try:
        return repack(metadata.distribution("pip"), directory)
    except (metadata.PackageNotFoundError, NotRepackableError):
        bundled = bundled_pip()
        if bundled is None:
            raise NotRepackableError("pip") from None
        path = directory / bundled.name
        path.write_bytes(bundled.read_bytes())
        return path


def bundled_pip() -> Path | None:
    """The wheel of pip that Python brings along, None where a distribution took it out."""
    try:
        import ensurepip  # noqa: PLC0415  Debian has it in a package of its own
    except ImportError:
        return None
    return next(iter(sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))), None)


def _needed() -> Iterator[metadata.Distribution]:
    """Everything that gpulse needs, whatever for, that is installed here; its own extras aside."""
    waiting: list[tuple[str, frozenset[str]]] = [(_PROJECT, frozenset())]
    seen, given = set(waiting), {_PROJECT}
    while waiting:
        name, extras = waiting.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # needed by another Python than this one
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
    """What a distribution needs with these extras, and with which extras it needs that."""
    for requirement in distribution.requires or ():
        text, _, marker = requirement.partition(";")
        if "extra" in marker and not extras & {
            _key(name) for name in re.findall(r"""['"]([^'"]+)['"]""", marker)
        }:
            continue
        if (found := _REQUIREMENT.match(text.strip())) is not None:
            yield _key(found[1]), frozenset(_key(extra) for extra in _NAME.findall(found[2] or ""))


def _key(name: str) -> str:
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
    base = f"{_stem(distribution)}.dist-info"
    for file in distribution.files or ():
        if file.parts[0].endswith(".dist-info") and file.name not in _OURS:
            yield "/".join((base, *file.parts[1:])), Path(str(distribution.locate_file(file)))


def _stem(distribution: metadata.Distribution) -> str:
    name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"]).lower()
    return f"{name}-{distribution.version.replace('-', '_')}"


def _write(
    directory: Path, distribution: metadata.Distribution, tag: str, files: Iterable[tuple[str, Path]]
) -> Path:
    stem = _stem(distribution)
    path = directory / f"{stem}-{tag}.whl"
    python, abi, platform = (part.split(".") for part in tag.split("-"))
    lines = ["Wheel-Version: 1.0", "Generator: gpulse", f"Root-Is-Purelib: {str('any' in platform).lower()}"]
    lines += [f"Tag: {first}-{second}-{third}" for first in python for second in abi for third in platform]
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:

        def add(name: str, data: bytes) -> None:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f'"{name}",sha256={digest},{len(data)}')
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)

        for name, file in sorted(files):
            add(name, file.read_bytes())
        add(f"{stem}.dist-info/WHEEL", "\n".join([*lines, ""]).encode())
        entry = zipfile.ZipInfo(f"{stem}.dist-info/RECORD", _EARLIEST)
        entry.external_attr = 0o100644 << 16
        wheel.writestr(entry, "\n".join([*record, f"{stem}.dist-info/RECORD,,", ""]))
    return path
