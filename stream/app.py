"""Routes of the live service: parse, call `Live`, answer.

Owns paths, status codes, the form of errors. Invariants: an answer holds fixed texts only; what
went wrong in detail is in the log under the id that the answer names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from stream import http_bodies as bodies
from stream import metrics, uploads
from stream.door import Door
from stream.error_codes import ERROR_TEXT, HTTP_STATUS, ErrorCode, ProtocolError
from stream.gate import BodyRefusedError, Gate, has_token
from stream.http_bodies import ErrorBody
from stream.info import VERSION
from stream.live import Live
from stream.schema import json_schema

WEB_CLIENT = Path(__file__).resolve().parent.parent / "web_client"
NOT_READY_RETRY_S = 2
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in sorted(set(HTTP_STATUS.values()))
}
_PICTURE = {
    "required": True,
    "content": {
        kind: {"schema": {"type": "string", "format": "binary"}} for kind in uploads.CONTENT_TYPES
    },
}
_HTTP_CODES = {404: ErrorCode.NO_SESSION, 405: ErrorCode.BAD_MESSAGE}

log = structlog.get_logger(__name__)


def create_app(live: Live) -> FastAPI:
    """Return the application; it starts `live` and closes it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await live.start()
            yield
        finally:
            await live.close()

    app = FastAPI(
        title="worldstream",
        version=VERSION,
        description="Messages of the WebSocket /v1/ws: /v1/protocol.json",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        responses=_ERRORS,
    )
    if live.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=live.settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("Authorization", "Content-Type", "Idempotency-Key"),
        )
    app.add_middleware(Gate, settings=live.settings)
    _add_errors(app, live)
    _add_operations(app, live)
    _add_sessions(app, live)
    if WEB_CLIENT.is_dir():
        _add_page(app)
    return app


def _add_page(app: FastAPI) -> None:
    """Serve the page where no route is; a mount would hide that a route has other methods."""
    files, nothing = StaticFiles(directory=WEB_CLIENT, html=True), app.router.default

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await (files if scope["type"] == "http" else nothing)(scope, receive, send)

    app.router.default = page


