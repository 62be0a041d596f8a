"""The agent's side of the text: prompts, action formats, and chat rendering turn by turn.

An agent is a generator: it yields the messages that the model is to answer, and is sent the reply.
`Play` is the episode as its agent sees it. `Chat` turns messages into token ids.

Tokens are canonical. Messages that only grow are rendered once, from left to right, so that each
prompt extends the previous one exactly. Where an agent shows the model something else (a window, a
summary), or a chat template rewrites history (Qwen3's drops earlier <think> blocks, GPT-OSS's the
analysis), the whole new prompt is rendered by the template. A reply that the policy sampled keeps
its ids there.
"""

import ast
import copy
import hashlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import re
import resource
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from envs import AgentError, Env, EnvError, Step, load_named, raise_if_item_unknown
from envs import read_settings, split_item, with_settings

if TYPE_CHECKING:  # transformers is not needed to play by hand
    from transformers import PreTrainedTokenizerBase

# ---- texts that are shown to the agent ----

FORMATS = {  # action format -> the text that describes it, appended to the environment's prompt
    "plain": "",
    "react": (
        "\n\nThink first, then act. Answer in this form:\n"
        "Thought: what you see and what to do next\n"
        "Action: one action, nothing else"),
    "tags": (
        "\n\nThink first, then act. Answer in this form:\n"
        "<think> what you see and what to do next </think>\n"
        "<action> one action, nothing else </action>"),
    "backticks": (
        "\n\nThink first, then give one action between triple backticks, "
        "and nothing else between them:\n"
        "```action```"),
    "json": (
        "\n\nAnswer with one function call in JSON:\n"
        '{"thought": "what you see and what to do next", '
        '"name": "act", "arguments": {"action": "one action"}}'),
    "code": (
        "\n\nAnswer with a block of Python that calls act once, thoughts as comments:\n"
        "```python\n"
        "# what you see and what to do next\n"
        'act("one action")\n'
        "```"),
}
ONE_ACTION = "There must be one action in your reply, but there {}."
SEE_FORMAT = " Answer in the form that you were told at the start."
PLAN = ("\n\nBefore you act, write a plan: "
        "in a few short lines, the steps that you expect to take. No action yet.")
REFLECT = ("\n\nThat was no action that can be taken. "
           "Say in a sentence what went wrong and what to do instead. No action yet.")
REFLECT_ON_ALL = ("\n\nThis attempt has failed. "
                  "Say in a few sentences what went wrong and what to do otherwise. No action yet.")
SUMMARISE = "\n\nSummarise in a few short lines what you know. No action yet."
ACT = "Go on: one action."
AGAIN = "You have another attempt, from the beginning.\n\n"
FIRST_REPLY = "OK"  # the fixed reply to the instructions


def instructions(prompt: str, action_format: str = "plain") -> str:
    """The first user message: the environment's `prompt` and a description of the action format.

    Raises ValueError for an unknown format.
    """
    if action_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"unknown action format '{action_format}'; choose from {known}")
    return (prompt + FORMATS[action_format]).strip()


# ---- from a reply to its action ----


def actions_in(reply: str, action_format: str = "plain") -> list[str]:
    """All actions in a reply, in order.

    [] for a reply that is cut off before its first action is complete. Never raises.
    """
    if action_format == "react":
        return [part.strip() for part in reply.split("Action:")[1:]]
    if action_format == "tags":
        return _actions_in_tags(reply)
    if action_format == "backticks":
        return [part.strip() for part in re.findall(r"```(.*?)```", reply, re.DOTALL)]
    if action_format == "json":
        return _actions_in_json(reply)
    if action_format == "code":
        return _actions_in_code(reply)
    return [reply.strip()]


def _actions_in_tags(reply: str) -> list[str]:
    """The texts of all <action> tags, and all <search> and <answer> tags.

    <search> and <answer> are SearchQA's own actions. They keep their tags.
    """
    reply = re.sub(r"<think>.*?</think>", "", reply, flags=re.DOTALL)
    found = []
    for tag, text in re.findall(r"<(action|search|answer)>(.*?)</\1>", reply, re.DOTALL):
        action = text if tag == "action" else f"<{tag}>{text}</{tag}>"
        found.append(action.strip())
    return found


def _actions_in_json(reply: str) -> list[str]:
    """The actions of all JSON objects in a reply that call the function "act"."""
    found = []
    start = reply.find("{")
    while start >= 0:
        try:
            call, end = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            # No JSON object begins at this brace. Try the next one.
            start = reply.find("{", start + 1)
            continue
        arguments = call.get("arguments", {})
        action = arguments.get("action") if isinstance(arguments, dict) else None
        if call.get("name") == "act" and isinstance(action, str):
            found.append(action.strip())
        start = reply.find("{", end)
    return found


