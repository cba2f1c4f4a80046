"""The OpenAPI document, generated from the table of operations and the types of its requests and answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from gpulse.cluster.protocol.answers import Error
from gpulse.cluster.protocol.operations import OPERATIONS, Operation
from gpulse.cluster.protocol.requests import MAX_REPEATED_FIELDS, json_schema

Schema = dict[str, Any]

_ERRORS = {
    "400": "The request is not valid",
    "401": "A token is required",
    "403": "Requests from this origin are not allowed",
    "404": "Not found",
    "405": "The method is not allowed for this path",
    "409": "The request is not allowed in the current state",
    "413": "The request is too large",
    "415": "The body is not application/json",
    "429": "Too many requests at once",
    "500": "Internal error in the head",
    "503": "Temporarily unavailable",
}
_REFERENCES = "#/components/schemas/{name}"
_NULL: Schema = {"type": "null"}


@cache
def document(version: str) -> Schema:
    """Return the OpenAPI document of a version."""
    types = [Error, *(operation.answer for operation in OPERATIONS if isinstance(operation.answer, type))]
    answers, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    of_types = dict(zip(types, answers, strict=True))
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        good = _success_response(operation, of_types.get(operation.answer, {}))
        for number, path in enumerate(operation.paths):
            paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, path, number, good)
    paths.update(_other_paths())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpulse head",
            "version": version,
            "description": "Metrics and findings of the GPUs of many nodes, and profiling sessions.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {code: _error(text) for code, text in _ERRORS.items()},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Required for requests from other machines",
                }
            },
        },
    }


def _operation(operation: Operation[Any], path: str, number: int, good: Schema) -> Schema:
    _, components = msgspec.json.schema_components([operation.request], schema_hook=json_schema)
    request = components[operation.request.__name__]
    fields: dict[str, Schema] = request["properties"]
    in_path = {name: schema for name, schema in fields.items() if f"{{{name}}}" in path}
    others = {name: schema for name, schema in fields.items() if name not in in_path}
    described: Schema = {
        "operationId": operation.name if not number else f"{operation.name}_{number + 1}",
        "summary": operation.help,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": schema}
            for name, schema in in_path.items()
        ],
        "responses": _responses(good),
    }
    if operation.method == "GET":
        described["parameters"] += [
            {
                "name": name,
                "in": "query",
                "required": name in request["required"],
                "description": schema["description"],
                "schema": _in_query(schema),
            }
            for name, schema in others.items()
        ]
        return described
    required = [name for name in others if name in request["required"]]
    body: Schema = {
        "type": "object",
        "properties": {
            name: schema if name in required else _or_null(schema) for name, schema in others.items()
        },
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }
    needed = operation.request.NEEDS_ONE_OF
    if needed:
        body["anyOf"] = [{"required": [name], "properties": {name: _given(fields[name])}} for name in needed]
    described["requestBody"] = {
        "required": bool(needed or required),
        "content": {"application/json": {"schema": body}},
    }
    return described


def _given(schema: Schema) -> Schema:
    """Return the schema of a field that is not left out."""
    return {"type": "array", "minItems": 1} if schema.get("type") == "array" else {"type": "string"}


def _in_query(schema: Schema) -> Schema:
    """Return the schema of a query parameter, which cannot be null, and can be repeated only so often."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != _NULL]
    plain = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if plain.get("type") == "array":
        plain["maxItems"] = min(plain["maxItems"], MAX_REPEATED_FIELDS)
    return {**plain, **kinds[0]} if len(kinds) == 1 else {**plain, **({"anyOf": kinds} if kinds else {})}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of a field of a body, where null means that the field is left out."""
    if _NULL in schema.get("anyOf", ()):
        return schema
    kind = {name: value for name, value in schema.items() if name not in ("description", "default")}
    return {"anyOf": [kind, _NULL], "description": schema["description"]}


def _success_response(operation: Operation[Any], answer: Schema) -> Schema:
    content: Schema = {kind: {"schema": answer} for kind in operation.media_types}
    if operation.name == "info":
        content["text/html"] = {"schema": {"type": "string"}}
    return {"description": operation.help, "content": content}


def _other_paths() -> dict[str, Schema]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/metrics": _get_operation("prometheus", "The latest readings in the Prometheus text format.", text),
        "/-/healthy": _get_operation("healthy", "Whether the head is running.", anything),
        "/-/ready": _get_operation("ready", "Whether the head can store data from agents.", anything),
        "/openapi.json": _get_operation("openapi", "This document.", anything),
        "/api/v1/openapi.json": _get_operation("openapi_2", "This document.", anything),
    }


def _get_operation(name: str, summary: str, content: Schema) -> Schema:
    responses = _responses({"description": summary, "content": content})
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _responses(good: Schema) -> Schema:
    return {"200": good, **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}}


def _error(text: str) -> Schema:
    schema = {"$ref": _REFERENCES.format(name="Error")}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
