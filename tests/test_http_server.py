"""The server of the endpoint and of the page: what reaches it, and who is not waited for."""

import asyncio
import socket
import threading

import httpx
import pytest
from starlette.responses import Response

from environments.plumbing.http_server import Server, TooLarge, read_body


@pytest.fixture
def serve():
    servers = []

    def serve(respond, **options):
        servers.append(Server(respond, **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


async def echo(request):
    try:
        return Response(await read_body(request, 10))
    except TooLarge as error:
        return Response(str(error), 413)


def exchange(server, text):
    """All that comes back until the server closes the connection."""
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


HEAD = "POST / HTTP/1.1\r\nHost: a\r\n"
CLOSE = f"{HEAD}Connection: close\r\n"


@pytest.mark.parametrize("text, status, body", [
    (f"{CLOSE}Content-Length: 10\r\n\r\n0123456789", 200, "0123456789"),
    (f"{CLOSE}Transfer-Encoding: chunked\r\n\r\n4\r\n0123\r\n2\r\n45\r\n0\r\n\r\n", 200, "012345"),
    (f"{CLOSE}\r\n", 200, ""),
    (f"{CLOSE}Content-Length: 11\r\n\r\n", 413, "a request has at most 10 bytes"),  # it is not read
    (f"{CLOSE}Transfer-Encoding: chunked\r\n\r\n0b\r\n01234567890\r\n", 413, "at most 10 bytes"),
    (f"{HEAD}Content-Length: x\r\n\r\n", 400, ""),
    (f"{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, ""),
    (f"{HEAD}A: {'a' * 65_536}\r\n", 400, ""),
    ("nonsense\r\n\r\n", 400, ""),
])  # fmt: skip
def test_a_request_of_any_form_gets_an_answer(serve, text, status, body, capfd):
    server = serve(echo)
    answer = exchange(server, text)
    assert answer.startswith(f"HTTP/1.1 {status} ") and answer.endswith(body)
    url = "http://{}:{}".format(*server.address)
    assert httpx.post(url, content="ok", trust_env=False).text == "ok"
    assert capfd.readouterr() == ("", "")


def test_who_sends_far_too_much_reads_why(serve):
    url = "http://{}:{}".format(*serve(echo).address)
    with httpx.Client(trust_env=False) as client:
        assert client.post(url, content=b"x" * 20_000_000).status_code == 413
        assert client.post(url, content="ok").text == "ok"


@pytest.mark.parametrize("text", ["", HEAD, f"{HEAD}Content-Length: 9\r\n\r\n0"])
def test_half_a_request_is_not_waited_for(serve, text):
    assert exchange(serve(echo, idle=0.1), text) == ""


@pytest.mark.parametrize("size", [0, 10, 999_999])  # uvicorn stops to read after a long body
def test_who_hangs_up_cancels_the_answer(serve, size):
    begun, cancelled = threading.Event(), threading.Event()

    async def wait(request):
        await read_body(request, 999_999)
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with socket.create_connection(serve(wait).address) as connection:
        connection.sendall(f"{HEAD}Content-Length: {size}\r\n\r\n{'x' * size}".encode())
        assert begun.wait(60) and not cancelled.is_set()
    assert cancelled.wait(60)


def test_no_header_says_who_asks_and_answers_are_not_held_back(serve):
    async def who(request):
        return Response(request.client.host)

    server = serve(who)
    with httpx.Client(trust_env=False) as client:
        url, forged = "http://{}:{}".format(*server.address), {"X-Forwarded-For": "1.2.3.4"}
        assert client.get(url, headers=forged).text == "127.0.0.1"
        [connection] = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_closing_ends_what_waits_and_frees_the_port(serve):
    begun = threading.Event()

    async def wait(request):
        begun.set()
        await asyncio.Event().wait()

    server = serve(wait)
    with socket.create_connection(server.address, timeout=60) as connection:
        connection.sendall(f"{HEAD}\r\n".encode())
        assert begun.wait(60)
        server.close()
        assert not server.thread.is_alive()
        assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
    assert serve(echo, port=server.address[1]).address == server.address


def test_a_mistake_in_the_answer_is_shown_and_ends_nothing(serve, capfd):
    async def fail(request):
        raise KeyError("a mistake")

    url = "http://{}:{}".format(*serve(fail).address)
    for _ in range(2):
        assert httpx.get(url, trust_env=False).status_code == 500
    assert capfd.readouterr().err.count("KeyError: 'a mistake'") == 2
