"""How a request is read and how a failure is told: the same words over gRPC and HTTP."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from gpulse.errors import DiskError, GpulseError, RefusedError, UsageError
from gpulse.reports.document import Document

LARGEST_BODY = 1_000_000
"""Bytes of a request."""

logger = logging.getLogger(__name__)


def failure(error: Exception) -> tuple[int, Document]:
    """The status and the document that tell of an error; what nobody expected is logged."""
    match error:
        case RefusedError():
            return error.status, refusal(error.message, error.hint)
        case UsageError():
            return 400, refusal(error.message, error.hint)
        case DiskError():
            return 503, refusal(error.message, error.hint)
        case GpulseError():
            return 500, refusal(error.message, error.hint)
    logger.error("a request failed", exc_info=error)
    return 500, refusal(
        "the head failed at this; its log says how", "try again, and report what the log says"
    )


def refusal(message: str, hint: str | None = None) -> Document:
    """What is answered instead of what was asked for."""
    return {"error": message, "hint": hint, "detail": message}


def read_body(raw: bytes) -> Document:
    """The fields in the bytes of a request; none at all when it is empty.

    Raises:
        RefusedError: It is too large.
        UsageError: It is not an object in JSON.
    """
    if len(raw) > LARGEST_BODY:
        raise RefusedError(
            413, f"the request is larger than {LARGEST_BODY:,} bytes", hint="ask for less at once"
        )
    if not raw.strip():
        return {}
    try:
        document = json.loads(raw.decode(), parse_constant=_no_number)
    except RecursionError:
        raise UsageError("the request is nested too deeply", hint="it is a flat object of fields") from None
    except UnicodeDecodeError:
        raise UsageError("the request is not UTF-8", hint="send JSON as UTF-8") from None
    except ValueError as error:
        raise UsageError(
            f"the request is not JSON: {error}", hint='such as {"name": "my_experiment"}'
        ) from None
    if not isinstance(document, dict):
        raise UsageError("the request is not an object", hint='such as {"name": "my_experiment"}')
    return document


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def dumps(document: Any) -> str:
    """JSON; numbers that it has no word for become null."""
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(document), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
