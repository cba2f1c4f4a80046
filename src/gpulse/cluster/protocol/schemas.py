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


INCOMPLETE = several(TEXT)
"""What is missing from an answer, in words; empty when nothing is."""

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
    remote=optional(
        record(state={"type": "string", "enum": ["ok", "behind", "failing", "refused"]}, url=TEXT)
    ),
    remote_query=optional(record(state={"type": "string", "enum": ["ok", "failing"]}, url=TEXT)),
    shared=optional(record(state={"type": "string", "enum": ["ok", "failing"]})),
    missing_nodes=optional(several(TEXT)),
    findings=optional(several(ANY_OBJECT)),
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
QUERY = record(metric=TEXT, series=several(ANY_OBJECT), incomplete=INCOMPLETE)
HISTORY = record(
    **{"from": NUMBER, "to": NUMBER},
    scope=TEXT,
    step=NUMBER,
    times=several(NUMBER),
    incomplete=INCOMPLETE,
    series=several(
        record(
            node=TEXT,
            subject=TEXT,
            gpu=optional(or_null(TEXT)),
            metric=TEXT,
            unit=TEXT,
            values=several(or_null(NUMBER)),
            lows=optional(several(or_null(NUMBER))),
            highs=optional(several(or_null(NUMBER))),
        )
    ),
)
PROCESSES = record(
    **{"from": NUMBER, "to": NUMBER},
    truncated=FLAG,
    incomplete=INCOMPLETE,
    processes=several(
        record(
            node=TEXT,
            pid=WHOLE,
            start_time=or_null(NUMBER),
            first_seen=NUMBER,
            ended=or_null(NUMBER),
            user=or_null(TEXT),
            job=or_null(TEXT),
            container=or_null(TEXT),
            pod=or_null(TEXT),
            name=or_null(TEXT),
            command=several(TEXT),
            gpus=several(
                record(
                    **{"from": NUMBER, "to": NUMBER},
                    gpu=or_null(TEXT),
                    uuid=TEXT,
                    memory_bytes_mean=or_null(NUMBER),
                    memory_bytes_max=or_null(NUMBER),
                    sm_ratio_mean=or_null(NUMBER),
                )
            ),
        )
    ),
)
USAGE = record(
    **{"from": NUMBER, "to": NUMBER},
    step=NUMBER,
    by={"type": "string", "enum": ["user", "job"]},
    gpus=WHOLE,
    capacity_seconds=NUMBER,
    gpu_seconds=NUMBER,
    idle_seconds=or_null(NUMBER),
    harvested_seconds=NUMBER,
    truncated=FLAG,
    incomplete=INCOMPLETE,
    rows=several(
        record(
            user=or_null(TEXT),
            job=or_null(TEXT),
            program=or_null(TEXT),
            node=or_null(TEXT),
            pid=or_null(WHOLE),
            start_time=or_null(NUMBER),
            gpu_seconds=NUMBER,
            idle_seconds=or_null(NUMBER),
            harvested_seconds=NUMBER,
            utilization_mean=or_null(NUMBER),
            memory_bytes_max=or_null(NUMBER),
            energy_joules=or_null(NUMBER),
            harvested_energy_joules=or_null(NUMBER),
            gpus=WHOLE,
            nodes=several(TEXT),
            processes=WHOLE,
            first=NUMBER,
            last=NUMBER,
        )
    ),
)
_HAD = {
    "gpu_seconds": NUMBER,
    "known_seconds": NUMBER,
    "idle_seconds": or_null(NUMBER),
    "utilization_mean": or_null(NUMBER),
    "energy_joules": or_null(NUMBER),
}
_FIGURES = by_name(record(unit=TEXT, mean=NUMBER, max=NUMBER))
_JOB_FINDING = record(
    **{"from": NUMBER, "to": or_null(NUMBER)},
    node=or_null(TEXT),
    gpu=or_null(WHOLE),
    label=or_null(TEXT),
    id=TEXT,
    cause=or_null(TEXT),
    family=or_null(TEXT),
    severity=TEXT,
    summary=TEXT,
    lost_ratio=or_null(NUMBER),
    confidence=or_null(NUMBER),
    pids=several(WHOLE),
    times=WHOLE,
    active_seconds=NUMBER,
    evidence=several(ANY_OBJECT),
    advice=several(ANY_OBJECT),
    url=or_null(TEXT),
)
JOB = record(
    **{"from": NUMBER, "to": NUMBER},
    job=TEXT,
    kind={"type": "string", "enum": ["job", "session", "process"]},
    state={"type": "string", "enum": ["running", "ended", "lost"]},
    to_now=FLAG,
    name=or_null(TEXT),
    array=or_null(TEXT),
    user=or_null(TEXT),
    partition=or_null(TEXT),
    account=or_null(TEXT),
    program=or_null(TEXT),
    step=NUMBER,
    nodes=several(TEXT),
    gpus=WHOLE,
    processes=WHOLE,
    allocated_seconds=or_null(NUMBER),
    unused_seconds=or_null(NUMBER),
    untouched_gpus=or_null(WHOLE),
    **_HAD,
    held_seconds=NUMBER,
    memory_bytes_max=or_null(WHOLE),
    metrics=_FIGURES,
    cluster=record(
        gpus=WHOLE, capacity_seconds=NUMBER, gpus_held=WHOLE, **_HAD, power_watts_mean=or_null(NUMBER)
    ),
    findings=several(_JOB_FINDING),
    truncated=FLAG,
    gpu_rows=several(
        record(
            node=TEXT,
            gpu=or_null(TEXT),
            uuid=TEXT,
            model=or_null(TEXT),
            use={"enum": ["used", "untouched", "unattributed", None]},
            shared=FLAG,
            memory_total_bytes=or_null(NUMBER),
            allocated_seconds=or_null(NUMBER),
            unused_seconds=or_null(NUMBER),
            **_HAD,
            held_seconds=NUMBER,
            memory_bytes_max=or_null(WHOLE),
            metrics=_FIGURES,
        )
    ),
    missing_seconds=NUMBER,
    missing=several(record(**{"node": TEXT, "from": NUMBER, "to": NUMBER})),
    data_gaps=several(TEXT),
    series=or_null(
        record(
            step=NUMBER,
            times=several(NUMBER),
            metrics=by_name(several(or_null(NUMBER))),
            gpus=several(record(node=TEXT, gpu=or_null(TEXT), uuid=TEXT, values=several(or_null(NUMBER)))),
        )
    ),
)
EVENTS = record(events=several(ANY_OBJECT))
FINDINGS = record(findings=several(ANY_OBJECT))
FINDING_SPANS = record(
    **{"from": NUMBER, "to": NUMBER},
    truncated=FLAG,
    spans=several(
        record(
            **{"from": NUMBER, "to": or_null(NUMBER)},
            node=TEXT,
            gpu=or_null(WHOLE),
            label=or_null(TEXT),
            id=TEXT,
            cause=or_null(TEXT),
            family=or_null(TEXT),
            severity=TEXT,
            summary=TEXT,
            lost_ratio=or_null(NUMBER),
            confidence=or_null(NUMBER),
            pids=several(WHOLE),
            evidence=several(ANY_OBJECT),
            advice=several(ANY_OBJECT),
            url=or_null(TEXT),
        )
    ),
)
ERROR = record(error=TEXT, hint=or_null(TEXT), detail=TEXT)
