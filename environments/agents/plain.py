"""An agent with a calculator, written with the openai package alone, for any server that speaks
OpenAI's API: `OPENAI_BASE_URL=.. OPENAI_API_KEY=.. python plain.py`."""

import json
import re

import openai

PROPERTIES = {"expression": {"type": "string", "description": "Such as (2 + 3) * 4."}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["expression"]}
CALCULATE = {"name": "calculate", "description": "Compute an expression.", "parameters": PARAMETERS}


def calculate(expression: str) -> str:
    number = r"-?(0|[1-9]\d{0,8})"
    if not re.fullmatch(f"{number}( [-+*] {number})*", expression):
        return "error: not an expression of integers with + - *"
    return str(eval(expression))  # noqa: S307  only digits and operators


def run(task: dict, client: openai.OpenAI) -> float:
    messages: list = [{"role": "user", "content": task["question"]}]
    tools: list = [{"type": "function", "function": CALCULATE}]
    for _ in range(3):
        answer = client.chat.completions.create(model="picorl", messages=messages, tools=tools)
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


if __name__ == "__main__":
    question = "What is 12 * 34? Use the tool, or end with <answer>number</answer>."
    print(run({"question": question, "answer": "408"}, openai.OpenAI()))
