"""STUN and TURN servers: how an operator writes them, and users of a TURN server that expire.

Pure: the time is an argument.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from stream.protocol import IceServer

TURN_USER = "worldstream"


def parse_ice_server(text: str) -> IceServer:
    """Read `stun:host:port` or `turn:user:password@host:port?transport=tcp`.

    A TURN server without user and password is one whose users are made by `with_user`.

    Raises:
        ValueError: another scheme, no host, or a user without a password.
    """
    scheme, colon, rest = text.partition(":")
    if scheme not in ("stun", "stuns", "turn", "turns") or not colon or not rest:
        raise ValueError("allowed: stun:host:port or turn:user:password@host:port?transport=tcp")
    credentials, at, address = rest.rpartition("@")
    if scheme in ("stun", "stuns"):
        return IceServer(urls=(text,))
    if not at:
        return IceServer(urls=(text,))
    user, colon, password = credentials.partition(":")
    if not (user and colon and password and address):
        raise ValueError("a TURN server needs user:password@ before its host")
    return IceServer(urls=(f"{scheme}:{address}",), username=user, credential=password)


def with_user(server: IceServer, secret: str, until_s: float) -> IceServer:
    """Give a TURN server that has none a user that it takes until `until_s`, Unix time.

    The password is the secret's signature of the user, base64(HMAC-SHA1(secret, user)), by the
    "REST API for access to TURN services", which coturn calls use-auth-secret.
    """
    if server.username is not None or not server.urls[0].startswith("turn"):
        return server
    user = f"{round(until_s)}:{TURN_USER}"
    signature = hmac.digest(secret.encode(), user.encode(), hashlib.sha1)
    password = base64.b64encode(signature).decode()
    return server.model_copy(update={"username": user, "credential": password})
