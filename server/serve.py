"""Runs the service: blocking, or in a thread for tests and demos."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.events import Broadcast
from fp8_safeguard.server.settings import Settings

_SHUTDOWN_SECONDS = 5
_START_SECONDS = 30.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Uvicorn that ends the live streams first; it would wait for their readers otherwise."""

    def __init__(self, config: uvicorn.Config, events: Broadcast, farewell: str = "") -> None:
        super().__init__(config)
        self._events = events
        self._farewell = farewell
        self.serving = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._farewell:
            # Here, since uvicorn passes SIGTERM on at its end; who listened may be gone by now.
            with suppress(OSError):
                print(self._farewell, flush=True)  # noqa: T201 (the other end of this command's output)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._events.close()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Ask the server to end; callable from any thread."""
        self._events.close()
        self.should_exit = True


def _server(settings: Settings, farewell: str = "") -> _Server:
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        server_header=False,
    )
    return _Server(config, app.state.context.events, farewell)


def _listen(settings: Settings) -> tuple[socket.socket, str]:
    """A bound socket and its URL; binding before serving makes the printed address true."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Named as TCP, asyncio sends small answers at once; otherwise each waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        # Who reads the address and calls at once waits for an answer, rather than being refused.
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    host, port = listener.getsockname()[:2]
    return listener, f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"


def run(settings: Settings, introduction: Iterable[str] = ()) -> None:
    """Serve until interrupted. Raises InsecureBindError, StoreError, and OSError where the port is taken.

    introduction: lines to print before the address, once the port is there.
    """
    server = _server(settings, "fp8-safeguard stopped")
    listener, url = _listen(settings)
    print(*introduction, f"fp8-safeguard serves {url}", sep="\n", flush=True)  # noqa: T201 (this command's output)
    # Uvicorn stops in good order and then passes the interrupt on; that is this command's normal end.
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


@contextmanager
def running_server(settings: Settings) -> Iterator[str]:
    """Serve on a free loopback port from a thread; gives the base URL, stops cleanly at the end."""
    settings = settings.model_copy(update={"host": "127.0.0.1", "port": 0})
    server = _server(settings)
    listener, url = _listen(settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="fp8-safeguard-server", daemon=True)
    with listener:
        thread.start()
        try:
            if not server.serving.wait(_START_SECONDS):
                raise RuntimeError(f"the service did not start within {_START_SECONDS:.0f} s")
            yield url
        finally:
            server.stop()
            thread.join(_SHUTDOWN_SECONDS + 5)
