"""The program that runs model-written code and answers calls of its function. It imports nothing of this package."""

PROGRAM = r"""
import json, os, sys

questions, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
os.dup2(2, 1)  # what the code prints goes nowhere
os.dup2(2, 0)


def tell(number, value):
    data = (json.dumps({"number": number, "value": value}, allow_nan=False) + "\n").encode()
    while data:
        data = data[os.write(answers, data):]


first = json.loads(questions.readline())
names = {"__name__": "solution", "__builtins__": __builtins__}
exec(compile(first["source"], "solution", "exec"), names)
function = names[first["entry"]]
tell(first["number"], True)
for line in questions:
    asked = json.loads(line)
    tell(asked["number"], function(*asked["arguments"]))
"""
