"""Secrets of notification targets: read them from files, keep them out of output, and remove them from messages."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlencode, urlsplit, urlunsplit

from gpulse.errors import UsageError
from gpulse.model.safe_text import quoted

REDACTED = "***"
MAIL_SCHEMAS = frozenset({"mailto", "mailtos"})
"""Kinds of URLs that send mail."""
_MAX_SECRET_BYTES = 16_384
_MIN_REDACTED_CHARACTERS = 3
"""Shorter parts of a URL, such as `yes`, are not secrets; removing them would make messages unreadable."""
_HOST_SCHEMAS = frozenset(
    {
        "mailto",
        "mailtos",
        "json",
        "jsons",
        "xml",
        "xmls",
        "form",
        "forms",
        "gotify",
        "gotifys",
        "http",
        "https",
    }
)
"""Kinds of URLs whose host is the name of a machine; others have a token there, such as `slack://TOKEN/...`."""
_PUBLIC_PARAMETERS = frozenset(
    {"format", "overflow", "method", "mode", "verify", "rto", "cto", "priority", "redirect"}
)
_ADDRESS_PARAMETERS = frozenset({"from", "to", "cc", "bcc", "name", "reply", "smtp"})
"""Parameters of mail URLs that are names and addresses."""
_RECIPIENT_PARAMETERS = frozenset({"to", "cc", "bcc"})
_REFERENCED = "\x7f"
"""Stands for a reference in a URL whose literal parts are looked at."""
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r"\$\{(?:(file):)?([^{}$]*)\}")
_SCHEMA = re.compile(r"([A-Za-z0-9]{1,24})://")


class SecretText:
    """Text that is not printed: its representation is the same for every text."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretText) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return REDACTED

    __str__ = __repr__

    def __reduce__(self) -> str:
        raise TypeError("a secret cannot be pickled")


def url_schema(url: str) -> str | None:
    """Return the kind of a notification URL, such as `mailto`; None if it has none."""
    match = _SCHEMA.match(url.strip())
    return match[1].lower() if match else None


def resolve_references(text: str, environment: Mapping[str, str], *, directory: str, where: str) -> str:
    """Return a URL with `${NAME}` and `${file:PATH}` replaced by their values, percent-encoded.

    Args:
        text: The URL.
        environment: The environment variables.
        directory: Directory that relative paths refer to.
        where: The key of the configuration, for messages.

    Raises:
        UsageError: A variable is not set, or a file cannot be used.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return quote(read_secret_file(os.path.join(directory, match[2]), where=where), safe="")
        return quote(read_variable(match[2], environment, where=where), safe="")

    return _REFERENCE.sub(replace, text)


def show_name(text: str, max_characters: int = 60) -> str:
    """Return a name from the settings in quotes, for messages; a URL that was written in its place is not shown."""
    return "(a URL)" if "://" in text else quoted(text, max_characters)


def read_variable(name: str, environment: Mapping[str, str], *, where: str) -> str:
    """Return the value of an environment variable.

    Raises:
        UsageError: It is not set, or empty.
    """
    if not _VARIABLE_NAME.fullmatch(name):  # it may be the secret itself, so the message does not contain it
        raise UsageError(
            f"{where} refers to an environment variable whose name is not valid",
            hint="use a name of letters, digits and underscores, and set that variable to the secret",
        )
    value = environment.get(name, "").strip()
    if not value:
        raise UsageError(
            f"{where} refers to the environment variable {name}, which is not set",
            hint=f"set it for the head: export {name}=...",
        )
    return value


def read_secret_file(path: str, *, where: str) -> str:
    """Return the first line of a file that only its owner can read.

    Args:
        path: The file.
        where: The key of the configuration, for messages.

    Raises:
        UsageError: It cannot be read, is empty, or other users can read it.
    """
    if "://" in path:
        raise UsageError(
            f"{where} refers to a file by a URL instead of a path",
            hint="write the URL into a file that only you can read, and give its path",
        )
    try:
        with open(path, encoding="utf-8", opener=_open_nonblocking) as file:
            status = os.fstat(file.fileno())
            text = file.read(_MAX_SECRET_BYTES + 1) if stat.S_ISREG(status.st_mode) else ""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a text file"
        raise UsageError(
            f"{where} refers to the file {path}, which cannot be read: {why}",
            hint="check its path and permissions",
        ) from None
    if status.st_mode & 0o077 and stat.S_ISREG(status.st_mode):
        raise UsageError(
            f"other users can read {path}, which contains the secret of {where}",
            hint=f"chmod 600 {shlex.quote(path)}",
        )
    line = text.strip().partition("\n")[0].strip()
    if not line or len(text) > _MAX_SECRET_BYTES:
        raise UsageError(
            f"{where} refers to {path}, but its first line does not contain a secret",
            hint="write the secret into the first line of that file, with nothing else",
        )
    return line


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def holds_secret(url: str) -> bool:
    """Return whether a URL may contain a secret outside of its references `${...}`.

    Its kind, host and port are none. Nor are a user with a password that is a reference, parameters that only say how
    to send, and the addresses of a mail URL. Where the host is a token, everything that is not a reference is secret.
    """
    literal = _REFERENCE.sub(_REFERENCED, url.strip())
    schema = url_schema(literal)
    if schema not in _HOST_SCHEMAS:
        return bool(literal.partition("://")[2].strip(f"{_REFERENCED}/:@")) or schema is None
    try:
        parts = urlsplit(literal)
        parameters = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return True
    credentials, at, _ = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    public = _PUBLIC_PARAMETERS | (_ADDRESS_PARAMETERS if schema in MAIL_SCHEMAS else frozenset())
    return bool(
        (at and not _is_referenced(password if colon else user))
        or parts.path.strip(f"{_REFERENCED}/")
        or parts.fragment
        or any(name.lower() not in public and not _is_referenced(value) for name, value in parameters)
    )


def _is_referenced(text: str) -> bool:
    """Return whether a part of a URL consists of references."""
    return bool(text) and not text.strip(_REFERENCED)


def redact(text: str, url: str) -> str:
    """Return a message about a target without the parts of its URL, in whatever encoding they appear."""
    for secret in sorted(set(_secret_forms(url)), key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def _secret_forms(url: str) -> Iterator[str]:
    for part in (url, *_secret_parts(url)):
        plain = unquote(part)
        for form in (part, plain, quote(plain, safe=""), quote(plain), quote_plus(plain), repr(plain)[1:-1]):
            if len(form) >= _MIN_REDACTED_CHARACTERS:
                yield form


def _secret_parts(url: str) -> Iterator[str]:
    """Yield the parts of a URL that may be secret: everything but its kind, a host name and harmless parameters."""
    after = url.partition("://")[2]
    address, question, query = after.partition("?")
    yield address
    if question:
        yield query
    location, _, path = address.partition("/")
    credentials, at, host = location.rpartition("@")
    if at:
        yield credentials
        yield from credentials.split(":")
    if url_schema(url) not in _HOST_SCHEMAS:
        yield host
        yield from host.split(":")
    yield path
    yield from path.split("/")
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() not in _PUBLIC_PARAMETERS:
            yield value


def with_recipient(url: str, address: str) -> str:
    """Return the URL of a mail target with one other recipient, and no further ones."""
    parts = urlsplit(url)
    kept = [
        (name, value)
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
        if name.lower() not in _RECIPIENT_PARAMETERS
    ]
    return urlunsplit((parts.scheme, parts.netloc, "", urlencode([*kept, ("to", address)]), ""))
