"""Error codes of the live service: their HTTP status, close code and text.

Owns everything that a client is told about what went wrong. Invariant: texts are fixed; details
stay in the log.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, in HTTP answers, `err` messages and closed sockets."""

    BAD_MESSAGE = "BAD_MESSAGE"
    UNAUTHORIZED = "UNAUTHORIZED"
    FORBIDDEN_ORIGIN = "FORBIDDEN_ORIGIN"
    NOT_CONTROLLER = "NOT_CONTROLLER"
    NO_SESSION = "NO_SESSION"
    CONFLICT = "CONFLICT"
    TOO_LARGE = "TOO_LARGE"
    BAD_IMAGE = "BAD_IMAGE"
    RATE_LIMIT = "RATE_LIMIT"
    QUEUE_FULL = "QUEUE_FULL"
    INTERNAL = "INTERNAL"
    NOT_READY = "NOT_READY"
    RTC_TIMEOUT = "RTC_TIMEOUT"
    RTC_CODEC = "RTC_CODEC"
    RTC_FAILED = "RTC_FAILED"
    IDLE = "IDLE"
    GONE = "GONE"
    MAX_DURATION = "MAX_DURATION"
    SERVER_SHUTDOWN = "SERVER_SHUTDOWN"
    WARMUP_TIMEOUT = "WARMUP_TIMEOUT"
    GEN_TIMEOUT = "GEN_TIMEOUT"
    GEN_INVALID = "GEN_INVALID"
    """The model made no valid picture: NaN, black or frozen."""
    WORKER_DIED = "WORKER_DIED"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.BAD_MESSAGE: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN_ORIGIN: 403,
    ErrorCode.NOT_CONTROLLER: 403,
    ErrorCode.NO_SESSION: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.BAD_IMAGE: 422,
    ErrorCode.RATE_LIMIT: 429,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_READY: 503,
    ErrorCode.WORKER_DIED: 503,
}

CLOSE_CODE: dict[ErrorCode, int] = {
    ErrorCode.BAD_MESSAGE: 4400,
    ErrorCode.UNAUTHORIZED: 4401,
    ErrorCode.NO_SESSION: 4404,
    ErrorCode.CONFLICT: 4409,
    ErrorCode.TOO_LARGE: 1009,
    ErrorCode.RATE_LIMIT: 4429,
    ErrorCode.QUEUE_FULL: 4429,
    ErrorCode.INTERNAL: 1011,
    ErrorCode.NOT_READY: 1013,
    ErrorCode.IDLE: 4408,
    ErrorCode.GONE: 4410,
    ErrorCode.MAX_DURATION: 4411,
    ErrorCode.SERVER_SHUTDOWN: 1012,
    ErrorCode.WARMUP_TIMEOUT: 4500,
    ErrorCode.GEN_TIMEOUT: 4500,
    ErrorCode.GEN_INVALID: 4500,
    ErrorCode.WORKER_DIED: 4500,
}

ERROR_TEXT: dict[ErrorCode, str] = {
    ErrorCode.BAD_MESSAGE: "The message has a wrong form.",
    ErrorCode.UNAUTHORIZED: "The token or ticket is missing, used or expired.",
    ErrorCode.FORBIDDEN_ORIGIN: "This page may not use this server.",
    ErrorCode.NOT_CONTROLLER: "Only the player may do this.",
    ErrorCode.NO_SESSION: "The session is unknown or has ended.",
    ErrorCode.CONFLICT: "The session went on in another window.",
    ErrorCode.TOO_LARGE: "The message is too large.",
    ErrorCode.BAD_IMAGE: "The picture cannot be used.",
    ErrorCode.RATE_LIMIT: "Too many messages; slow down.",
    ErrorCode.QUEUE_FULL: "The queue is full; try again later.",
    ErrorCode.INTERNAL: "Something went wrong on the server.",
    ErrorCode.NOT_READY: "The server is not ready yet.",
    ErrorCode.RTC_TIMEOUT: "WebRTC did not answer in time.",
    ErrorCode.RTC_CODEC: "No common video codec.",
    ErrorCode.RTC_FAILED: "WebRTC failed.",
    ErrorCode.IDLE: "The session ended because nobody played.",
    ErrorCode.GONE: "The session ended because the connection was gone for too long.",
    ErrorCode.MAX_DURATION: "The session reached its longest duration.",
    ErrorCode.SERVER_SHUTDOWN: "The server is closing.",
    ErrorCode.WARMUP_TIMEOUT: "The world took too long to start.",
    ErrorCode.GEN_TIMEOUT: "The world took too long to make a chunk.",
    ErrorCode.GEN_INVALID: "The model made no valid picture.",
    ErrorCode.WORKER_DIED: "The process that makes the world ended.",
}
"""The only texts that leave the server; details stay in its logs."""


class ProtocolError(Exception):
    """A message or request that is refused, with the code that the client gets."""

    def __init__(self, code: ErrorCode, detail: str = "", *, retry_ms: int | None = None) -> None:
        super().__init__(f"{code}: {detail}" if detail else str(code))
        self.code = code
        self.detail = detail
        """For logs only."""
        self.retry_ms = retry_ms
