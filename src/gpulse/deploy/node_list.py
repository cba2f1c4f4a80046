"""Read lists of nodes: one ssh destination per line, or TOML with more fields per node."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpulse.errors import GpulseError, UsageError
from gpulse.model.safe_text import quoted
from gpulse.model.session import MAX_LABEL_CHARS, MAX_LABELS

log = logging.getLogger(__name__)

MAX_NODES = 100_000
_MAX_FILE_BYTES = 16 << 20
_MAX_NAME_CHARACTERS = 253
_MAX_PATH_CHARACTERS = 4096
_MAX_SHOWN_CHARACTERS = 60
_COMMENT = re.compile(r"(?:^|\s)#.*")
_SCHEME = re.compile(r"ssh://", re.IGNORECASE)
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_TOML_LINE = re.compile(r"\[\[?[A-Za-z_][\w.\"' -]*\]\]?\s*(?:#.*)?|[A-Za-z_]\w*\s*=.*", re.ASCII | re.DOTALL)
_TEXTS = ("host", "user", "name", "python", "venv", "gpulse", "head")
_PATHS = ("python", "venv", "gpulse")
_KEYS = (*_TEXTS, "port", "labels")
_DEFAULTS = tuple(key for key in _KEYS if key not in ("host", "name"))
_NEVER_IN_HOST = re.compile(r"""['`"$\\;&<>|(){}*?~!#\s]""")
"""ssh would insert such a host into commands of the user's configuration (ProxyCommand, Match exec)."""
_NEVER_IN_USER = re.compile(r"""['`"$;&<>|(){}*?~!#\s]|\\$""")
"""As for hosts, but a user may have a domain prefix (`LAB\\ada`)."""
_EXAMPLE = 'nodes = ["gpu01", {host = "gpu02", user = "ada", labels = {rack = "a1"}}]'


class NodeError(GpulseError):
    """A node cannot be reached, or a command failed on it."""


class NodeSpec(NamedTuple):
    """One entry of a node list: an ssh destination and settings for its agent."""

    host: str
    """Host without user and port; may be an alias in the ssh configuration."""
    user: str | None = None
    port: int | None = None
    name: str | None = None
    """Name of the node; its host name when None."""
    python: str | None = None
    venv: str | None = None
    gpulse: str | None = None
    """Path of the gpulse program."""
    head: str | None = None
    """Head of this node, if it differs from the others'."""
    labels: Mapping[str, str] = {}
    place: str = ""
    """Position in the list, such as `line 3`."""
    wrong: str | None = None
    """Why the entry is invalid; None if it is valid. The host is then the original text."""

    @property
    def destination(self) -> str:
        """The ssh destination as users write it; shown until the node reports its name."""
        host = f"[{self.host}]" if self.port is not None and ":" in self.host else self.host
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{host}" if self.port is None else f"{user}{host}:{self.port}"

    @property
    def reached(self) -> str:
        """The destination without the user; the port tells apart several machines behind one address."""
        return self._replace(user=None).destination

    @property
    def title(self) -> str:
        """The name shown in tables: its name, or its destination."""
        return self.name or self.destination


class _InvalidEntryError(Exception):
    """An entry of the list is invalid."""


def read_node_list(path: Path | str) -> list[NodeSpec]:
    """Return the nodes of a list in order.

    Invalid entries are included, with the reason in `wrong`.

    Raises:
        UsageError: The list cannot be read, or is empty.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="give a file with one ssh destination per line"
        ) from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than 16 MiB", hint="check that the file is a list of nodes")
    return parse_node_list(data, str(path))


class NodeListFile:
    """Names of the nodes in a list, which is read again when the file changes."""

    def __init__(self, path: Path) -> None:
        """Read the list for the first time.

        Raises:
            GpulseError: The file cannot be read, or is not a list of nodes.
        """
        self._path = path.absolute()
        self._stamp = self._stat()
        self._names = self._read()

    def __call__(self) -> tuple[str, ...]:
        """Return the current names, or the last ones while the file cannot be read."""
        stamp = self._stat()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._names = self._read()
                log.info("the list of expected nodes changed; nodes expected: %d", len(self._names))
            except GpulseError as error:
                log.warning(
                    "cannot update the list of expected nodes, so the previous list stays in use: %s",
                    error.message,
                )
        return self._names

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[str, ...]:
        names = []
        for node in read_node_list(self._path):
            try:
                check_destination(node)
                names.append(node.name or node.reached)
            except NodeError as error:
                log.warning("ignoring %s of %s: %s", node.place, self._path, error.message)
        return tuple(names)


def check_destination(node: NodeSpec) -> None:
    """Refuse an invalid or unsafe destination before any program sees it.

    Raises:
        NodeError: The entry is invalid, or could be interpreted as something other than a name.
    """
    if node.wrong is not None:
        raise NodeError(node.wrong, hint=f"correct {node.place}, or comment it out with #")
    if _NEVER_IN_HOST.search(node.host) or (node.user is not None and _NEVER_IN_USER.search(node.user)):
        raise NodeError(
            "the host or user name contains invalid characters, so ssh was not run",
            hint=f"correct {node.place or 'the name'}",
        )


def parse_node_list(data: bytes, path: str) -> list[NodeSpec]:
    """Parse the content of a node list.

    Args:
        data: Content of the file.
        path: Path of the file; it is TOML if the name ends in `.toml` or the content looks like it.

    Raises:
        UsageError: The list cannot be parsed, or is empty.
    """
    text = _decode_text(data, path)
    found = (
        _parse_toml(text, path) if path.endswith(".toml") or _looks_like_toml(text) else _parse_lines(text)
    )
    nodes: list[NodeSpec] = []
    seen: dict[str, str] = {}
    for place, made in found:
        nodes.append(_check_duplicate(seen, made._replace(place=place)))
    if not nodes:
        raise UsageError(
            f"there are no nodes in {path}", hint="write one ssh destination per line, such as ada@gpu01"
        )
    if len(nodes) > MAX_NODES:
        raise UsageError(
            f"{path} has {len(nodes):,} nodes, which is too many", hint=f"list at most {MAX_NODES:,} nodes"
        )
    return nodes


def _check_duplicate(seen: dict[str, str], node: NodeSpec) -> NodeSpec:
    """Return a node, marked as invalid if an earlier one has the same name or destination."""
    if node.wrong is not None:
        return node
    names = dict.fromkeys(
        [node._replace(host=node.host.lower()).destination, *([node.name] if node.name else [])]
    )
    for name in names:
        if name in seen:
            return node._replace(name=None, wrong=f"{name!a} is already in the list, at {seen[name]}")
    seen |= dict.fromkeys(names, node.place)
    return node


def _decode_text(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"cannot read {path}: line {line} is not UTF-8 text", hint="save the file as UTF-8"
        ) from error


def _content_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines without comments, with their numbers."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        said = _COMMENT.sub("", line).strip(" \t")
        if said:
            yield number, said


def _looks_like_toml(text: str) -> bool:
    first = next((said for _, said in _content_lines(text)), "")
    return _TOML_LINE.fullmatch(first) is not None


def _parse_lines(text: str) -> Iterator[tuple[str, NodeSpec]]:
    for number, said in _content_lines(text):
        yield f"line {number}", _parse_entry(said)


def _parse_entry(entry: object) -> NodeSpec:
    try:
        if isinstance(entry, str):
            return _parse_destination(entry)
        if isinstance(entry, dict):
            return _parse_table(entry)
        raise _InvalidEntryError("the entry must be a string or a table")
    except _InvalidEntryError as wrong:
        host = entry.get("host", "") if isinstance(entry, dict) else entry
        return NodeSpec(str(host)[:_MAX_SHOWN_CHARACTERS] or "-", wrong=str(wrong))


def _parse_destination(text: str) -> NodeSpec:
    rest, is_uri = text, False
    if scheme := _SCHEME.match(text):
        rest, is_uri = text[scheme.end() :].removesuffix("/"), True
    user, at, place = rest.rpartition("@")
    host, port = _split_host_port(place, is_uri=is_uri)
    return NodeSpec(
        _check_text("host", host),
        _check_text("user", user) if at else None,
        None if port is None else _parse_port(port),
    )


def _split_host_port(place: str, *, is_uri: bool) -> tuple[str, str | None]:
    if bracketed := _BRACKETED.fullmatch(place):
        return bracketed[1], bracketed[2]
    host, colon, port = place.rpartition(":")
    if colon and ":" not in host and (is_uri or port.isdecimal()):
        return host, port
    return place, None


def _parse_port(given: object) -> int:
    text = str(given)
    if isinstance(given, bool) or not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) <= 65535:
        raise _InvalidEntryError(f"{quoted(text)} is not a valid port")
    return int(text)


def _check_text(key: str, text: object) -> str:
    """Return a text that is safe for ssh, a head and a terminal."""
    limit = _MAX_PATH_CHARACTERS if key in _PATHS else _MAX_NAME_CHARACTERS
    if not isinstance(text, str):
        raise _InvalidEntryError(f"{key} must be a string, not {quoted(str(text))}")
    if not text.strip():
        raise _InvalidEntryError(f"the {key} is empty")
    if text.startswith("-"):
        raise _InvalidEntryError(f"{quoted(text)} starts with - and would be read as an option")
    if len(text) > limit:
        raise _InvalidEntryError(f"{quoted(text)} has {len(text):,} characters; the maximum is {limit}")
    if not text.isprintable():
        raise _InvalidEntryError(f"{quoted(text)} has unprintable characters")
    if key in _PATHS and not text.startswith(("/", "~/")):
        raise _InvalidEntryError(f"{key} must be an absolute path, not {quoted(text)}")
    return text


def _parse_toml(text: str, path: str) -> Iterator[tuple[str, NodeSpec]]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {str(error)[:200]}", hint=_EXAMPLE) from error
    defaults, entries = document.pop("defaults", {}), document.pop("nodes", [])
    if document or not isinstance(defaults, dict) or not isinstance(entries, list):
        what = f"unknown key {quoted(next(iter(document)))}; " if document else ""
        raise UsageError(
            f"cannot read {path}: {what}the file may contain only a table `defaults` and a list `nodes`",
            hint=_EXAMPLE,
        )
    try:
        common = _check_table(defaults, _DEFAULTS)
    except _InvalidEntryError as wrong:
        raise UsageError(f"cannot read {path}: defaults: {wrong}", hint=_EXAMPLE) from wrong
    for number, entry in enumerate(entries, 1):
        made = _parse_entry(entry)
        yield f"node {number}", _apply_defaults(made, common) if made.wrong is None else made


def _apply_defaults(node: NodeSpec, common: dict[str, Any]) -> NodeSpec:
    """Return a node with the defaults for its missing fields; its own labels override the common ones."""
    programs = {"python", "venv", "gpulse"}
    has_program = any(getattr(node, key) is not None for key in programs)
    wanted = {
        key: value
        for key, value in common.items()
        if key != "labels" and getattr(node, key) is None and not (has_program and key in programs)
    }
    return node._replace(**wanted, labels={**common.get("labels", {}), **node.labels})


def _parse_table(entry: dict[str, Any]) -> NodeSpec:
    fields = _check_table(entry, _KEYS)
    if "host" not in fields:
        raise _InvalidEntryError("host is missing")
    base = _parse_destination(fields.pop("host"))
    for key in ("user", "port"):
        if key in fields and getattr(base, key) is not None:
            raise _InvalidEntryError(f"{key} is given twice")
    return base._replace(**fields)


def _check_table(entry: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a table, validated."""
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in keys:
            raise _InvalidEntryError(f"unknown key {quoted(key)}; the keys are: {', '.join(keys)}")
        if key == "labels":
            fields[key] = _parse_labels(value)
        else:
            fields[key] = _parse_port(value) if key == "port" else _check_text(key, value)
    return fields


def _parse_labels(given: object) -> dict[str, str]:
    if not isinstance(given, dict) or len(given) > MAX_LABELS:
        raise _InvalidEntryError(f"labels must be a table of at most {MAX_LABELS} strings")
    for key, value in given.items():
        text = f"{key}{value}"
        if not isinstance(value, str) or not key or "=" in key or not text.isprintable():
            raise _InvalidEntryError(f"{quoted(str(key))} is not a valid label: labels are printable strings")
        if max(len(key), len(value)) > MAX_LABEL_CHARS:
            raise _InvalidEntryError(
                f"{quoted(key)} is not a valid label: the maximum is {MAX_LABEL_CHARS} characters"
            )
    return dict(given)
