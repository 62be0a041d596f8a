"""The agent's side of the text: prompts, action formats, and chat rendering turn by turn into token ids.

Tokens are canonical. A conversation is rendered once, left to right: `Chat.start` gives the ids of the instructions and
the first observation, `Chat.turn` those that follow a reply. Nothing is ever decoded and encoded again, so each turn's
prompt extends the last one exactly, whatever the chat template would do to old turns (Qwen3's drops their <think>).
"""

import ast
import json
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from envs import Env, Step

if TYPE_CHECKING:  # playing by hand needs no transformers
    from transformers import PreTrainedTokenizerBase

LOCK = threading.Lock()
FORMATS = {  # action format -> what the agent is told about it
    "plain": "",
    "react": "\n\nThink first, then act. Answer in this form:\nThought: what you see and what to do next\n"
             "Action: one action, nothing else",
    "tags": "\n\nThink first, then act. Answer in this form:\n<think> what you see and what to do next </think>\n"
            "<action> one action, nothing else </action>",
    "backticks": "\n\nThink first, then give one action between triple backticks, and nothing else between them:\n```action```",
    "json": "\n\nAnswer with one function call in JSON:\n"
            '{"thought": "what you see and what to do next", "name": "act", "arguments": {"action": "one action"}}',
    "code": '\n\nAnswer with a block of Python that calls act once, thoughts as comments:\n```python\n'
            '# what you see and what to do next\nact("one action")\n```',
}
ONE_ACTION = "There must be one action in your reply, but there {}."  # what the agent is told where `parse` finds no action, or several
PLAN = "\n\nBefore you act, write a plan: in a few short lines, the steps that you expect to take. No action yet."
REFLECT = "\n\nThat was no action that can be taken. Say in a sentence what went wrong and what to do instead. No action yet."
REFLECT_ON_ALL = "\n\nThis attempt has failed. Say in a few sentences what went wrong and what to do otherwise. No action yet."
ACT = "Go on: one action."
AGAIN = "You have another attempt, from the beginning.\n\n"


def instructions(prompt: str, action_format: str = "plain") -> str:
    """The first user message: the world's own `prompt` and how to answer. Raises ValueError for an unknown format."""
    if action_format not in FORMATS:
        raise ValueError(f"unknown action format '{action_format}'; choose from {', '.join(FORMATS)}")
    return prompt + FORMATS[action_format]


def actions_in(reply: str, action_format: str = "plain") -> list[str]:
    """All actions in a reply, in order; [] for a reply that is cut off before its first one ends. Never raises."""
    if action_format == "react":
        return [part.strip() for part in reply.split("Action:")[1:]]
    if action_format == "tags":  # SearchQA's are actions with their tags
        reply = re.sub(r"<think>.*?</think>", "", reply, flags=re.DOTALL)
        return [(text if tag == "action" else f"<{tag}>{text}</{tag}>").strip()
                for tag, text in re.findall(r"<(action|search|answer)>(.*?)</\1>", reply, re.DOTALL)]
    if action_format == "backticks":
        return [part.strip() for part in re.findall(r"```(.*?)```", reply, re.DOTALL)]
    if action_format == "json":
        return _calls_in_json(reply)
    if action_format == "code":
        return _calls_in_code(reply)
    return [reply.strip()]


