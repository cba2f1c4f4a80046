"""Lists of nodes: one ssh destination a line, or TOML with more about each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpulse.errors import UsageError
from gpulse.model.session import LONGEST_LABEL, MOST_LABELS

MOST_NODES = 100_000
_MOST_BYTES = 16 << 20
_LONGEST = 253
_LONGEST_PATH = 4096
_MOST_SHOWN = 60
_COMMENT = re.compile(r"(?:^|\s)#.*")
_SCHEME = re.compile(r"ssh://", re.IGNORECASE)
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?", re.DOTALL)
_TOML_LINE = re.compile(r"\[\[?[A-Za-z_][\w.\"' -]*\]\]?\s*(?:#.*)?|[A-Za-z_]\w*\s*=.*", re.ASCII | re.DOTALL)
_TEXTS = ("host", "user", "name", "python", "venv", "gpulse", "head")
_PATHS = ("python", "venv", "gpulse")
_KEYS = (*_TEXTS, "port", "labels")
_DEFAULTS = tuple(key for key in _KEYS if key not in ("host", "name"))
_EXAMPLE = 'nodes = ["gpu01", {host = "gpu02", user = "ada", labels = {rack = "a1"}}]'


class NodeSpec(NamedTuple):
    """One machine to reach over ssh, and what is to run there."""

    host: str
    """Without user and port; may be an alias of the ssh configuration."""
    user: str | None = None
    port: int | None = None
    name: str | None = None
    """What the node is to be called; it calls itself by its host name when None."""
    python: str | None = None
    venv: str | None = None
    gpulse: str | None = None
    """The program itself."""
    head: str | None = None
    """The head of this node, if not that of all."""
    labels: Mapping[str, str] = {}
    place: str = ""
    """Where in the list it is."""
    wrong: str | None = None
    """Why it cannot be meant, None when it can; the host is then what the list says, whatever that is."""

    @property
    def destination(self) -> str:
        """As people write it, and as it is called until it has told its own name."""
        host = f"[{self.host}]" if self.port is not None and ":" in self.host else self.host
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{host}" if self.port is None else f"{user}{host}:{self.port}"

    @property
    def reached(self) -> str:
        """Where it is reached, without the user: several machines may be behind one address."""
        return self._replace(user=None).destination

    @property
    def title(self) -> str:
        """What tables call it: its name, or its destination."""
        return self.name or self.destination


class _WrongError(Exception):
    """What is wrong with one node."""


def read_nodes(path: Path | str) -> list[NodeSpec]:
    """The nodes of a list, in its order.

    A node that cannot be meant is there too, and says why.

    Raises:
        UsageError: It cannot be read, or there is no node in it.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="a file with one ssh destination a line"
        ) from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than 16 MiB", hint="is it a list of nodes?")
    return parse_nodes(data, str(path))


def parse_nodes(data: bytes, path: str) -> list[NodeSpec]:
    """The nodes of a list that was read.

    Args:
        data: Its bytes.
        path: What it is called; `.toml` means TOML, and so does what looks like it.

    Raises:
        UsageError: As `read_nodes`.
    """
    text = _decoded(data, path)
    found = _of_toml(text, path) if path.endswith(".toml") or _looks_like_toml(text) else _of_lines(text)
    nodes: list[NodeSpec] = []
    seen: dict[str, str] = {}
    for place, made in found:
        nodes.append(_unlike(seen, made._replace(place=place)))
    if not nodes:
        raise UsageError(
            f"there is no node in {path}", hint="write one ssh destination a line, such as ada@gpu01"
        )
    if len(nodes) > MOST_NODES:
        raise UsageError(f"{len(nodes):,} nodes are too many", hint=f"{MOST_NODES:,} are the most")
    return nodes


def _unlike(seen: dict[str, str], node: NodeSpec) -> NodeSpec:
    """A node, which is wrong when the list has one before it that tables would call the same."""
    if node.wrong is not None:
        return node
    names = dict.fromkeys(
        [node._replace(host=node.host.lower()).destination, *([node.name] if node.name else [])]
    )
    for name in names:
        if name in seen:
            return node._replace(name=None, wrong=f"{name!a} is there already, at {seen[name]}")
    seen |= dict.fromkeys(names, node.place)
    return node


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path} cannot be used: line {line} is not UTF-8 text", hint="save it as UTF-8"
        ) from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, without comments, with their numbers."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        said = _COMMENT.sub("", line).strip(" \t")
        if said:
            yield number, said


def _looks_like_toml(text: str) -> bool:
    first = next((said for _, said in _lines(text)), "")
    return _TOML_LINE.fullmatch(first) is not None


def _of_lines(text: str) -> Iterator[tuple[str, NodeSpec]]:
    for number, said in _lines(text):
        yield f"line {number}", _or_wrong(said)


