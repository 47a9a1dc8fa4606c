"""The chat page: its files, and what it tells about the model."""

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import Response

from anybit.serve.server import Server

FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "server.js": "text/javascript",
    "history.js": "text/javascript",
    "vendor/marked.js": "text/javascript",
    "vendor/purify.js": "text/javascript",
    "vendor/highlight.js": "text/javascript",
}
# The page asks this server alone; what a model writes runs nothing.
SAFE = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_routes(app: FastAPI, server: Server) -> None:
    """The page, its files, and `/page/about`."""
    folder = files("anybit.serve").joinpath("page")

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response(folder.joinpath("index.html").read_bytes(), 200, SAFE, "text/html")

    @app.get("/page/about", include_in_schema=False)
    async def about() -> dict[str, Any]:
        """The model, its formats, and the bytes of its quantized layers, now and as dense ones."""
        llm = server.llm
        weights = sum(llm.quantized.values())
        return {
            "model": server.settings.names[0],
            "template": llm.has_template,
            "dtype": llm.dtype,
            "formats": dict(llm.quantized),
            "bits": llm.quantized_bytes * 8 / weights if weights else None,
            "bytes": llm.quantized_bytes,
            "dense_bytes": llm.dense_bytes,
        }

    @app.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in FILES:
            raise HTTPException(404, f"the page has no file {name!r}")
        return Response(folder.joinpath(name).read_bytes(), 200, SAFE, FILES[name])