def _actions_in_code(reply: str) -> list[str]:
    """The actions of all calls of `act` in the Python blocks of a reply.

    The code is parsed and never run. A call whose argument is not exactly one string literal gives
    the action "".
    """
    found = []
    for block in re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", reply, re.DOTALL):
        try:
            nodes = list(ast.walk(ast.parse(block)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in nodes:
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id == "act":
                found.append(_string_argument(node))
    return found


def _string_argument(call: ast.Call) -> str:
    """The argument of a call whose only argument is a string literal, else ""."""
    if len(call.args) != 1 or call.keywords:
        return ""
    argument = call.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value.strip()
    return ""


def parse(reply: str, action_format: str = "plain", lenient_as: str = "") -> str:
    """The action in a reply, or "" (which no environment accepts) if there is not exactly one.

    lenient_as: a world. Replies are then read as AgentGym's client of that world reads them (see
    `LENIENT`), or strictly if `LENIENT` does not have the world. Never raises.

    >>> parse(" turn left\\n")
    'turn left'
    >>> parse("Thought: a wall.\\nAction: turn left", "react")
    'turn left'
    >>> parse("Action: a Action: b", "react")
    ''
    >>> parse('{"name": "act", "arguments": {"action": "turn left"}}', "json")
    'turn left'
    >>> parse('```python\\nact("turn left")\\n```', "code")
    'turn left'
    >>> parse("<think>a <b> wall</think><action> turn left </action>", "tags")
    'turn left'
    >>> parse("I go. ```turn left```", "backticks")
    'turn left'
    >>> parse("Action: [turn left].\\nA wall", "react", lenient_as="babyai")
    'turn left'
    """
    if lenient_as in LENIENT:
        return LENIENT[lenient_as](reply, action_format)
    found = actions_in(reply, action_format)
    return found[0] if len(found) == 1 else ""


# How AgentGym's clients choose an action from a reply (agentenv/envs/*.py at 3ef9235). They read
# react, and JSON and code in forms that differ from ours. Here each client's choice applies to
# every format. Only in react can a reply without "Action:" count as an action.


def _only_words(reply: str, action_format: str) -> str:
    """The first line of the only action, without punctuation other than commas."""
    found = actions_in(reply, action_format)
    if len(found) != 1:
        return ""
    first_line = found[0].partition("\n")[0]
    return " ".join(re.sub("[^A-Za-z0-9, ]", "", first_line).split())


def _last(reply: str, action_format: str) -> str:
    """The last action."""
    found = actions_in(reply, action_format)
    return found[-1] if found else ""


def _first_or_bare(reply: str, action_format: str) -> str:
    """The first action; in react without any, the whole reply."""
    found = actions_in(reply, action_format)
    if not found and action_format == "react":
        return reply.strip()
    return found[0] if found else ""


def _last_or_bare_call(reply: str, action_format: str) -> str:
    """The last action; in react without any, the whole reply if it has a search or a click."""
    has_call = "search[" in reply or "click[" in reply
    if has_call and action_format == "react" and "Action:" not in reply:
        return reply.strip()
    return _last(reply, action_format)


def _sql(reply: str, action_format: str) -> str:
    """The last block of SQL between code fences; without any, the last action or the reply."""
    if "```sql" in reply:
        text = reply.split("```sql")[-1]
    elif action_format == "react" and "Action:" not in reply:
        text = reply
    else:
        text = _last(reply, action_format)
    return text.split("```")[0].strip()


LENIENT: dict[str, Callable[[str, str], str]] = {  # world -> (reply, action format) -> the action
    "babyai": _only_words,
    "textcraft": _only_words,
    "sciworld": _last,
    "alfworld": _last,
    "webshop": _last_or_bare_call,
    "sqlgym": _sql,
    "maze": _first_or_bare,
    "wordle": _first_or_bare,
}
PARSES = ("strict", "lenient")


def reply_with(action: str, action_format: str = "plain", thought: str = "") -> str:
    """A reply in which `parse` finds `action`: how the reply of an expert reads.

    >>> print(reply_with("turn left", "react", "a wall"))
    Thought: a wall
    Action: turn left
    """
    if action_format == "react":
        return f"Thought: {thought}\nAction: {action}"
    if action_format == "tags":
        return f"<think> {thought} </think>\n<action> {action} </action>"
    if action_format == "backticks":
        return f"{thought}\n```{action}```"
    if action_format == "json":
        call = {"thought": thought, "name": "act", "arguments": {"action": action}}
        return json.dumps(call)
    if action_format == "code":
        comment = thought.replace("\n", "\n# ")
        return f"```python\n# {comment}\nact({json.dumps(action, ensure_ascii=False)})\n```"
    return action


def complaint(reply: str, action_format: str) -> str:
    """What the agent is told about a reply in which `parse` finds no action or more than one.

    >>> print(complaint("Action: a Action: b", "react").replace(". ", ".\\n"))
    There must be one action in your reply, but there are 2.
    Answer in the form that you were told at the start.
    """
    num_actions = len(actions_in(reply, action_format))
    text = ONE_ACTION.format(f"are {num_actions}" if num_actions > 1 else "is none")
    if FORMATS[action_format]:
        text += SEE_FORMAT
    return text


# ---- agents ----

Messages = list[dict[str, str]]  # of a chat: {"role": "user" or another, "content": text}
# A generator. It yields the messages that the model is to answer, and is sent the model's reply.
# The episode ends when it returns, or after `horizon` replies.
Agent = Generator[Messages, str, None]
AGENTS = {  # name -> "module:function"
    "react": "agent:react",
    "window": "agent:window",
    "summary": "agent:summary",
}


def user(text: str) -> dict[str, str]:
    """A message to the model, without the spaces around it."""
    return {"role": "user", "content": text.strip()}


def assistant(text: str) -> dict[str, str]:
    """A message of the model."""
    return {"role": "assistant", "content": text}


class Play:
    """One episode as its agent sees it: the environment, with every step credited to the reply that
    the agent was sent last.

    item: "babyai_17". horizon: the largest number of replies. make_agent: the agent's function with
    its settings, see `load_agent`. lenient_as: see `parse`. texts: {"prompt": ..., "reply": ...}:
    "prompt" replaces the whole first message (the world's instructions and the action format),
    "reply" replaces FIRST_REPLY. training_step: 0 in evaluation. deadline: seconds that the agent
    and its environment have between two replies.

    An agent may set `kind`: what the next reply is, if not an action. Credit by state compares only
    replies of one kind. It may set `tools`, a list in OpenAI's form, for templates that show them.
    `turns`: replies so far. `cut`: the last reply reached --max_tokens.

    For drivers: `send` passes a reply on. Then `turn` is what the reply has earned: the sum of the
    rewards, and the newest score, success and progress. `forgets`: what was earned before does not
    count.
    """

    def __init__(self, env: Env, item: str, horizon: int,
                 make_agent: "Callable[[Play], Agent] | None" = None, action_format: str = "plain",
                 lenient_as: str = "", texts: dict[str, str] | None = None, training_step: int = 0,
                 deadline: float = 60.0):
        self.env = env
        self.item = item
        self.number = split_item(item)[1]
        self.horizon = horizon
        self.action_format = action_format
        self.lenient_as = lenient_as
        self.texts = texts or {}
        self.training_step = training_step
        self.deadline = deadline
        self.tools: list[dict] | None = None
        self.turns = 0
        self.turn = Step("")
        self.forgets = False
        self.kind = ""
        self.cut = False
        self._failure: Exception | None = None  # the environment's
        make_agent = make_agent or react
        self.is_instant = getattr(make_agent, "instant", False)
        self.agent = make_agent(self)

    # What an agent calls.

    def start(self) -> Messages:
        """The instructions and the fixed reply to them. An environment that takes whole replies
        describes their form in its own prompt."""
        action_format = "plain" if self.env.whole_reply else self.action_format
        text = self.texts.get("prompt") or instructions(self.env.prompt, action_format)
        return [{"role": "user", "content": text}, assistant(self.texts.get("reply", FIRST_REPLY))]

    def reset(self) -> str:
        """Begin the episode, perhaps once more -> the first observation. Raises ItemError if there
        is no such item."""
        with self._fault_of_environment():
            self.turn.progress = 0.0
            try:
                return _text(self.env.reset(self.number))
            except ValueError as e:
                raise_if_item_unknown(e)
                raise

    def act(self, reply: str) -> Step:
        """Let the environment take the action in a reply. A reply without exactly one action does
        not reach it: the step is invalid, and its observation says why."""
        whole = self.env.whole_reply
        action = reply if whole else parse(reply, self.action_format, self.lenient_as)
        if action or whole:
            return self.step(action)
        self.turn.valid = False
        return replace(self.turn, observation=complaint(reply, self.action_format), reward=0.0,
                       done=False)

    def step(self, action: str) -> Step:
        """Let the environment take an action. Its reward is the last reply's."""
        with self._fault_of_environment():
            step = self.env.step(action)
            _text(step.observation)
            if not all(map(math.isfinite, (step.reward, step.score, step.progress))):
                raise EnvError("a reward, score or progress is not finite")
            self.turn = replace(step, reward=self.turn.reward + step.reward,
                                valid=self.turn.valid and step.valid)
        self._check_reward(step.reward)
        return step

    def earn(self, reward: float, success: bool | None = None) -> None:
        """Credit a reward to the last reply, where no environment here gives one. The score is the
        same within 0 and 1. success: by default, whether the reward is positive. Raises ValueError
        for a reward that is not finite."""
        if not math.isfinite(reward):
            raise ValueError(f"a reward is a finite number, not {reward}")
        self._check_reward(reward)
        self.turn = replace(self.turn, reward=self.turn.reward + reward,
                            score=min(max(reward, 0.0), 1.0),
                            success=reward > 0 if success is None else success)

    def forget(self) -> None:
        """What was earned so far does not count: the episode is going to be played again."""
        self.forgets = True
        self.turn = replace(self.turn, reward=0.0)

    def valid_actions(self) -> list[str]:
        """`Env.valid_actions`."""
        with self._fault_of_environment():
            return self.env.valid_actions()

    def expert(self) -> str | None:
        """`Env.expert`."""
        with self._fault_of_environment():
            return self.env.expert()

    def _check_reward(self, reward: float) -> None:
        if reward and not self.turns:
            raise ValueError(f"a reward of {reward:g} before the first reply belongs to no reply")

    @contextmanager
    def _fault_of_environment(self) -> Iterator[None]:
        """What is raised in this block is the environment's failure and no bug of the agent."""
        try:
            yield
        except StopIteration as e:  # a generator cannot let it pass
            self._failure = EnvError(f"the world raised {e!r}")
            raise self._failure from e
        except (Exception, SystemExit) as e:
            self._failure = e
            raise

    # What a driver calls.

    def send(self, reply: str | None = None, cut: bool = False) -> Messages | None:
        """Pass a reply to the agent (None: start it) -> the messages that the model is to answer
        next; None: the agent has ended the episode. cut: see the class.

        An exception of the environment passes, also if the agent has caught it. Raises AgentError
        for any other exception of the agent, for messages of another form, and for an agent that
        ends the episode without having asked for a reply.
        """
        self.turn = replace(self.turn, observation="", reward=0.0, valid=True, done=False)
        self.turns += reply is not None
        self.forgets = False
        self.kind = ""
        self.cut = cut
        return self._resume(self.agent.send, reply)

    def throw(self, error: Exception) -> Messages | None:
        """Raise `error`, which its messages have caused, where the agent has yielded them -> see
        `send`."""
        return self._resume(self.agent.throw, error)

    def _resume(self, function: Callable[..., Messages], *args: object) -> Messages | None:
        messages = None
        try:
            messages = _checked(function(*args))
        except StopIteration:
            if not self.turns and self._failure is None:
                raise AgentError("the agent has ended the episode before the first reply") from None
        except (Exception, SystemExit) as e:
            if isinstance(e, EnvError):
                raise
            if self._failure is None:
                raise AgentError(f"the agent failed: {type(e).__name__}: {e}") from e
        if self._failure is not None:
            raise self._failure
        return messages

    def close(self) -> None:
        """Let the agent's generator run its `finally` blocks. A failure in them is printed."""
        try:
            self.agent.close()
        except Exception as e:
            print(f"the agent's end failed: {type(e).__name__}: {e}", file=sys.stderr)


def _checked(messages: Messages) -> Messages:
    """A copy of the messages, since the agent may change its own: role and content, no more.
    Raises ValueError for messages of another form."""
    copies = [{"role": m["role"], "content": m["content"]} for m in messages]
    for message in copies:
        if not all(isinstance(text, str) for text in message.values()):
            raise ValueError(f"role and content of a message are text, not {message}")
        message["content"].encode()  # raises UnicodeEncodeError
    if not copies or copies[-1]["role"] == "assistant":
        raise ValueError("the last message that an agent yields is one to the model")
    return copies


def _text(observation: str) -> str:
    """An observation of a world. Raises EnvError if it is no text that can be encoded."""
    if not isinstance(observation, str):
        raise EnvError(f"an observation is {type(observation).__name__}, not text")
    observation.encode()  # raises UnicodeEncodeError
    return observation


def react(play: Play, plan: bool = False, reflect: bool = False) -> Agent:
    """The model sees the whole conversation, and acts in every turn.

    plan: it is asked for a plan before the first action. reflect: it is asked for a reflection
    after an invalid action and after a failed episode, which is then played once more. Both only if
    at least one turn is left to act in after them.
    """
    observation = play.reset()
    messages = play.start()

    def ask(text: str, kind: str = "") -> Generator[Messages, str, str]:
        messages.append(user(text))
        play.kind = kind
        reply = yield messages
        messages.append(assistant(reply))
        return reply

    if plan and play.horizon > 1:
        yield from ask(observation + PLAN, "PLAN")
        observation = ACT
    attempts = 1
    while True:
        step = play.act((yield from ask(observation)))
        observation = step.observation
        reflects = reflect and play.horizon - play.turns > 1
        if reflects and step.done and not step.success and attempts == 1:
            attempts += 1
            play.forget()
            yield from ask(observation + REFLECT_ON_ALL, "RETRY")
            observation = AGAIN + play.reset()
        elif step.done:
            return
        elif reflects and not step.valid:
            yield from ask(observation + REFLECT, "REFLECT")
            observation = ACT


def window(play: Play, keep: int = 2) -> Agent:
    """The model sees the instructions, the last `keep` turns and the newest observation."""
    turns, observation = [], play.reset()
    while True:
        recent = turns[max(0, len(turns) - 2 * keep):]
        reply = yield [*play.start(), *recent, user(observation)]
        step = play.act(reply)
        if step.done:
            return
        turns += [user(observation), assistant(reply)]
        observation = step.observation


def summary(play: Play, every: int = 3) -> Agent:
    """After `every` actions the model writes a summary, which takes the place of what came before.
    A summary counts as a turn."""
    notes, observation = "", play.reset()
    while True:
        messages = [*play.start(), user(notes + observation)]
        for _ in range(every):
            reply = yield messages
            step = play.act(reply)
            if step.done:
                return
            observation = step.observation
            messages += [assistant(reply), user(observation)]
        play.kind = "SUMMARY"
        messages[-1] = user(observation + SUMMARISE)
        notes = f"What you know: {(yield messages)}\n\n"


# They only compute, so on a CPU the decode loop calls them itself, in instant worlds. Any other
# agent runs in the thread of its environment, with a deadline, unless it says the same of itself.
react.instant = window.instant = summary.instant = True


def load_agent(agent: str | Callable[..., Agent], settings: dict[str, Any]
               ) -> Callable[[Play], Agent]:
    """An agent's function with its settings.

    agent: a name of AGENTS, "FILE.py:FUNCTION", "module:function", or the function itself. Raises
    ValueError for an agent that does not exist, and for a setting that it does not have or that is
    not of the type of its default.
    """
    function = load_named(agent, AGENTS, "agent") if isinstance(agent, str) else agent
    name = agent if isinstance(agent, str) else getattr(agent, "__name__", "of your own")
    if not inspect.isgeneratorfunction(function):
        raise ValueError(f"agent {name} is no generator function: it should yield messages")
    return with_settings(function, settings, f"agent {name}")


def settings_of(agent_args: str, plan: bool = False, reflect: bool = False) -> dict[str, Any]:
    """--agent_args, --plan and --reflect as settings. Raises ValueError: see `read_settings`."""
    return (read_settings(agent_args, "--agent_args") | ({"plan": True} if plan else {})
            | ({"reflect": True} if reflect else {}))


def hash_of_sources(agent: str, settings: dict[str, Any]) -> str:
    """The SHA-256 of an agent's source file, and of the files that its settings name: a run is not
    continued with another agent. "" for an agent of AGENTS, which belongs to this project."""
    if agent in AGENTS:
        return ""
    named = [agent, *(word for value in settings.values() for word in str(value).split())]
    found = hashlib.sha256()
    for word in named:
        where, _, name = word.rpartition(":")
        path = Path(where if where and name.isidentifier() else word)
        if re.fullmatch(r"[\w.]+:\w+", word) and path.suffix != ".py":
            spec = importlib.util.find_spec(where)
            path = Path(spec.origin if spec and spec.origin else word)
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


# ---- from text to token ids ----

# The conversations that a chat template is tried with: the first is cut at these marks, and the
# second shows whether the template drops the thought of an earlier reply.
MARKS = {"@first@": "user", "@reply@": "assistant", "@next@": "user"}
THOUGHT = {"@first@": "user", "<think>\n@thought@\n</think>\n\n@reply@": "assistant",
           "@next@": "user"}
# What a chat template may take: usual ones take 0.05 s, and give less than 10 kB.
TEMPLATE_SECONDS = 2  # of processor time: a busy machine makes no template fail
TEMPLATE_MEMORY = 2**29  # bytes
TEMPLATE_LENGTH = 2**20  # bytes of text


def try_template(tokenizer: "PreTrainedTokenizerBase", system: str = "",
                 chat_args: str = "") -> dict[str, Any]:
    """Try a tokenizer's chat template -> what `Chat` takes as the tokenizer's `tried_template`:
    the template ("of"), the same with a fixed time ("template"), its arguments, the system message,
    and the conversations of MARKS ("marks") and THOUGHT ("thought") as it writes them.

    system: the text of a system message before every conversation; "": no such message. chat_args:
    see `read_settings`. The template is a program that comes with a model, so it is tried in a
    child process with limits. Raises ValueError if there is no template, for one that fails or
    exceeds them, and for one that does not use `system` or a name in `chat_args`.
    """
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: take its Instruct version, or give a "
                         "file with --chat_template")
    tried = {"of": tokenizer.chat_template, "template": with_fixed_time(tokenizer),
             "arguments": read_settings(chat_args, "--chat_args"), "system": system}
    conversations = [[{"role": role, "content": mark} for mark, role in marks.items()]
                     for marks in (MARKS, THOUGHT)]
    tried["marks"], tried["thought"] = _write_in_child(tokenizer, conversations, tried)
    if system.strip() not in tried["marks"]:
        raise ValueError("this tokenizer's chat template does not show the text of --system")
    return tried


def with_fixed_time(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The chat template, which shows the present time at any later time, too: the prompts of a run
    do not change at midnight. Raises ValueError for a form of the time that is not a literal."""
    template = tokenizer.get_chat_template()
    if "strftime_now(" not in template:
        return template
    forms = re.findall(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", template)
    if len(forms) < template.count("strftime_now("):
        raise ValueError("this tokenizer's chat template computes how it shows the time")
    now = datetime.now()
    times = json.dumps({form: now.strftime(form) for _, form in forms})
    macro = f"{{%- macro strftime_now(form) -%}}{{{{ {times}[form] }}}}{{%- endmacro %}}"
    return macro + "{{ '' }}" + template  # '': a line feed that the template begins with stays


def note_history(chat: "Chat") -> None:
    """Say on stderr what is done with a template that drops thoughts."""
    if chat.drops_thoughts:
        does = {"template": "a prompt that it rewrites begins a new segment (--history append "
                            "keeps every reply as it was sampled)",
                "append": "--history append keeps every reply as it was sampled"}[chat.history]
        print(f"this chat template drops the thoughts of earlier replies: {does}", file=sys.stderr)


def write(tokenizer: "PreTrainedTokenizerBase", messages: Messages, tried: dict[str, Any],
          tools: list[dict] | None = None) -> str:
    """The text of a conversation, and of the generation prompt, by the chat template."""
    if tried["system"] and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": tried["system"]}, *messages]
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=tried["template"], tokenize=False,
        add_generation_prompt=True, **tried["arguments"])


def _write_in_child(tokenizer: "PreTrainedTokenizerBase", conversations: list[Messages],
                    tried: dict[str, Any]) -> list[str]:
    """The conversations as the chat template writes them, in a child process with limits."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_texts, args=(tokenizer, conversations, tried, sender),
                         daemon=True)
    child.start()
    sender.close()
    texts, problem = [], f"gives no text within {TEMPLATE_SECONDS} s"
    try:
        if receiver.poll(20 * TEMPLATE_SECONDS):
            texts, problem = receiver.recv()
    except EOFError:
        pass  # its timer ended the child before it sent anything
    child.kill()
    child.join()
    receiver.close()
    if problem:
        raise ValueError(f"this tokenizer's chat template {problem}")
    return texts


def _matched(text: str, outline: list[str],
             messages: Messages) -> list[tuple[str, dict[str, str] | None]] | None:
    """`text` cut into the template's parts (`outline`) and the messages between them, which may
    lack their thoughts and the spaces around them: see `Chat._cut`. None: it is another text."""
    parts = []
    for before, mark, after in zip(outline[::2], outline[1::2], outline[2::2]):
        message = messages[int(re.sub(r"\D", "", mark))]
        content = message["content"]
        thought, _, rest = content.rpartition("</think>")
        forms = [content, content.strip(), rest, rest.lstrip("\n"), rest.strip()]
        if mark.startswith("@thought"):
            thought = thought.split("<think>")[-1]
            forms = [thought, thought.strip("\n"), thought.strip()]
        form = next((f for f in forms if text.startswith(before + f + after)), None)
        if form is None:
            return None
        parts += [(before, None), (form, message)]
        text = text[len(before) + len(form):]
    return [*parts, (text, None)] if text == outline[-1] else None


def _send_texts(tokenizer: "PreTrainedTokenizerBase", conversations: list[Messages],
                tried: dict[str, Any], sender: Connection) -> None:
    """In the child process: send the conversations' texts and "", or [] and what is wrong."""
    # The timer's signal ends the process, also within one long operation on a number or a string.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
    try:
        _limit_memory()
        for name in tried["arguments"]:
            if name not in _switches(tokenizer):
                raise ValueError(f"--chat_args: it has no switch '{name}'")
        texts = [write(tokenizer, messages, tried) for messages in conversations]
        answer = texts, ""
        if max(len(text.encode()) for text in texts) > TEMPLATE_LENGTH:
            answer = [], f"writes more than {TEMPLATE_LENGTH} bytes around three words"
    except Exception as e:  # whatever the template's program raises
        answer = [], f"fails: {type(e).__name__} {str(e)[:300]}"
    sender.send(answer)


def _switches(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """The names in the chat template's code, without those that it is always given."""
    pieces = Environment().lex(tokenizer.get_chat_template())
    names = {text for _, kind, text in pieces if kind == "name"}
    given = inspect.signature(tokenizer.apply_chat_template).parameters
    return names - {"messages", *given}


def _limit_memory() -> None:
    """Limit this process's address space to TEMPLATE_MEMORY bytes above its present size. Does
    nothing without /proc (outside Linux), which gives that size."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return
    size = int(status.read_text().split()[0]) * resource.getpagesize() + TEMPLATE_MEMORY
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or size < most:
        resource.setrlimit(resource.RLIMIT_AS, (size, most))


class Chat:
    """A tokenizer's chat template: messages as token ids.

    The template is tried once for a tokenizer, whose attribute `tried_template` keeps the result
    (see `try_template`). `prompt` renders a whole conversation by the template, in this process, in
    transformers' sandbox. Where a conversation only grows, `turns` gives the ids of the messages
    that follow a reply, from the pieces that the template writes between messages.

    history: "append": the ids of earlier replies stay as they are, also where the template would
    rewrite them. "template": every prompt is what the template writes. None: "template" where the
    template drops the thoughts of earlier replies (`drops_thoughts`), else "append", which then is
    the same.

    `end_id` is the end-of-turn token, which the policy samples to finish a reply.

    A template may have channels, as GPT-OSS's has: the policy first writes a message to the channel
    "analysis", then one to the channel "final". `final_header` is the ids that open the final
    message ([] without channels). The environment gets only the text after it. Before
    `final_header` an end-of-turn token does not end the reply; an end-of-sequence token (GPT-OSS's
    <|return|>) always does. Within a segment the analysis and the end-of-sequence token stay; the
    template would drop the analysis of earlier turns and write <|end|> instead.

    Raises ValueError for a template that fails, that does not show every message exactly once
    and in order, or that ends a reply with an ordinary token: replies would end anywhere.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", history: str | None = None):
        self.tokenizer = tokenizer
        # A copy of the fast tokenizer, because every transformers call resets
        # `encode_special_tokens` on the original. Calling it directly takes half the time.
        self.encoder = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self.encoder is not None:
            self.encoder.encode_special_tokens = True
            self.encoder.no_truncation()
            self.encoder.no_padding()
        tried = getattr(tokenizer, "tried_template", None)
        if tried is None or tried["of"] != tokenizer.chat_template:  # it was replaced
            tried = tokenizer.tried_template = try_template(tokenizer)
        self.tried = tried
        self.outlines: dict[str, list[str]] = {}  # see `_outline`
        # Cut the text at the marks.
        text = tried["marks"]
        pieces = []
        for mark in MARKS:
            if text.count(mark) != 1:
                raise ValueError(
                    "this tokenizer's chat template does not show each message once, in order")
            piece, text = text.split(mark)
            pieces.append(self._encode_piece(piece))
        # to_reply: between a message and a reply that is not the policy's. to_user: between a reply
        # and a message. to_policy: the generation prompt, between a message and the policy's reply.
        _, self.to_reply, self.to_user = pieces
        self.to_policy = self._encode_piece(text)
        if not self.to_user:
            raise ValueError("this tokenizer's chat template writes nothing after a reply, "
                             "so a reply would have no end")
        self.end_id = self.to_user[0]

        # Which tokens end a reply.
        self.eos_ids = {tokenizer.eos_token_id, *getattr(tokenizer, "generation_eos_ids", ())}
        special_ids = {*tokenizer.all_special_ids, *self.eos_ids}
        added = tokenizer.added_tokens_decoder
        special_ids.update(number for number, token in added.items() if token.special)
        if self.end_id not in special_ids:
            raise ValueError(
                "this tokenizer's chat template ends a reply with "
                f"{tokenizer.decode([self.end_id])!r}, which is neither a special token nor an "
                "end-of-sequence token: give another template with --chat_template")
        self.final_header = self._find_final_header(special_ids)
        self.reply_end_id = tokenizer.eos_token_id if self.final_header else self.end_id
        self.drops_thoughts = "@thought@" not in tried["thought"] or bool(self.final_header)
        self.history = history or ("template" if self.drops_thoughts else "append")

    def _find_final_header(self, special_ids: set[int]) -> list[int]:
        """The ids of `final_header`; [] for a template without channels.

        The template writes a reply of the history after the generation prompt. With channels it
        puts the header of the final channel between them. What stands there counts as a header if
        it begins and ends with special tokens, and if the end-of-turn token is not an
        end-of-sequence token.
        """
        if self.end_id in self.eos_ids or self.tokenizer.eos_token_id is None:
            return []
        count = len(self.to_policy)
        header = self.to_reply[count:]
        is_longer = self.to_reply[:count] == self.to_policy and len(header) > 0
        return header if is_longer and {header[0], header[-1]} <= special_ids else []

    def _encode_piece(self, text: str) -> list[int]:
        """The token ids of a piece of the template: "<|im_end|>" becomes the special token."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        """The token ids of a text that is not trusted: "<|im_end|>" stays ordinary text. Several
        threads may encode at the same time."""
        if self.encoder is None:
            return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        # `encode_batch` releases the interpreter to other threads; `encode` does not.
        return self.encoder.encode_batch([text], add_special_tokens=False)[0].ids

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def observation(self, text: str, max_ids: int | None = None) -> list[int]:
        """Token ids of a message's text. max_ids: how many there is room for; None: no limit.

        A text that is certainly longer is cut before it is encoded, which saves encoding
        megabytes. At least `max_ids` ids are still returned, so the caller sees that the
        message does not fit.
        """
        if max_ids is not None and len(text) > max_ids * self.longest_token:
            ids = self._encode(text[: max_ids * self.longest_token])
            if len(ids) >= max_ids:  # fewer: the tokenizer shortens the text before it cuts it
                return ids
        return self._encode(text)

    def prompt(self, messages: Messages, tools: list[dict] | None = None,
               sampled: Sequence[tuple[str, list[int]]] = (),
               max_ids: int | None = None) -> list[int]:
        """Ids of a whole conversation and the generation prompt, by the template.

        tools: see `Play`. sampled: (text, ids) of the replies that the policy has written, in
        order: a message that is one of them has its ids, and is not encoded again. max_ids: see
        `observation`. Raises EnvError for messages whose text the template changes, ValueError or
        whatever the template's program raises for others that it does not show.
        """
        rest = list(sampled)
        parts = []  # the ids of each part, from the last to the first
        for text, message in reversed(self._cut(messages, tools)):
            if message is None:
                parts.append(self._encode_piece(text))
                continue
            is_whole = message["role"] == "assistant" and text == message["content"]
            while is_whole and rest and rest[-1][0] != text and any(t == text for t, _ in rest):
                rest.pop()  # a later reply, which this prompt does not show
            if is_whole and rest and rest[-1][0] == text:
                parts.append(rest.pop()[1])
            else:
                parts.append(self.observation(text, max_ids))
        return [token for ids in reversed(parts) for token in ids]

    def _cut(self, messages: Messages,
             tools: list[dict] | None) -> list[tuple[str, dict[str, str] | None]]:
        """The template's text of a conversation, in parts: (text of the template, None), (text of a
        message, the message), ... No text of a message can be taken for one of the template,
        because the parts between the messages are known from a conversation of marks."""
        if self.tried["system"] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.tried["system"]}, *messages]
        if messages[0]["role"] == "system" and messages[1:] and not self._shows_system:
            text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [messages[1] | {"content": text}, *messages[2:]]
        text = write(self.tokenizer, messages, self.tried, tools)
        # A template may write something else around an empty message, or around a thought.
        for is_blank, with_thoughts in ((lambda text: not text, False),
                                        (lambda text: not text.strip(), False),
                                        (lambda text: not text, True)):
            marked = []
            for number, message in enumerate(messages):
                mark = "" if is_blank(self._as_history(message)) else f"@message{number}@"
                if with_thoughts and "</think>" in message["content"]:
                    mark = f"<think>\n@thought{number}@\n</think>\n\n{mark}"
                marked.append({"role": message["role"], "content": mark})
            parts = _matched(text, self._outline(marked, tools), messages)
            if parts is not None:
                return parts
        raise EnvError("this tokenizer's chat template changes the text of a message")

    def _outline(self, marked: Messages, tools: list[dict] | None) -> list[str]:
        """What the template writes around the marks "@message3@" and "@thought3@" of a
        conversation, and the marks: text, mark, text, mark ... text."""
        key = json.dumps([marked, tools], ensure_ascii=False)
        if key not in self.outlines:
            if tools and any(token in key for token in self.control_tokens):
                raise ValueError("the tools of an agent hold a control token")
            text = write(self.tokenizer, marked, self.tried, tools)
            shown, wanted = (re.findall("@message[0-9]+@", written) for written in
                             (text, "".join(message["content"] for message in marked)))
            if shown != wanted:
                raise ValueError("this tokenizer's chat template does not show each message once, "
                                 "in order")
            if len(self.outlines) > 100:
                self.outlines.clear()
            self.outlines[key] = re.split("(@(?:message|thought)[0-9]+@)", text)
        return self.outlines[key]

    def _as_history(self, message: dict[str, str]) -> str:
        """What the template shows of an earlier message, apart from line feeds before it."""
        if message["role"] == "assistant" and self.drops_thoughts:
            return message["content"].rpartition("</think>")[2]
        return message["content"]

    @cached_property
    def control_tokens(self) -> list[str]:
        """The texts of the special tokens."""
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values()
                if token.special]

    @cached_property
    def _shows_system(self) -> bool:
        """Whether the template shows a system message. Where it does not, its text stands before
        that of the first message."""
        marked = [{"role": "system", "content": "@system@"}, {"role": "user", "content": "@user@"}]
        try:
            return "@system@" in write(self.tokenizer, marked, self.tried)
        except Exception:  # whatever the template's program raises
            return False

    def start(self, prompt: str, observation: str, max_ids: int | None = None,
              reply: str = FIRST_REPLY) -> list[int]:
        """Ids of the beginning of a conversation: the instructions, the fixed reply to them, the
        first observation (see `observation`) and the generation prompt."""
        first = {"role": "user", "content": prompt}
        return self.prompt([first, assistant(reply), user(observation)], max_ids=max_ids)

    def turns(self, messages: Messages, closed: bool, max_ids: int | None = None) -> list[int]:
        """Ids of the messages that follow a reply, from the model's side and the other in turns
        and ending with one to the model, and of the generation prompt.

        closed: whether the policy ended the reply itself (`is_ended`). For a reply that was cut
        the end-of-turn token is the first of these ids, so it is part of the prompt and not of the
        loss. max_ids: see `observation`.
        """
        ids = self.to_user[1:] if closed else list(self.to_user)
        for place, message in enumerate(messages):
            between = (self.to_reply, self.to_user)[message["role"] == "user"] if place else []
            ids += between + self.observation(message["content"], max_ids)
        return ids + self.to_policy

    def reply(self, text: str) -> list[int]:
        """Ids of a reply that the policy did not sample, with the token that ends it."""
        return self.final_header + self._encode(text) + [self.reply_end_id]

    def final_message(self, reply: list[int]) -> list[int]:
        """The part of a reply that the environment gets: all of it or, with channels, what follows
        the final channel's header; [] if there is none."""
        size = len(self.final_header)
        if not size:
            return reply
        for start in range(len(reply) - size, -1, -1):
            if reply[start : start + size] == self.final_header:
                return reply[start + size :]
        return []

    def is_ended(self, reply: list[int]) -> bool:
        """Whether the last of these tokens ends the reply."""
        if not self.final_header:
            return reply[-1] == self.end_id
        has_message = len(self.final_message(reply)) > 0
        return (reply[-1] == self.end_id and has_message) or reply[-1] in self.eos_ids

    def turn(self, observation: str, closed: bool, max_ids: int | None = None) -> list[int]:
        """Ids between a reply and the next one: see `turns`."""
        return self.turns([user(observation)], closed, max_ids)
