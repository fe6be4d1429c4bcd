"""The same agent with smolagents.

pip install "smolagents[openai]"
"""

import smolagents

from environments.agents import plain


@smolagents.tool
def calculate(expression: str) -> str:
    """Compute an expression.

    Args:
        expression: Such as (2 + 3) * 4.
    """
    return plain.calculate(expression)


def run(task: dict, base_url: str, api_key: str) -> float:
    model = smolagents.OpenAIServerModel("picorl", api_base=base_url, api_key=api_key)
    agent = smolagents.ToolCallingAgent(
        [calculate], model, max_steps=3, verbosity_level=smolagents.LogLevel.OFF
    )
    return float(task["answer"] in str(agent.run(task["question"])))
