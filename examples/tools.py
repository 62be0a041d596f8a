"""Tools beside the environment: a calculator and a notebook. A reply with `calc: 3 * 4` or
`note: the door is red` is not an action of the world; the tool answers, and the turn counts.

    python train.py --env textcraft --agent examples/tools.py:agent
"""

import ast
import operator
import re

from agent import Agent, Play, assistant, user

TELL = ("\n\nBeside these actions you have two tools. `calc: 3 * 4` computes, "
        "`note: TEXT` keeps a text, which is shown from then on.")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv, ast.USub: operator.neg}
CALL = re.compile(r"(calc|note): *(.+)", re.DOTALL)


def agent(play: Play) -> Agent:
    first, fixed_reply = play.start()
    messages = [first | {"content": first["content"] + TELL}, fixed_reply, user(play.reset())]
    notes = []
    while True:
        reply = yield messages
        messages.append(assistant(reply))
        call = CALL.search(reply)
        if not call:
            step = play.act(reply)
            if step.done:
                return
            answer = step.observation
        elif call[1] == "calc":
            answer = calculate(call[2].strip())
        else:
            notes.append(call[2].strip())
            answer = "Noted."
        shown = f"\n\nYour notes: {'; '.join(notes)}" if notes else ""
        messages.append(user(answer + shown))


def calculate(text: str) -> str:
    """The value of a sum, difference, product or quotient of numbers; no other code is run."""
    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError("not a number")

    try:
        return f"{value(ast.parse(text[:200], mode='eval').body):g}"
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return "That cannot be computed."


agent.instant = True  # it only computes
