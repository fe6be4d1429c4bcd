"""An OpenEnv server in this process; its import takes seconds, so only its tests import it."""

import threading
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Text(Action):
    message: str


class Echo(Observation):
    echoed_message: str
    message_length: int = 0


class EchoEnvironment(Environment):
    """Repeats each message; the reward is a tenth of its length; "bye" ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        return Echo(echoed_message=f"seed {seed}")

    def step(self, action, timeout_s=None, **options):
        length = len(action.message)
        return Echo(
            echoed_message=action.message,
            message_length=length,
            reward=None if length == 0 else length / 10,
            done=action.message == "bye",
        )

    @property
    def state(self):
        return State()


class Move(Action):
    row: int
    column: int
    note: str = ""


class Server:
    def __init__(self, action=Text):
        app = create_fastapi_app(EchoEnvironment, action, Echo, max_concurrent_envs=8)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while self.thread.is_alive() and not self.server.started:
            time.sleep(0.02)
        self.url = "http://{}:{}".format(*self.server.servers[0].sockets[0].getsockname())

    def stop(self):
        self.server.should_exit = True
        self.thread.join(timeout=60)
