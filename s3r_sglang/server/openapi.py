"""What the rollout service says about itself in SGLang's OpenAPI description."""

from typing import Any

from pydantic import BaseModel

from s3r_sglang.server.protocol import Strict


class Fault(BaseModel):
    """One sentence for the caller, and the HTTP status again."""

    message: str
    code: int


class ErrorBody(BaseModel):
    """Every refusal of the service, in the shape of SGLang's native endpoints."""

    error: Fault


_REASONS = {
    400: "The request is malformed, or cannot be served.",
    409: "Groups are in flight, or the update session is not open.",
    413: "The body is too large.",
    429: "Too many groups are in progress; Retry-After says when to try again.",
    503: "The engine is asleep, or not ready.",
}


# FastAPI would answer a `wait` that is no boolean in words of its own, with the place in our source.
WAIT = {
    "parameters": [
        {
            "name": "wait",
            "in": "query",
            "description": "Wait for groups in flight instead of refusing.",
            "schema": {"type": "boolean", "default": False},
        }
    ]
}


def refusals(*codes: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for a route that may refuse with these codes."""
    return {code: {"model": ErrorBody, "description": _REASONS[code]} for code in codes}


def request_body(model: type[Strict]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` for a route that reads and checks its JSON body itself."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        """OpenAPI resolves references from the root of its document, where these definitions are not."""
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rsplit("/", 1)[1]])
        return {key: inline(value) for key, value in node.items()}

    content = {"application/json": {"schema": inline(schema)}}
    return {"requestBody": {"required": True, "content": content}}
