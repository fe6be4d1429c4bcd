"""The agent with Microsoft's Semantic Kernel: pip install semantic-kernel"""

from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from environments.agents import plain


class Calculator:
    @kernel_function(description="Compute an expression.")
    def calculate(self, expression: str) -> str:
        return plain.calculate(expression)


async def run(task: dict, base_url: str, api_key: str) -> float:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        service = OpenAIChatCompletion(ai_model_id="picorl", async_client=client)
        agent = ChatCompletionAgent(service=service, plugins=[Calculator()])
        answer = await agent.get_response(messages=task["question"])
    return float(f"<answer>{task['answer']}</answer>" in str(answer))