def _or_wrong(entry: object) -> NodeSpec:
    try:
        if isinstance(entry, str):
            return _destination(entry)
        if isinstance(entry, dict):
            return _of_table(entry)
        raise _WrongError("neither a text nor a table")
    except _WrongError as wrong:
        host = entry.get("host", "") if isinstance(entry, dict) else entry
        return NodeSpec(str(host)[:_MOST_SHOWN] or "-", wrong=str(wrong))


def _destination(text: str) -> NodeSpec:
    rest, is_uri = text, False
    if scheme := _SCHEME.match(text):
        rest, is_uri = text[scheme.end() :].removesuffix("/"), True
    user, at, place = rest.rpartition("@")
    host, port = _host_and_port(place, is_uri=is_uri)
    return NodeSpec(
        _checked("host", host), _checked("user", user) if at else None, None if port is None else _port(port)
    )


def _host_and_port(place: str, *, is_uri: bool) -> tuple[str, str | None]:
    if bracketed := _BRACKETED.fullmatch(place):
        return bracketed[1], bracketed[2]
    host, colon, port = place.rpartition(":")
    if colon and ":" not in host and (is_uri or port.isdecimal()):
        return host, port
    return place, None


def _port(given: object) -> int:
    text = str(given)
    if isinstance(given, bool) or not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) <= 65535:
        raise _WrongError(f"{text[:60]!a} is no port")
    return int(text)


def _checked(key: str, text: object) -> str:
    """A text that ssh, a head and a terminal can take as what it is, whatever shells make of it."""
    longest = _LONGEST_PATH if key in _PATHS else _LONGEST
    if not isinstance(text, str):
        raise _WrongError(f"{key} must be a text, not {str(text)[:60]!a}")
    if not text.strip():
        raise _WrongError(f"the {key} is empty")
    if text.startswith("-"):
        raise _WrongError(f"{text[:60]!a} begins like an option")
    if len(text) > longest:
        raise _WrongError(f"{text[:60]!a}... has {len(text):,} characters, {longest} are the most")
    if not text.isprintable():
        raise _WrongError(f"{text[:60]!a} has characters that cannot be printed")
    if key in _PATHS and not text.startswith(("/", "~/")):
        raise _WrongError(f"{key} must be a whole path, not {text[:60]!a}")
    return text


def _of_toml(text: str, path: str) -> Iterator[tuple[str, NodeSpec]]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} cannot be used: {str(error)[:200]}", hint=_EXAMPLE) from error
    defaults, entries = document.pop("defaults", {}), document.pop("nodes", [])
    if document or not isinstance(defaults, dict) or not isinstance(entries, list):
        what = f"{next(iter(document))[:60]!a} is not known" if document else "it has another shape"
        raise UsageError(f"{path} cannot be used: {what}; it holds `defaults` and `nodes`", hint=_EXAMPLE)
    try:
        common = _table_of(defaults, _DEFAULTS)
    except _WrongError as wrong:
        raise UsageError(f"{path} cannot be used: defaults: {wrong}", hint=_EXAMPLE) from wrong
    for number, entry in enumerate(entries, 1):
        made = _or_wrong(entry)
        yield f"node {number}", _completed(made, common) if made.wrong is None else made


def _completed(node: NodeSpec, common: dict[str, Any]) -> NodeSpec:
    """With the defaults for what it does not say itself; its own labels come on top of theirs."""
    programs = {"python", "venv", "gpulse"}
    has_program = any(getattr(node, key) is not None for key in programs)
    wanted = {
        key: value
        for key, value in common.items()
        if key != "labels" and getattr(node, key) is None and not (has_program and key in programs)
    }
    return node._replace(**wanted, labels={**common.get("labels", {}), **node.labels})


def _of_table(entry: dict[str, Any]) -> NodeSpec:
    told = _table_of(entry, _KEYS)
    if "host" not in told:
        raise _WrongError("it has no host")
    base = _destination(told.pop("host"))
    for key in ("user", "port"):
        if key in told and getattr(base, key) is not None:
            raise _WrongError(f"the {key} is said twice")
    return base._replace(**told)


def _table_of(entry: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """What a table says, checked."""
    told: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in keys:
            raise _WrongError(f"{key[:60]!a} is not known; there are: {', '.join(keys)}")
        if key == "labels":
            told[key] = _labels(value)
        else:
            told[key] = _port(value) if key == "port" else _checked(key, value)
    return told


def _labels(given: object) -> dict[str, str]:
    if not isinstance(given, dict) or len(given) > MOST_LABELS:
        raise _WrongError(f"labels must be a table of at most {MOST_LABELS} texts")
    for key, value in given.items():
        text = f"{key}{value}"
        if not isinstance(value, str) or not key or "=" in key or not text.isprintable():
            raise _WrongError(f"{str(key)[:60]!a} is no label; labels are texts that can be printed")
        if max(len(key), len(value)) > LONGEST_LABEL:
            raise _WrongError(f"{key[:60]!a} is no label: {LONGEST_LABEL} characters are the most")
    return dict(given)
