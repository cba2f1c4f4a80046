"""Decode requests, and encode answers and errors, for gRPC and HTTP."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from gpulse.cluster.protocol.answers import Error
from gpulse.cluster.protocol.requests import Duration, Request, Time
from gpulse.errors import DiskError, GpulseError, RefusedError, UsageError
from gpulse.model.safe_text import quoted

MAX_BODY_BYTES = 1_000_000

logger = logging.getLogger(__name__)

AnyRequest = TypeVar("AnyRequest", bound=Request)

_OBJECT_HINT = 'send a JSON object such as {"name": "my_experiment"}; NaN and Infinity are not valid JSON'
_MAX_CHOICES_SHOWN = 10
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
_FIELD_PATH = re.compile(r" - at (?:`key` in )?`\$\.([^.\[`]+)(?:\[(\d+)\])?.*`$", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]{1,30}")
_BOOLEANS = {"true": True, "false": False}


class RequestField(NamedTuple):
    """A field of a request."""

    type: inspect.Type
    """Without null."""
    help: str

    @property
    def is_list(self) -> bool:
        """Whether a URL may contain it several times."""
        return isinstance(self.type, inspect.VarTupleType)


@cache
def fields_of(request: type[Request]) -> Mapping[str, RequestField]:
    """Return the fields of a request by their JSON names."""
    described = inspect.type_info(request)
    assert isinstance(described, inspect.StructType)  # noqa: S101  a Request is a Struct
    found = {}
    for field in described.fields:
        extra = field.type.extra_json_schema if isinstance(field.type, inspect.Metadata) else None
        found[field.encode_name] = RequestField(
            _unwrap_type(field.type), (extra or {}).get("description", "")
        )
    return found


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the fields in the body of a request; none if it is empty.

    Raises:
        RefusedError: The body is too large.
        UsageError: The body is not a JSON object.
    """
    if len(raw) > MAX_BODY_BYTES:
        raise RefusedError(
            413, f"the request is larger than {MAX_BODY_BYTES:,} bytes", hint="send a smaller request"
        )
    if not raw.strip():
        return {}
    try:
        document = msgspec.json.decode(raw.decode())
    except RecursionError:
        raise UsageError("the request is nested too deeply", hint="send a flat object of fields") from None
    except UnicodeDecodeError:
        raise UsageError("the request is not UTF-8", hint="send JSON as UTF-8") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"the request is not JSON: {error}", hint=_OBJECT_HINT) from None
    if not isinstance(document, dict):
        raise UsageError("the request is not a JSON object", hint=_OBJECT_HINT)
    return document


def decode_request(
    kind: type[AnyRequest], body: Mapping[str, Any], *, now: float, in_address: bool
) -> AnyRequest:
    """Decode and validate a request.

    Args:
        kind: The type of the request.
        body: The fields; None counts as omitted.
        now: The time that relative times refer to.
        in_address: Whether the fields may come from a URL, where lists are comma-separated and every value is text.

    Raises:
        UsageError: A field is unknown, missing, or has an invalid value.
    """
    fields = fields_of(kind)
    given = {
        name: _coerce(value, fields[name], in_address=in_address) if name in fields else value
        for name, value in body.items()
        if value is not None or name not in fields
    }
    try:
        request = msgspec.convert(given, kind, dec_hook=partial(_decode_value, now=now))
    except msgspec.ValidationError as error:
        raise _usage_error(kind, given, str(error)) from None
    needed = kind.NEEDS_ONE_OF
    if needed and not any(given.get(name) not in (None, []) for name in needed):
        raise UsageError(f"{' or '.join(needed)} is missing", hint=f"{needed[0]}: {fields[needed[0]].help}")
    return request


