"""What the head answers, as JSON schemas: the fields that are always there, more may be beside them."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}


def or_null(schema: Schema) -> Schema:
    """The same, or null for what is unknown."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(**properties: Schema) -> Schema:
    """An object that has these fields; a schema with `"optional": True` may be left out."""
    return {
        "type": "object",
        "required": [name for name, schema in properties.items() if not schema.get("optional")],
        "properties": {
            name: {key: value for key, value in schema.items() if key != "optional"}
            for name, schema in properties.items()
        },
    }


def several(schema: Schema) -> Schema:
    """A list of them."""
    return {"type": "array", "items": schema}


def by_name(schema: Schema) -> Schema:
    """An object whose fields are all of this kind."""
    return {"type": "object", "additionalProperties": schema}


def optional(schema: Schema) -> Schema:
    """A field that may be left out."""
    return {**schema, "optional": True}


_SESSION = record(
    name=TEXT,
    session_id=TEXT,
    state={"type": "string", "enum": ["active", "interrupted", "finished"]},
    is_active=FLAG,
    start_time={"type": ["string", "number"]},
    end_time={"type": ["string", "number", "null"]},
    frame_count=optional(or_null(WHOLE)),
    output_file=or_null(TEXT),
    labels=optional(by_name(TEXT)),
    nodes=optional(several(TEXT)),
    gpus=optional(several(TEXT)),
    recoverable=optional(FLAG),
    interruptions=optional(several({})),
)
_GPU_READING = record(gpu_id=TEXT, gpu_util=or_null(NUMBER), gpu_memory=or_null(NUMBER))

INFO = ANY_OBJECT
STATUS = record(
    freq=WHOLE,
    enable_bandwidth_profiling=FLAG,
    enable_nvlink_profiling=FLAG,
    is_profiling=FLAG,
    output_filename=or_null(TEXT),
    frame_id_counter=WHOLE,
    connected_clients=several(TEXT),
    total_gpus=WHOLE,
    gpu_info=ANY_OBJECT,
    active_sessions=several({}),
    version=optional(TEXT),
    uptime_seconds=optional(NUMBER),
    storage=optional(record(state={"type": "string", "enum": ["ok", "failing"]})),
    nodes=optional(several(record(name=TEXT, state={"type": "string", "enum": ["healthy", "late", "lost"]}))),
)
CLIENTS = record(
    total_clients=WHOLE,
    clients=several(
        record(
            client_id=TEXT,
            hostname=TEXT,
            gpu_count=WHOLE,
            gpus=several(record(id=TEXT, name=TEXT, physical_idx={"type": ["integer", "string"]})),
            state=optional(TEXT),
        )
    ),
)
LATEST = record(
    timestamp={"type": ["string", "number"]},
    client_data=by_name(record(gpus=several(_GPU_READING), time={}, age_seconds=or_null(NUMBER))),
)
SESSIONS = record(total_sessions=WHOLE, active_sessions={}, sessions=several(_SESSION))
SESSION = _SESSION
STARTED = record(success=FLAG, message=TEXT, output_file=or_null(TEXT), session={})
STOPPED = record(success=FLAG, message=TEXT, output_file={}, sessions=several({}))
DONE = ANY_OBJECT
QUERY = record(metric=TEXT, series=several(ANY_OBJECT))
EVENTS = record(events=several(ANY_OBJECT))
FINDINGS = record(findings=several(ANY_OBJECT))
ERROR = record(error=TEXT, hint=or_null(TEXT), detail=TEXT)
