"""The same agent with the OpenAI Agents SDK, which asks the Responses API.

pip install openai-agents
"""

import agents
from openai import AsyncOpenAI

from environments.agents.plain import calculate

agents.set_tracing_disabled(True)


async def run(task: dict, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = agents.Agent(
            name="calculator",
            model=agents.OpenAIResponsesModel("picorl", client),
            tools=[agents.function_tool(calculate)],
        )
        result = await agents.Runner.run(agent, task["question"], max_turns=3)
    return float(f"<answer>{task['answer']}</answer>" in str(result.final_output))
