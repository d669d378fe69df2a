"""A server in a process of its own, stopped when the caller is done with it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class ServerStartError(Exception):
    """The server did not come up; the message holds its last words."""


class ServerProcess:
    """`fp8-safeguard serve` on loopback, up when the block begins and gone when it ends."""

    def __init__(self, database: Path, port: int, log: Path) -> None:
        self.database_url = f"sqlite:///{database.resolve()}"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log

    def __enter__(self) -> "ServerProcess":
        if taken(self.port):
            raise ServerStartError(
                f"Port {self.port} is taken. Choose another with --port, or --port 0 for any free one."
            )
        command = [sys.executable, "-m", "fp8_safeguard.cli.main", "serve", "--port", str(self.port)]
        environment = {**os.environ, "FP8_SAFEGUARD_DATABASE_URL": self.database_url}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx2.get(f"{self.url}/readyz", timeout=2.0).status_code == 200:
                    return
            except httpx2.TransportError:
                time.sleep(0.1)
        words = self._log.read_text(errors="replace").strip().splitlines()[-5:]
        raise ServerStartError("The server did not start: " + (" / ".join(words) or "it said nothing"))


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def taken(port: int) -> bool:
    """True when something listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
