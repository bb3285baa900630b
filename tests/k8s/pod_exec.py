"""`exec` of a fake API server: the websocket that a kubelet answers, with real programs in local sandboxes as pods."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from roundhouse.environments.sandboxes.local import LocalProcess

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def answer(request: BaseHTTPRequestHandler, pod: LocalProcess) -> None:
    """Run the command of an exec in the pod and send its output."""
    query = parse_qs(urlsplit(request.path).query)
    accept = base64.b64encode(hashlib.sha1(request.headers["Sec-WebSocket-Key"].encode() + _MAGIC).digest()).decode()
    request.send_response(101)
    for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
        request.send_header(name, value)
    request.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
    request.end_headers()
    request.close_connection = True
    command, stdin = query["command"], b""
    if query["stdin"] == ["true"]:
        stdin = _stdin(request, command)
    try:
        found = pod._answer(command, stdin, 2**22)
    except Exception as error:  # noqa: BLE001 - as a kubelet whose container is gone
        _send(request, 3, json.dumps({"status": "Failure", "reason": "InternalError", "message": str(error)}).encode())
        return
    for start in range(0, len(found.output), 4096):
        _send(request, 1, found.output[start : start + 4096])
    _send(request, 255, b"\x01")
    _send(request, 3, json.dumps(_status(found.status)).encode())


def _status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}


def _stdin(request: BaseHTTPRequestHandler, command: list[str]) -> bytes:
    """Return as many bytes as the command's `head -c` reads."""
    found = b""
    script = next(part for part in command if "head -c " in part)
    size = int(script.split("head -c ")[1].split()[0])
    while len(found) < size:
        frame = _receive(request)
        assert frame[0] == 0
        found += frame[1:]
    return found


def _receive(request: BaseHTTPRequestHandler) -> bytes:
    _, length = request.rfile.read(2)
    length &= 127
    if length == 126:
        (length,) = struct.unpack(">H", request.rfile.read(2))
    elif length == 127:
        (length,) = struct.unpack(">Q", request.rfile.read(8))
    mask = request.rfile.read(4)
    return bytes(byte ^ mask[index % 4] for index, byte in enumerate(request.rfile.read(length)))


def _send(request: BaseHTTPRequestHandler, channel: int, content: bytes) -> None:
    body = bytes([channel]) + content
    length = bytes([len(body)]) if len(body) < 126 else b"\x7e" + struct.pack(">H", len(body))
    try:
        request.wfile.write(b"\x82" + length + body)
        request.wfile.flush()
    except OSError:  # the client has had enough
        request.close_connection = True
