"""An HTTP server in a thread of its own: uvicorn, and Starlette's requests and responses.

    server = Server(respond, port=8000)      # respond: async, from a Request to a Response
    server.address                           # ("127.0.0.1", 8000)
    server.close()

`respond` runs in the server's event loop, so it must not wait without `await`, nor run the code of
users: it hands their work to another thread.
"""

import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response

HOST = "127.0.0.1"
WAITING = 512  # connections that the system may hold until they are accepted
GRACE = 1.0  # seconds to close

Respond = Callable[[Request], Awaitable[Response]]


class Server(uvicorn.Server):
    """Answers until `close`. Raises OSError or OverflowError if it cannot listen at the address."""

    def __init__(self, respond: Respond, host: str = HOST, port: int = 0):
        listener = socket.create_server((host, port), backlog=WAITING)
        # its connections inherit it; else the body of each answer waits for 40 ms
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.address: tuple[str, int] = listener.getsockname()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await respond(Request(scope, receive))
            await response(scope, receive, send)

        # Mistakes of ours alone are shown: the terminal belongs to the run
        super().__init__(uvicorn.Config(
            app, http="h11", loop="asyncio", ws="none", lifespan="off", interface="asgi3",
            log_config=None, log_level="error", access_log=False, backlog=WAITING,
            proxy_headers=False, timeout_keep_alive=600,
        ))  # fmt: skip
        self.thread = threading.Thread(target=self.run, args=([listener],), daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stops listening."""
        self.should_exit = True
        self.thread.join(GRACE)