def _add_operations(app: FastAPI, live: Live) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answer as long as the process lives."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"description": "loading"}})
    async def readyz() -> JSONResponse:
        """Answer 200 when visitors can play; else 503 and how far loading is."""
        if live.is_ready:
            return JSONResponse({"ready": True})
        loading = live.workers.loading
        body = {"ready": False, "loading": None if loading is None else loading.model_dump()}
        return JSONResponse(body, 503, {"Retry-After": str(NOT_READY_RETRY_S)})

    @app.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Return all metrics; needs the access token where there is one."""
        if live.settings.token is not None and not has_token(live.settings, request.headers):
            raise ProtocolError(ErrorCode.UNAUTHORIZED)
        return Response(live.metrics_text(), media_type=metrics.CONTENT_TYPE)

    @app.get("/v1/info")
    async def info() -> bodies.ServiceInfo:
        """Return what a page needs before it opens a session."""
        return await live.info()

    @app.get("/v1/protocol.json")
    async def schema() -> dict[str, Any]:
        """Return the JSON schema of all WebSocket messages."""
        return json_schema()

    @app.get("/v1/scenes/{name}.png", response_class=Response)
    async def thumbnail(name: str) -> Response:
        """Return the first picture of a scene."""
        scene = live.scenes.get(name)
        if scene is None:
            raise ProtocolError(ErrorCode.NO_SESSION, "no such scene")
        return Response(
            scene.png, media_type="image/png", headers={"Cache-Control": "max-age=3600"}
        )


def _add_sessions(app: FastAPI, live: Live) -> None:
    door = Door(live)

    @app.post("/v1/images", status_code=201, openapi_extra={"requestBody": _PICTURE})
    async def upload(request: Request) -> dict[str, str]:
        """Take a seed image: the raw bytes of a JPEG, PNG or WebP."""
        _expect_access(live, request)
        if request.headers.get("content-type", "") not in uploads.CONTENT_TYPES:
            raise ProtocolError(ErrorCode.BAD_IMAGE, "content type")
        image_id = await live.upload(await request.body(), address=_address(request))
        return {"image_id": image_id}

    @app.post("/v1/sessions", status_code=201)
    async def create(body: bodies.CreateSession, request: Request) -> bodies.SessionCreated:
        """Open, join or go on with a session."""
        _expect_access(live, request)
        key = request.headers.get("idempotency-key")
        return await live.create(body, address=_address(request), idempotency_key=key)

    @app.get("/v1/sessions/{session_id}")
    async def status(session_id: str) -> bodies.SessionStatus:
        """Return the state of a session."""
        return live.status(session_id)

    @app.delete("/v1/sessions/{session_id}", status_code=204)
    async def end(session_id: str, request: Request) -> None:
        """End a session; `Authorization: Bearer` with its resume token or the access token."""
        live.end(session_id, request.headers)

    @app.get("/v1/sessions/{session_id}/trace.jsonl", response_class=Response)
    async def trace(session_id: str, request: Request) -> Response:
        """Return the trace of the newest epoch; it replays offline. Same right as DELETE."""
        path = live.trace(session_id, request.headers)
        # It grows while it is sent; read at once, its length is true.
        content = await asyncio.to_thread(path.read_bytes)
        named = {"Content-Disposition": f'attachment; filename="{path.name}"'}
        return Response(content, media_type="application/jsonl", headers=named)

    @app.get("/v1/sessions/{session_id}/picture.png", response_class=FileResponse)
    async def picture(session_id: str, request: Request) -> FileResponse:
        """Return the uploaded picture that the trace begins with. Same right as DELETE."""
        path = live.picture(session_id, request.headers)
        return FileResponse(path, media_type="image/png", filename=path.name)

    @app.get("/v1/sessions/{session_id}/recording.mp4", response_class=FileResponse)
    async def recording(session_id: str, request: Request) -> FileResponse:
        """Return what was shown so far. Same right as DELETE."""
        path = await live.recording(session_id, request.headers)
        return FileResponse(
            path,
            media_type="video/mp4",
            filename=f"{session_id}.mp4",
            background=BackgroundTask(path.unlink, missing_ok=True),
        )

    @app.websocket("/v1/ws")
    async def control(websocket: WebSocket) -> None:
        """Messages of `/v1/protocol.json`; subprotocols `wm.v1` and `ticket.TICKET`."""
        await door.serve(websocket)


def _add_errors(app: FastAPI, live: Live) -> None:
    def answer(code: ErrorCode, *, status: int | None = None, **more: Any) -> JSONResponse:
        live.metrics.errors.labels(code=str(code)).inc()
        body = ErrorBody(code=code, msg=ERROR_TEXT[code], **more)
        status = HTTP_STATUS[code] if status is None else status
        return JSONResponse(body.model_dump(mode="json"), status)

    @app.exception_handler(ProtocolError)
    async def refused(request: Request, error: ProtocolError) -> JSONResponse:
        log.info("request_refused", code=str(error.code), detail=error.detail)
        return answer(error.code, retry_ms=error.retry_ms)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(ErrorCode.BAD_MESSAGE)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> JSONResponse:
        code = _HTTP_CODES.get(error.status_code, ErrorCode.BAD_MESSAGE)
        if isinstance(error, BodyRefusedError):
            code = error.code
        refusal = answer(code, status=error.status_code)
        refusal.headers.update(error.headers or {})  # which methods are allowed
        return refusal

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        number = secrets.token_hex(6)
        log.error("request_failed", id=number, exc_info=error)
        return answer(ErrorCode.INTERNAL, id=number)


def _expect_access(live: Live, request: Request) -> None:
    """Creating costs: where there is an access token it is needed."""
    if live.settings.token is not None and not has_token(live.settings, request.headers):
        raise ProtocolError(ErrorCode.UNAUTHORIZED, "access token")


def _address(request: Request) -> str:
    return request.client.host if request.client else "unknown"
