"""An agent with a calculator, written with the openai package alone; it knows nothing of picoRL.

It runs against any server that speaks OpenAI's API: `OPENAI_BASE_URL=.. python plain.py`.
"""

import json
import re

import openai

CALCULATE = {
    "name": "calculate",
    "description": "Compute an expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Such as (2 + 3) * 4."}},
        "required": ["expression"],
    },
}


def calculate(expression: str) -> str:
    if not re.fullmatch(r"-?\d{1,9}( [-+*] -?\d{1,9})*", expression):
        return "error: not an expression of integers with + - *"
    return str(eval(expression))  # noqa: S307  only digits and operators


def run(task: dict, client: openai.OpenAI) -> float:
    messages: list = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        tools: list = [{"type": "function", "function": CALCULATE}]
        answer = client.chat.completions.create(model="picorl", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            try:
                result = calculate(**json.loads(call.function.arguments))
            except TypeError as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return float(f"<answer>{task['answer']}</answer>" in (message.content or ""))


if __name__ == "__main__":
    question = "What is 12 * 34? Use the tool, or end with <answer>number</answer>."
    print(run({"question": question, "answer": "408"}, openai.OpenAI()))
