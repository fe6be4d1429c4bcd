"""A task of verifiers 0.4, whose harness asks the endpoint and whose reward is printed.

It runs in an environment of its own, with a network: the harness fetches its packages.

    python -m venv other && other/bin/pip install verifiers uv
    PATH=$PWD/other/bin:$PATH python train.py --env "agent:command=other/bin/python \
        runs/agents/verifiers_task.py,data=environments/agents/sums.jsonl"
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(f"<answer>{self.data.answer}</answer>" in trace.last_reply)


async def main() -> None:
    row = json.load(sys.stdin)
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    agent = vf.make_agent(
        vf.AgentConfig(
            harness={"id": "null"}, runtime=vf.SubprocessConfig(), model="picorl", client=client
        )
    )
    task = SumTask(SumData(prompt=row["question"], answer=row["answer"]), vf.TaskConfig())
    trace = await agent.run(task)
    if not trace.ok:
        sys.exit(str(trace.last_error))
    print(trace.reward)


if __name__ == "__main__":
    asyncio.run(main())
