"""An agent that any policy earns a reward with, sometimes: by the length of its two answers."""


def run(task, client):
    messages, length = [{"role": "user", "content": task["question"]}], 0
    for _ in range(2):
        answer = client.chat.completions.create(model="picorl", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And now?"}]
        length += len(answer.choices[0].message.content)
    return length % 3 / 2
