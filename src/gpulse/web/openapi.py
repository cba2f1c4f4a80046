"""The OpenAPI document: made from the table of operations, so that it cannot say anything else."""

from __future__ import annotations

from typing import Any

from gpulse.cluster.protocol import schemas
from gpulse.cluster.protocol.operations import OPERATIONS, Operation

Document = dict[str, Any]

_ERRORS = {
    "400": "The request makes no sense",
    "401": "A token is needed",
    "403": "It may not come from there",
    "404": "There is no such thing",
    "405": "That method is not possible here",
    "409": "It cannot be now",
    "413": "The request is too large",
    "415": "The body is not application/json",
    "500": "The head failed",
    "503": "Not at the moment",
}


def document(version: str) -> Document:
    """The description of everything that is served."""
    paths: dict[str, Document] = {}
    for operation in OPERATIONS:
        for number, path in enumerate(operation.paths):
            described = _operation(operation, path, number)
            paths.setdefault(path, {})[operation.method.lower()] = described
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
            "schemas": {"Error": schemas.ERROR},
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


def _operation(operation: Operation, path: str, number: int) -> Document:
    in_path = {field.name for field in operation.fields if f"{{{field.name}}}" in path}
    others = [field for field in operation.fields if field.name not in in_path]
    described: Document = {
        "operationId": operation.name if not number else f"{operation.name}_{number + 1}",
        "summary": operation.help,
        "parameters": [
            {"name": field.name, "in": "path", "required": True, "schema": field.schema(in_body=False)}
            for field in operation.fields
            if field.name in in_path
        ],
        "responses": _responses(_good(operation)),
    }
    if operation.method == "GET":
        described["parameters"] += [
            {
                "name": field.name,
                "in": "query",
                "required": field.required,
                "description": field.help,
                "schema": field.schema(in_body=False),
            }
            for field in others
        ]
        return described
    body: Document = {
        "type": "object",
        "properties": {field.name: field.schema(in_body=True) for field in others},
        "additionalProperties": False,
    }
    if operation.any_of:
        body["anyOf"] = [
            {"required": [name], "properties": {name: {"type": "string"}}} for name in operation.any_of
        ]
    described["requestBody"] = {
        "required": bool(operation.any_of),
        "content": {"application/json": {"schema": body}},
    }
    return described


def _good(operation: Operation) -> Document:
    if operation.is_file:
        content: Document = {kind: {"schema": {}} for kind in operation.media_types}
    else:
        content = {"application/json": {"schema": operation.response}}
    if operation.name == "info":
        content["text/html"] = {"schema": {"type": "string"}}
    return {"description": operation.help, "content": content}


def _others() -> dict[str, Document]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    anything = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/metrics": _get("prometheus", "The newest readings in Prometheus' text format.", text),
        "/-/healthy": _get("healthy", "Whether the head runs.", anything),
        "/-/ready": _get("ready", "Whether the head can store what agents send.", anything),
        "/openapi.json": _get("openapi", "This document.", anything),
        "/api/v1/openapi.json": _get("openapi_2", "This document.", anything),
    }


def _get(name: str, summary: str, content: Document) -> Document:
    responses = _responses({"description": summary, "content": content})
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _responses(good: Document) -> Document:
    return {"200": good, **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}}


def _error(text: str) -> Document:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
