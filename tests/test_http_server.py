"""The server of the endpoint."""

import socket

import httpx
from starlette.responses import Response

from environments.plumbing.http_server import Server


def test_answers_are_not_held_back_and_a_mistake_is_shown_and_ends_nothing(capfd, caplog):
    async def respond(request):
        if await request.body() == b"fail":
            raise KeyError("a mistake")
        return Response(request.client.host)

    server = Server(respond)
    url, forged = "http://{}:{}".format(*server.address), {"X-Forwarded-For": "1.2.3.4"}
    with httpx.Client(trust_env=False) as client:
        assert client.get(url, headers=forged).text == "127.0.0.1"
        [connection] = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert capfd.readouterr() == ("", "") and not caplog.text
        assert client.post(url, content="fail").status_code == 500
        assert "KeyError: 'a mistake'" in caplog.text
        assert client.post(url, content=b"x" * 20_000_000).text == "127.0.0.1"
    server.close()
    again = Server(respond, port=server.address[1])
    again.close()
    assert again.address == server.address
