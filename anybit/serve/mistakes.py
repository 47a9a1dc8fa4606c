"""Errors as answers, in OpenAI's form and in Anthropic's: what is wrong, and in which field."""

import json
import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from anybit.errors import in_a_line
from anybit.serve.texts import Gone

log = logging.getLogger("anybit.serve")


class WrongField(HTTPException):
    """What is wrong is one field of the request."""

    def __init__(self, param: str, message: str, status: int = 400):
        super().__init__(status, message)
        self.param = param


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    error: ErrorBody


# What routes answer besides their model, for the schema.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error} for status in (400, 401, 404, 408, 413, 415, 500, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

KINDS = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
CODES = {401: "invalid_api_key", 404: "not_found"}
ANTHROPIC = KINDS | {408: "timeout_error", 413: "request_too_large", 500: "api_error"}


def add_handlers(app: FastAPI) -> None:
    """Answer every error in the protocol's form."""
    app.add_exception_handler(StarletteHTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ValidationError, invalid)  # of an adapter's request as a chat
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(Exception, unexpected)


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error answer. param: the field of the request that is wrong, if it is one."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if (status, param) == (404, "model") else CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The same as Anthropic has it."""
    kind = ANTHROPIC.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def error_at(path: str, status: int, message: str, param: str | None = None) -> bytes:
    """The body of an error answer to a request of this path."""
    anthropic = path.startswith("/v1/messages")
    body = anthropic_error(status, message) if anthropic else error(status, message, param)
    return json.dumps(body).encode()  # ASCII: a message may quote anything


# What pydantic says of the classes that bodies become.
PLAIN = dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "give an object")
UNKNOWN = object()  # the body of a request that another route's schema refuses


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    status, message = error.status_code, str(error.detail)
    if message == HTTPStatus(status).phrase:  # the router's
        message = f"{message}: this server has no {request.method} {request.url.path}"
    elif error.__cause__ is not None:  # FastAPI's, of what json has raised
        message = f"the body is not JSON: {error.__cause__}"
    param = error.param if isinstance(error, WrongField) else None
    return answer_error(request, status, message, param, error.headers)


async def invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or not what the schema says: where, and what is wrong."""
    assert isinstance(error, RequestValidationError | ValidationError)
    # Of the errors about one field, those that got furthest: a union has one for each member.
    deepest: dict[Any, Any] = {}
    for problem in error.errors():
        where = tuple(problem["loc"][:2])
        if where not in deepest or len(problem["loc"]) > len(deepest[where]["loc"]):
            deepest[where] = problem
    found = list(deepest.values())[:5]
    fields = [field_of(problem, getattr(error, "body", UNKNOWN)) for problem in found]
    text = "; ".join(map(described, found, fields))
    unknown = found[0].get("ctx", {}).get("field")  # which is named in the text
    return answer_error(request, 400, text, ".".join(filter(None, (fields[0], unknown))) or None)


def field_of(problem: dict[str, Any], body: Any) -> str | None:
    """The field of a body that a problem of pydantic's is in, such as messages.0.role.

    Where a field may have several types, pydantic also names the type, which is no part of a body.
    """
    if problem["type"] == "json_invalid":
        return None
    where = [part for part in problem["loc"] if part != "body"]
    path: list[str] = []
    for i, part in enumerate(where):
        inside = body is UNKNOWN and not {"[", "("} & {*str(part)}
        if isinstance(body, dict | list):
            inside = part in body if isinstance(body, dict) else isinstance(part, int)
        missing = problem["type"] == "missing" and i == len(where) - 1
        if inside or missing or not path:
            path.append(str(part))
        if inside and body is not UNKNOWN:
            body = body[part]
    return ".".join(path) or None


def described(problem: dict[str, Any], field: str | None) -> str:
    """A problem that pydantic has found, as a sentence about a field."""
    kind, where = problem["type"], [str(part) for part in problem["loc"] if part != "body"]
    if kind == "json_invalid":
        reason = problem.get("ctx", {}).get("error", problem["msg"])
        return f"the body is not JSON: {reason} (at character {where[-1] if where else 0})"
    if not where:
        if isinstance(problem["input"], bytes):
            return "the body is read as JSON, which its header Content-Type must say"
        return "the body is empty" if kind == "missing" else problem["msg"]
    context = problem.get("ctx", {})
    if kind == "union_tag_invalid":  # such as the type of a part
        text = f"{context['discriminator']}: {context['tag']!r}; give {context['expected_tags']}"
    elif kind == "union_tag_not_found":
        text = f"{context['discriminator']}: Field required"
    else:
        text = PLAIN.get(kind, problem["msg"])
    return f"{field}: {text}" if field else text


async def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer_error(request, 500, in_a_line(error))


def answer_error(
    request: Request, status: int, message: str, param: str | None = None, headers: Any = None
) -> Response:
    body = error_at(request.url.path, status, message, param)
    return Response(body, status, dict(headers or {}), "application/json")
