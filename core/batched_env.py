"""Many environments at once: tasks in, rollouts out.

Each round asks every episode that is still open for its next prompt, samples all of them in one
batch, and steps each environment with its text. Every episode that was begun is kept, however early
it ended, so short games aren't favoured.
"""

from collections.abc import Callable
from dataclasses import replace

from core.chat import following_ids, prompt_ids
from core.model import Policy
from core.sampler import Sampler, SamplingParams
from core.tasks import Task
from core.types import Completion, Message, Rollout, Turn
from environments.base import Env, MultiAgentEnv, Step, make

PLAYER = "player"  # the one agent of a single-player environment


class BatchedEnv:
    """Plays tasks with a policy. Environments are built once for each spec and used again."""

    def __init__(self, policy: Policy, max_turns: int):
        self.policy = policy
        self.max_turns = max_turns
        self.idle: dict[str, list[MultiAgentEnv]] = {}

    def collect(
        self,
        tasks: list[Task],
        sampler: Sampler,
        params: SamplingParams,
        on_progress: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Play each task with the sampler; a Rollout for each agent, in the order of the tasks."""

        def respond(seats: list["_Seat"], round_: int) -> list[Completion]:
            # another seed each round, or equal prompts would draw equal completions
            now = replace(params, seed=params.seed + round_)
            return sampler.sample([seat.prompt for seat in seats], now, on_progress)

        return self._play(tasks, respond)

    def demonstrate(self, tasks: list[Task]) -> list[Rollout]:
        """Play each task as its environment demonstrates it; single-player environments only.

        Raises ValueError where an environment has no demonstration to give.
        """
        tokenizer, closing = self.policy.tokenizer, self.policy.end_of_turn_id

        def respond(seats: list["_Seat"], round_: int) -> list[Completion]:
            completions = []
            for seat in seats:
                env = seat.env.env if isinstance(seat.env, _Solo) else None
                text = env.demonstrate(hasty=seat.task.hasty) if env else None
                if text is None:
                    raise ValueError(f"{seat.task.env} has no demonstrations for a warm start")
                ids = [*tokenizer.encode(text, add_special_tokens=False), closing]
                completions.append(Completion(ids, [0.0] * len(ids), text, "stop"))
            return completions

        return self._play(tasks, respond)

    def _play(self, tasks: list[Task], respond: Callable) -> list[Rollout]:
        envs = [self._take(task.env) for task in tasks]
        all_seats: list[list[_Seat]] = []
        for task, env in zip(tasks, envs, strict=True):
            openings = env.reset(task.seed)
            all_seats.append([_Seat(self.policy, task, env, a, m) for a, m in openings.items()])
        for round_ in range(self.max_turns):
            asked = [[s for s in seats if s.prompt] for seats in all_seats]
            flat = [seat for seats in asked for seat in seats]
            if not flat:
                break
            written = iter(respond(flat, round_))
            for seats, here, task, env in zip(all_seats, asked, tasks, envs, strict=True):
                if not here:
                    continue
                responses = {seat.agent: seat.write(next(written)) for seat in here}
                by_agent = {seat.agent: seat for seat in seats}
                for agent, step in env.step(responses).items():
                    if agent not in by_agent:  # joins late: its first message opens its chat
                        by_agent[agent] = _Seat(self.policy, task, env, agent, [])
                        seats.append(by_agent[agent])
                    by_agent[agent].read(step)
        for task, env in zip(tasks, envs, strict=True):
            self.idle[task.env].append(env)
        return [seat.finish() for seats in all_seats for seat in seats]

    def _take(self, spec: str) -> MultiAgentEnv:
        pool = self.idle.setdefault(spec, [])
        if pool:
            return pool.pop()
        env = make(spec)
        return _Solo(env) if isinstance(env, Env) else env


class _Solo(MultiAgentEnv):
    """A single-player environment, seen as one with one agent."""

    def __init__(self, env: Env):
        self.env = env

    def reset(self, seed: int) -> dict[str, list[Message]]:
        return {PLAYER: self.env.reset(seed)}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        return {PLAYER: self.env.step(responses[PLAYER])}


class _Seat:
    """One agent of one episode: its chat so far, as messages and as ids."""

    def __init__(
        self, policy: Policy, task: Task, env: MultiAgentEnv, agent: str, messages: list[Message]
    ):
        self.policy, self.task, self.env, self.agent = policy, task, env, agent
        self.rollout = Rollout(task.env, agent, task.seed, task.group_id, list(messages))
        self.prompt = prompt_ids(policy.tokenizer, messages) if messages else []  # []: don't ask
        self.done = False
        self.ended_turn = False

    def write(self, completion: Completion) -> str:
        """Record what was sampled in the context of `self.prompt`; return its text."""
        self.rollout.turns.append(
            Turn(
                self.prompt,
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
            )
        )
        self.rollout.messages.append({"role": "assistant", "content": completion.text})
        self.ended_turn = completion.token_ids[-1] == self.policy.end_of_turn_id
        self.context = self.prompt + completion.token_ids
        self.prompt = []
        return completion.text

    def read(self, step: Step) -> None:
        """Take the reward for the last turn, and the next message if there is one."""
        if self.rollout.turns:
            self.rollout.turns[-1].reward += float(step.reward)
        self.rollout.info = step.info or self.rollout.info
        self.done = step.done
        if step.message is None:
            return
        self.rollout.messages.append(step.message)
        if step.done:
            return
        if not self.rollout.turns:
            self.prompt = prompt_ids(self.policy.tokenizer, self.rollout.messages)
            return
        more = following_ids(self.policy.tokenizer, self.rollout.messages, self.ended_turn)
        if len(self.context) + len(more) < self.policy.max_length:  # room to write at least one
            self.prompt = self.context + more

    def finish(self) -> Rollout:
        self.rollout.truncated = not self.done
        return self.rollout
