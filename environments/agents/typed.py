"""The same agent with Pydantic AI, whose tools are typed functions.

pip install "pydantic-ai-slim[openai]"
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from environments.agents.plain import calculate

LIMITS = UsageLimits(request_limit=3)


async def run(task: dict, base_url: str, api_key: str) -> float:
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel("picorl", provider=provider), tools=[calculate])
    result = await agent.run(task["question"], usage_limits=LIMITS)
    return float(f"<answer>{task['answer']}</answer>" in result.output)