def encode(answer: object) -> bytes:
    """Return an answer as JSON; non-finite numbers become null."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:  # a path whose bytes are not UTF-8
        return json.dumps(msgspec.to_builtins(answer), separators=(",", ":")).encode()


def error_answer(message: str, hint: str | None = None) -> Error:
    """Return the answer to a request that failed."""
    return Error(error=message, hint=hint, detail=message)


def answer_for_exception(error: Exception) -> tuple[int, Error]:
    """Return the HTTP status and the answer for an exception; an unexpected one is logged."""
    match error:
        case RefusedError():
            return error.status, error_answer(error.message, error.hint)
        case UsageError():
            return 400, error_answer(error.message, error.hint)
        case DiskError():
            return 503, error_answer(error.message, error.hint)
        case GpulseError():
            return 500, error_answer(error.message, error.hint)
    logger.error("a request failed", exc_info=error)
    return 500, error_answer(
        "the head failed to process this request because of a bug",
        "see the head's log for details, and report the bug",
    )


def _decode_value(kind: type, given: object, *, now: float) -> object:
    if issubclass(kind, (Duration, Time)):
        return kind.decode(given, now)
    raise NotImplementedError


def _coerce(value: Any, field: RequestField, *, in_address: bool) -> Any:
    """Convert a value to the type of its field where it was sent as text or in another form."""
    if isinstance(field.type, inspect.IntType):
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            return int(value)
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if in_address and isinstance(field.type, inspect.BoolType) and isinstance(value, str):
        return _BOOLEANS.get(value, value)
    if in_address and field.is_list:
        items = value if isinstance(value, (list, tuple)) else [value]
        return [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    return value


def _usage_error(kind: type[Request], given: Mapping[str, Any], problem: str) -> UsageError:
    """Turn msgspec's message into one for users: which field is wrong, why, and which values are valid.

    Raises:
        UsageError: The check of the field's type raised its own error.
    """
    fields = fields_of(kind)
    if unknown := _UNKNOWN_FIELD.match(problem):
        known = (
            f"use only these fields: {', '.join(fields)}"
            if fields
            else "this operation has no fields: send the request without them"
        )
        return UsageError(f"unknown field {quoted(unknown[1])}", hint=known)
    if missing := _MISSING_FIELD.match(problem):
        return UsageError(f"{missing[1]} is missing", hint=f"{missing[1]}: {fields[missing[1]].help}")
    place = _FIELD_PATH.search(problem)
    if place is None:
        return UsageError(
            f"invalid request: {problem[:200]}", hint="see GET /openapi.json, which describes the request"
        )
    name, number = place[1], place[2]
    field, value = fields[name], given[name]
    hint = f"{name}: {field.help}"
    kind_of_value = field.type
    check = (kind_of_value.extra or {}).get("check") if isinstance(kind_of_value, inspect.Metadata) else None
    if check is not None and isinstance(value, str):
        check(value)
    if isinstance(kind_of_value, inspect.CustomType):
        return UsageError(f"{name}: {problem[: place.start()]}", hint=hint)
    if number is not None and isinstance(kind_of_value, inspect.VarTupleType):
        kind_of_value, value, name = kind_of_value.item_type, value[int(number)], f"{name}[{number}]"
    return UsageError(f"{name} must be {_describe_type(kind_of_value)}, not {quoted(value)}", hint=hint)


def _describe_type(kind: inspect.Type) -> str:
    """Describe the valid values of a type."""
    match kind:
        case inspect.Metadata(extra_json_schema={"title": str(title)}):
            return title
        case inspect.Metadata():
            return _describe_type(kind.type)
        case inspect.IntType():
            return f"a whole number from {kind.ge:,} to {kind.le:,}"
        case inspect.LiteralType():
            words = [str(value) for value in kind.values[:_MAX_CHOICES_SHOWN]]
            return f"one of: {', '.join(words)}{', …' if len(kind.values) > len(words) else ''}"
        case inspect.BoolType():
            return "true or false"
        case inspect.VarTupleType():
            least = f"{kind.min_length} to" if kind.min_length else "at most"
            return f"a list of {least} {kind.max_length:,} strings"
    return "as GET /openapi.json describes it"


def _unwrap_type(kind: inspect.Type) -> inspect.Type:
    """Return a type without null and without the description of its field, but with its title."""
    if isinstance(kind, inspect.Metadata):
        inner = _unwrap_type(kind.type)
        title = (kind.extra_json_schema or {}).get("title")
        return inspect.Metadata(inner, {"title": title}, kind.extra) if title else inner
    if isinstance(kind, inspect.UnionType):
        return next(_unwrap_type(one) for one in kind.types if not isinstance(one, inspect.NoneType))
    return kind
