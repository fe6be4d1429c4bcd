"""The agent of environments/agents/plain.py with litellm: pip install litellm"""

import json

import litellm

from environments.agents.plain import CALCULATE, calculate


def run(task: dict, base_url: str, api_key: str) -> float:
    messages: list = [{"role": "user", "content": task["question"]}]
    tools = [{"type": "function", "function": CALCULATE}]
    for _ in range(3):
        answer = litellm.completion(
            "openai/picorl", messages, api_base=base_url, api_key=api_key, tools=tools
        )
        messages.append(message := answer.choices[0].message)
        for call in message.tool_calls or []:
            try:
                result = calculate(**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return float(f"<answer>{task['answer']}</answer>" in (message.content or ""))