def _calls_in_json(reply):
    found, at = [], 0
    while (at := reply.find("{", at)) >= 0:
        try:
            value, at = json.JSONDecoder().raw_decode(reply, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        action = value.get("arguments", {}).get("action") if isinstance(value.get("arguments", {}), dict) else None
        if value.get("name") == "act" and isinstance(action, str):
            found.append(action.strip())
    return found


def _calls_in_code(reply):
    found = []
    for block in re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", reply, re.DOTALL):
        try:
            nodes = list(ast.walk(ast.parse(block)))  # read, never run
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "act":
                strings = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                found.append(strings[0].strip() if len(node.args) == len(strings) == 1 and not node.keywords else "")
    return found


def parse(reply: str, action_format: str = "plain") -> str:
    """The action in a reply; "" (which no world accepts) if there is none or more than one. Never raises.

    >>> parse(" turn left\\n"), parse("Thought: a wall.\\nAction: turn left", "react"), parse("Action: a Action: b", "react")
    ('turn left', 'turn left', '')
    >>> parse('{"name": "act", "arguments": {"action": "turn left"}}', "json"), parse('```python\\nact("turn left")\\n```', "code")
    ('turn left', 'turn left')
    >>> parse("<think>a <b> wall</think><action> turn left </action>", "tags"), parse("I go. ```turn left```", "backticks")
    ('turn left', 'turn left')
    """
    found = actions_in(reply, action_format)
    return found[0] if len(found) == 1 else ""


def complaint(reply: str, action_format: str) -> str:
    """What the agent is told about a reply in which `parse` finds no action, or more than one.

    >>> complaint("Action: a Action: b", "react")
    'There must be one action in your reply, but there are 2. Answer in the form that you were told at the start.'
    """
    n = len([a for a in actions_in(reply, action_format) if a])
    return ONE_ACTION.format(f"are {n}" if n > 1 else "is none") + (
        " Answer in the form that you were told at the start." if FORMATS[action_format] else "")


class Dialogue:
    """What an episode says to the agent, and what becomes of its replies: an action for the world, or, where it was asked for one
    (`aside`), a plan or a reflection, which no world sees but which is a turn like any other.

    number: the item's. plan: ask for a plan first. reflect: ask what went wrong after an invalid action, and after a failed episode,
    which may then be tried once more; both only while there is a turn left to act in."""

    def __init__(self, number: int, horizon: int, action_format: str = "plain", plan: bool = False, reflect: bool = False):
        self.number, self.horizon, self.format, self.plan, self.reflect = number, horizon, action_format, plan, reflect
        self.turns, self.aside, self.tried, self.last = 0, "", False, Step("")  # tried: there was a first attempt

    def begin(self, env: Env) -> tuple[str, str]:
        """-> the instructions and the first observation. A world that takes whole replies says itself what they look like."""
        observation = env.reset(self.number)
        if self.plan and self.horizon > 1:
            self.aside, observation = "plan", observation + PLAN
        return instructions(env.prompt, "plain" if env.whole_reply else self.format), observation

    def reply(self, env: Env, text: str) -> Step:
        """Takes the agent's reply -> the world's step, or one without a reward where the world did not see it."""
        was, self.aside, self.turns = self.aside, "", self.turns + 1
        action = text if env.whole_reply else parse(text, self.format)
        if was:
            self.tried |= was == "reflection on all"
            again = AGAIN + env.reset(self.number) if was == "reflection on all" else ACT
            step = Step(again, score=self.last.score, progress=0.0 if was == "reflection on all" else self.last.progress)
        elif action or env.whole_reply:
            step = env.step(action)
        else:
            step = Step(complaint(text, self.format), score=self.last.score, valid=False, progress=self.last.progress)
        if self.reflect and not was and self.horizon - self.turns > 1:
            if step.done and not (step.success or self.tried):
                self.aside, step = "reflection on all", replace(step, done=False, observation=step.observation + REFLECT_ON_ALL)
            elif not (step.valid or step.done):
                self.aside, step = "reflection", replace(step, observation=step.observation + REFLECT)
        self.last = step
        return step


class Chat:
    """A tokenizer's chat template, cut into the pieces between messages.

    `end_id` is the end-of-turn token: what the policy samples to finish a reply."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        marks = ["@first@", "@reply@", "@next@"]
        roles = ["user", "assistant", "user"]
        text = tokenizer.apply_chat_template(
            [{"role": r, "content": m} for r, m in zip(roles, marks)], tokenize=False, add_generation_prompt=True)
        pieces = []
        for mark in marks:
            if text.count(mark) != 1:
                raise ValueError("this tokenizer's chat template does not show each message once, in order")
            piece, text = text.split(mark)
            pieces.append(self._ids(piece))
        self.head, self.to_reply, self.to_user = pieces  # before the instructions, before "OK", before an observation
        self.to_policy = self._ids(text)  # between an observation and the reply: the generation prompt
        self.end_id, self.ok = self.to_user[0], self._ids("OK")

    def _ids(self, text, trusted=True):
        # an observation that spells "<|im_end|>" is text, not the special token; a tokenizer must not be changed (its flag for
        # special tokens) while another thread uses it
        # without transformers' wrapper, which takes as long again; `encode_batch` lets other threads run, `encode` does not
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        with LOCK:
            if fast is None or fast.truncation or fast.padding:
                return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not trusted)
            if fast.encode_special_tokens == trusted:
                fast.encode_special_tokens = not trusted
            return fast.encode_batch([text], add_special_tokens=False)[0].ids

    def start(self, prompt: str, observation: str) -> list[int]:
        """Ids of the instructions, the fixed reply "OK", the first observation and the generation prompt."""
        return (self.head + self._ids(prompt.strip(), False) + self.to_reply + self.ok + self.to_user
                + self._ids(observation.strip(), False) + self.to_policy)

    def turn(self, observation: str, closed: bool) -> list[int]:
        """Ids between a reply and the next one. `closed`: the policy wrote the end-of-turn token itself; a reply that was
        cut gets it here, as part of the prompt and so outside the loss."""
        return (self.to_user[1:] if closed else self.to_user) + self._ids(observation.strip(), False) + self.to_policy
