"""The OpenAPI document, made from the table of operations and the types of its requests and answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from gpulse.cluster.protocol.answers import Error
from gpulse.cluster.protocol.operations import OPERATIONS, Operation
from gpulse.cluster.protocol.values import MAX_REPEATED, schema_of

Schema = dict[str, Any]

_ERRORS = {
    "400": "The request makes no sense",
    "401": "A token is needed",
    "403": "It may not come from there",
    "404": "There is no such thing",
    "405": "That method is not possible here",
    "409": "It cannot be done now",
    "413": "The request is too large",
    "415": "The body is not application/json",
    "500": "The head failed",
    "503": "Not at the moment",
}
_REFERENCES = "#/components/schemas/{name}"
_NULL: Schema = {"type": "null"}


@cache
def document(version: str) -> Schema:
    """Return the description of everything that is served."""
    types = [Error, *(operation.answer for operation in OPERATIONS if isinstance(operation.answer, type))]
    answers, components = msgspec.json.schema_components(types, ref_template=_REFERENCES)
    of_types = dict(zip(types, answers, strict=True))
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        good = _good(operation, of_types.get(operation.answer, {}))
        for number, path in enumerate(operation.paths):
            paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, path, number, good)
    paths.update(_others())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpulse head",
            "version": version,
            "description": "What the GPUs of many nodes do, and profiling sessions over them.",
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
                    "description": "Needed from other machines than the head's own",
                }
            },
        },
    }


def _operation(operation: Operation[Any], path: str, number: int, good: Schema) -> Schema:
    _, components = msgspec.json.schema_components([operation.request], schema_hook=schema_of)
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
    body: Schema = {
        "type": "object",
        "properties": {name: _or_null(schema) for name, schema in others.items()},
        "additionalProperties": False,
    }
    needed = operation.request.NEEDS_ONE_OF
    if needed:
        body["anyOf"] = [{"required": [name], "properties": {name: {"type": "string"}}} for name in needed]
    described["requestBody"] = {
        "required": bool(needed),
        "content": {"application/json": {"schema": body}},
    }
    return described


def _in_query(schema: Schema) -> Schema:
    """Return the schema of a field in an address, which cannot be null, nor be there any number of times."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != _NULL]
    plain = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if plain.get("type") == "array":
        plain["maxItems"] = min(plain["maxItems"], MAX_REPEATED)
    return {**plain, **kinds[0]} if len(kinds) == 1 else {**plain, **({"anyOf": kinds} if kinds else {})}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of a field of a body, where null stands for a field that is left out."""
    if _NULL in schema.get("anyOf", ()):
        return schema
    kind = {name: value for name, value in schema.items() if name not in ("description", "default")}
    return {"anyOf": [kind, _NULL], "description": schema["description"]}


def _good(operation: Operation[Any], answer: Schema) -> Schema:
    content: Schema = {kind: {"schema": answer} for kind in operation.media_types}
    if operation.name == "info":
        content["text/html"] = {"schema": {"type": "string"}}
    return {"description": operation.help, "content": content}


def _others() -> dict[str, Schema]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/metrics": _get("prometheus", "The newest readings in Prometheus' text format.", text),
        "/-/healthy": _get("healthy", "Whether the head runs.", anything),
        "/-/ready": _get("ready", "Whether the head can store what agents send.", anything),
        "/openapi.json": _get("openapi", "This document.", anything),
        "/api/v1/openapi.json": _get("openapi_2", "This document.", anything),
    }


def _get(name: str, summary: str, content: Schema) -> Schema:
    responses = _responses({"description": summary, "content": content})
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _responses(good: Schema) -> Schema:
    return {"200": good, **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}}


def _error(text: str) -> Schema:
    schema = {"$ref": _REFERENCES.format(name="Error")}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
