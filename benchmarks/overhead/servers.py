"""Loopback servers for measurements: they take every sample, at once or late."""

from __future__ import annotations

import contextlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import msgpack

HOST = "127.0.0.1"


def serve(ready: Connection, delay_seconds: float) -> None:
    """Answer on a free port, whose address is sent to `ready`, until the process is ended."""
    server = ThreadingHTTPServer((HOST, 0), _handler(delay_seconds))
    server.daemon_threads = True
    ready.send(f"http://{HOST}:{server.server_address[1]}")
    server.serve_forever()


def _handler(delay_seconds: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(delay_seconds)
            packed = self.headers["Content-Type"] == "application/msgpack"
            reply = json.dumps(_accepted(msgpack.unpackb(content)) if packed else {"ended": True}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the run is over, and nobody waits any more
                self.wfile.write(reply)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


def _accepted(body: dict[str, Any]) -> dict[str, Any]:
    """What the service says to one sample, or to several in one body."""
    one = {"accepted": True, "inserted": 1, "duplicates": 0, "decisions": [], "alerts": []}
    one |= {"plan_version": 0, "plan": None}
    return {"results": [one] * len(body["samples"])} if "samples" in body else one
