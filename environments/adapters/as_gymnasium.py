"""One of our environments as a gymnasium.Env: text in, text out.

    env = as_gymnasium(make("letter_counting:difficulty=2"))
    observation, info = env.reset(seed=7)
    observation, reward, terminated, truncated, info = env.step("c h e r1 <answer>1</answer>")

The first observation joins the contents of the opening messages by empty lines; the last is empty,
as nothing is said after the end. `reset(seed=n)` plays the task of seed n, a reset without a seed
one drawn from TRAIN_SEEDS by `np_random`. Reward and info are passed through; nothing truncates.

>>> join([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}])
'Be brief.\\n\\n2 + 2?'
"""

from typing import Any

from core.types import Message, UsageError
from environments.base import TRAIN_SEEDS, Env

LONGEST_TEXT = 100_000  # characters
CHARACTERS = "".join(map(chr, range(0x3000)))  # alphabets, punctuation, symbols


def as_gymnasium(env: Env) -> Any:
    """The environment as a `gymnasium.Env` with two Text spaces.

    Raises UsageError where Gymnasium isn't installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise UsageError('as_gymnasium needs gymnasium: pip install -e ".[envs]"') from None

    class AsGymnasium(gymnasium.Env[str, str]):
        metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it
        observation_space = text_space()
        action_space = text_space()

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            if seed is None:
                seed = int(self.np_random.integers(TRAIN_SEEDS.start, TRAIN_SEEDS.stop))
            return join(env.reset(seed)), {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            step = env.step(action)
            observation = step.message["content"] if step.message else ""
            return observation, float(step.reward), step.done, False, dict(step.info)

    return AsGymnasium()


def text_space() -> Any:
    """A Gymnasium space of texts, the empty one included."""
    import gymnasium

    return gymnasium.spaces.Text(LONGEST_TEXT, min_length=0, charset=CHARACTERS)


def join(messages: list[Message]) -> str:
    """The contents of several messages, in order, empty lines between them."""
    return "\n\n".join(message["content"] for message in messages)
