"""An HTTP server in a thread of its own: uvicorn, and Starlette's requests and responses.

    server = Server(respond, port=8000)      # respond: async, from a Request to a Response
    server.address                           # ("127.0.0.1", 8000)
    server.close()

`respond` runs in the server's event loop, so it must not wait without `await`, nor run the code of
users: it hands their work to another thread. It is cancelled if its client hangs up.
"""

import asyncio
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

HOST = "127.0.0.1"
WAITING = 512  # connections that the system may hold until they are accepted
GRACE = 1.0  # seconds to close

Respond = Callable[[Request], Awaitable[Response]]


class TooLarge(Exception):
    """A body has more bytes than it may."""


class Server(uvicorn.Server):
    """Answers until `close`. `idle`: seconds until a connection is closed on which no whole request
    arrives. Raises OSError or OverflowError if it cannot listen at the address."""

    def __init__(self, respond: Respond, host: str = HOST, port: int = 0, idle: int = 600):
        listener = socket.create_server((host, port), backlog=WAITING)
        self.address: tuple[str, int] = listener.getsockname()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["task"] = asyncio.current_task()
            try:
                response = await respond(Request(scope, receive))
            except (ClientDisconnect, asyncio.CancelledError):
                response = Response("the server has closed", 503)  # who hung up gets nothing
            except Exception:  # a mistake of ours
                traceback.print_exc()
                response = Response("internal error", 500)
            await response(scope, receive, send)

        # It logs nothing: the terminal belongs to the run. No header is believed to say who asks
        super().__init__(uvicorn.Config(
            app, http=_Protocol, loop="asyncio", ws="none", lifespan="off", interface="asgi3",
            log_config=None, log_level="critical", access_log=False, workers=1, backlog=WAITING,
            proxy_headers=False, server_header=False, timeout_keep_alive=idle,
            timeout_graceful_shutdown=0,
        ))  # fmt: skip
        self.thread = threading.Thread(target=self.run, args=([listener],), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stops listening, and refuses what is still waiting."""
        self.should_exit = True
        self.thread.join(GRACE)


async def read_body(request: Request, most: int) -> bytes:
    """Raises TooLarge for more than `most` bytes; the server drops what comes after them."""
    size = int(request.headers.get("content-length") or 0)  # the protocol lets only digits through
    body = bytearray()
    if size <= most:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                break
    if max(size, len(body)) > most:
        raise TooLarge(f"a request has at most {most:,} bytes")
    return bytes(body)


class _Protocol(H11Protocol):
    """uvicorn limits the time between two requests; here also that of a request to arrive, and of
    the client to read the answer. Who hangs up cancels the answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does so for sockets of its own; else the body of each answer waits for 40 ms
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self._wait_for_request()
        elif self.conn.trailing_data == (b"", False):  # uvicorn stops to read after a long body
            self.flow.resume_reading()  # to notice who hangs up

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.cycle is not None and (task := self.scope["state"].get("task")):
            task.cancel()

    def _wait_for_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()
