"""The agent's side of the text: action formats, the episode as an agent sees it, agents, and
messages as token ids.

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
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envs import AgentError, Env, EnvError, ItemError, Step, close_quietly, load_function
from envs import read_settings, split_item
from models.template import MARK, MARKS, Tokenizer, try_template, write

# ---- texts that are shown to the agent ----


def reply_with(action: str, action_format: str = "plain", thought: str = "") -> str:
    """A reply in which `parse` finds `action`: how the reply of an expert reads.

    >>> print(reply_with("turn left", "react", "a wall"))
    Thought: a wall
    Action: turn left
    """
    comment = thought.replace("\n", "\n# ")
    return {
        "plain": action,
        "react": f"Thought: {thought}\nAction: {action}",
        "tags": f"<think> {thought} </think>\n<action> {action} </action>",
        "backticks": f"{thought}\n```{action}```",
        "json": json.dumps({"thought": thought, "name": "act", "arguments": {"action": action}}),
        "code": f"```python\n# {comment}\nact({json.dumps(action, ensure_ascii=False)})\n```",
    }[action_format]


THINK_FIRST = "\n\nThink first, then act. Answer in this form:\n"
THOUGHT = "what you see and what to do next"
FORMATS = {  # action format -> the text that describes it, appended to the environment's prompt
    "plain": "",
    "react": THINK_FIRST + reply_with("one action, nothing else", "react", THOUGHT),
    "tags": THINK_FIRST + reply_with("one action, nothing else", "tags", THOUGHT),
    "backticks": "\n\nThink first, then give one action between triple backticks, "
                 "and nothing else between them:" + reply_with("action", "backticks"),
    "json": "\n\nAnswer with one function call in JSON:\n"
            + reply_with("one action", "json", THOUGHT),
    "code": "\n\nAnswer with a block of Python that calls act once, thoughts as comments:\n"
            + reply_with("one action", "code", THOUGHT),
}
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
    """The first user message: the environment's `prompt` and a description of the action format."""
    return (prompt + FORMATS[action_format]).strip()


# ---- from a reply to its action ----

# (a reply, the actions in it, the reply itself where react finds none in it) -> the action.
Choice = Callable[[str, list[str], str], str]


def parse(reply: str, action_format: str = "plain", choose: Choice | None = None) -> str:
    """The action in a reply, or "" (which no environment accepts) if there is not exactly one.
    choose: chooses it in another way. Never raises.

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
    """
    found = actions_in(reply, action_format)
    if choose is not None:
        bare = reply.strip() if action_format == "react" and not found else ""
        return choose(reply, found, bare)
    return found[0] if len(found) == 1 else ""


def actions_in(reply: str, action_format: str = "plain") -> list[str]:
    """All actions in a reply, in order.

    [] for a reply that is cut off before its first action is complete. Never raises.
    """
    found = [reply]
    if action_format == "react":
        found = reply.split("Action:")[1:]
    elif action_format == "tags":
        # <search> and <answer> are SearchQA's own actions. They keep their tags.
        said = re.sub(r"<think>.*?</think>", "", reply, flags=re.DOTALL)
        tags = re.finditer(r"<(action|search|answer)>(.*?)</\1>", said, re.DOTALL)
        found = (tag[2] if tag[1] == "action" else tag[0] for tag in tags)
    elif action_format == "backticks":
        found = re.findall(r"```(.*?)```", reply, re.DOTALL)
    elif action_format == "json":
        found = _actions_in_json(reply)
    elif action_format == "code":
        found = _actions_in_code(reply)
    return [action.strip() for action in found]


def _actions_in_json(reply: str) -> Iterator[str]:
    """Yield the actions of all JSON objects in a reply that call the function "act"."""
    end = 0
    while (start := reply.find("{", end)) >= 0:
        end = start + 1
        with suppress(ValueError, RecursionError):  # no JSON object begins at this brace
            call, end = json.JSONDecoder().raw_decode(reply, start)
            match call:
                case {"name": "act", "arguments": {"action": str(action)}}:
                    yield action


def _actions_in_code(reply: str) -> Iterator[str]:
    """Yield the actions of all calls of `act` in the Python blocks of a reply.

    The code is parsed and never run. A call whose argument is not exactly one string literal gives
    the action "".
    """
    for block in re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", reply, re.DOTALL):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.walk(ast.parse(block)):
                match node:
                    case ast.Call(ast.Name("act"), [ast.Constant(str(action))], []):
                        yield action
                    case ast.Call(ast.Name("act")):
                        yield ""


def complaint(reply: str, action_format: str) -> str:
    """What the agent is told about a reply in which `parse` finds no action or more than one.

    >>> print(complaint("Action: a Action: b", "react").replace(". ", ".\\n"))
    There must be one action in your reply, but there are 2.
    Answer in the form that you were told at the start.
    """
    count = len(actions_in(reply, action_format))
    seen = f"are {count}" if count > 1 else "is none"
    hint = " Answer in the form that you were told at the start." if FORMATS[action_format] else ""
    return f"There must be one action in your reply, but there {seen}.{hint}"


# ---- an episode as its agent sees it ----

Messages = list[dict[str, str]]  # of a chat: {"role": "user" or another, "content": text}
# A generator. It yields the messages that the model is to answer, and is sent the model's reply.
# The episode ends when it returns, or after `horizon` replies.
Agent = Generator[Messages, str, None]


def user(text: str) -> dict[str, str]:
    """A message to the model, without the spaces around it."""
    return {"role": "user", "content": text.strip()}


def assistant(text: str) -> dict[str, str]:
    """A message of the model."""
    return {"role": "assistant", "content": text}


@dataclass(eq=False)
class Play:
    """One episode as its agent sees it: the environment, with every step credited to the reply that
    the agent was sent last.

    An agent may set `kind`: what the next reply is, if not an action. Credit by state compares only
    replies of one kind. It may set `tools`, a list in OpenAI's form, for templates that show them.
    `turns`: replies so far. `cut`: the last reply reached --max_tokens.

    For drivers: `send` passes a reply on. Then `turn` is what the reply has earned: the sum of the
    rewards, and the newest score, success and progress. `forgets`: what was earned before does not
    count.
    """

    env: Env
    item: str  # "babyai_17"
    horizon: int  # the largest number of replies
    make_agent: "Callable[[Play], Agent] | None" = None  # see `load_agent`; None: react
    action_format: str = "plain"
    choose: Choice | None = None  # see `parse`
    # "prompt" replaces the whole first message, "reply" the fixed reply to it.
    texts: dict[str, str] = field(default_factory=dict)
    training_step: int = 0  # 0 in evaluation
    deadline: float = 60.0  # seconds that the agent and its environment have between two replies

    def __post_init__(self):
        self.number = split_item(self.item)[1]
        self.tools: list[dict] | None = None
        self.turns = 0
        self.turn = Step("")
        self.forgets = False
        self.kind = ""
        self.cut = False
        self._failure: Exception | None = None  # the environment's
        self.agent = (self.make_agent or react)(self)

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
        return self._of_environment(self._reset)

    def _reset(self):
        self.turn.progress = 0.0
        try:
            observation = self.env.reset(self.number)
        except ValueError as e:
            if type(e) is not ValueError:  # such as a JSONDecodeError: the environment's fault
                raise
            place = traceback.extract_tb(e.__traceback__)[-1]  # perhaps a bug of the world's
            raise ItemError(f"{e} ({place.filename}, line {place.lineno})") from e
        str.encode(observation)  # raises if it is no text
        return observation

    def act(self, reply: str) -> Step:
        """Let the environment take the action in a reply. A reply without exactly one action does
        not reach it: the step is invalid, and its observation says why."""
        is_whole = self.env.whole_reply
        action = reply if is_whole else parse(reply, self.action_format, self.choose)
        if action or is_whole:
            return self.step(action)
        self.turn.valid = False
        return replace(self.turn, observation=complaint(reply, self.action_format), reward=0.0,
                       done=False)

    def step(self, action: str) -> Step:
        """Let the environment take an action. Its reward is the last reply's."""
        return self._of_environment(lambda: self._credited(self.env.step(action)))

    def earn(self, reward: float, success: bool | None = None) -> None:
        """Credit a reward to the last reply, where no environment here gives one. The score is the
        same within 0 and 1. success: by default, whether the reward is positive."""
        self._credited(replace(self.turn, reward=reward, score=min(max(reward, 0.0), 1.0),
                               success=reward > 0 if success is None else success))

    def _credited(self, step: Step) -> Step:
        """Add a step to what the last reply has earned -> the step."""
        str.encode(step.observation)  # raises if it is no text
        if not all(map(math.isfinite, (step.reward, step.score, step.progress))):
            raise EnvError("a reward, score or progress is not finite")
        if step.reward and not self.turns:
            raise AgentError("a reward before the first reply belongs to no reply")
        self.turn = replace(step, reward=self.turn.reward + step.reward,
                            valid=self.turn.valid and step.valid)
        return step

    def forget(self) -> None:
        """What was earned so far does not count: the episode is going to be played again."""
        self.forgets = True
        self.turn = replace(self.turn, reward=0.0)

    def valid_actions(self) -> list[str]:
        """`Env.valid_actions`."""
        return self._of_environment(self.env.valid_actions)

    def expert(self) -> str | None:
        """`Env.expert`."""
        return self._of_environment(self.env.expert)

    def _of_environment(self, function: Callable[[], Any]) -> Any:
        """Call a function. What it raises is the environment's failure and no bug of the agent."""
        try:
            return function()
        except (Exception, SystemExit) as e:
            self._failure = e
            raise

    # What a driver calls.

    def send(self, reply: str | None = None, cut: bool = False,
             error: Exception | None = None) -> Messages | None:
        """Pass a reply to the agent (None: start it) -> the messages that the model is to answer
        next; None: the agent has ended the episode. cut: see the class. error: raised where the
        agent has yielded messages that cannot be answered; no reply is passed then.

        An exception of the environment passes, also if the agent has caught it. Raises AgentError
        for any other exception of the agent, for messages of another form, and for an agent that
        ends the episode without having asked for a reply.
        """
        if error is None:
            self.turn = replace(self.turn, observation="", reward=0.0, valid=True, done=False)
            self.turns += reply is not None
            self.forgets = False
            self.kind = ""
            self.cut = cut
        try:
            said = self.agent.send(reply) if error is None else self.agent.throw(error)
            # A copy, since the agent may change its own: role and content, no more.
            messages = [{"role": m["role"], "content": m["content"]} for m in said]
            str.encode("".join(text for m in messages for text in m.values()))  # raises: no text
            if not messages or messages[-1]["role"] == "assistant":
                raise ValueError("the last message that an agent yields is one to the model")
            return messages
        except StopIteration:
            if not self.turns:
                raise AgentError("the agent has ended the episode before the first reply") from None
            return None
        except EnvError:
            raise
        except (Exception, SystemExit) as e:
            raise AgentError(f"the agent failed: {type(e).__name__}: {e}") from e
        finally:
            if self._failure is not None:  # it passes, whatever the agent has made of it
                raise self._failure

    def close(self) -> None:
        """Let the agent's generator run its `finally` blocks. A failure in them is printed."""
        close_quietly(self.agent)


# ---- agents ----

AGENTS = {name: f"agent:{name}" for name in ("react", "window", "summary")}


def react(play: Play, plan: bool = False, reflect: bool = False) -> Agent:
    """The model sees the whole conversation, and acts in every turn.

    plan: it is asked for a plan before the first action. reflect: it is asked for a reflection
    after an invalid action and after a failed episode, which is then played once more. Both only if
    at least one turn is left to act in after them.
    """
    observation, kind, attempts = play.reset(), "", 1
    messages = play.start()
    if plan and play.horizon > 1:
        observation, kind = observation + PLAN, "PLAN"
    while True:
        messages.append(user(observation))
        play.kind = kind
        reply = yield messages
        messages.append(assistant(reply))
        if kind:  # it was asked for words
            observation = AGAIN + play.reset() if kind == "RETRY" else ACT
            kind = ""
            continue
        step = play.act(reply)
        observation = step.observation
        reflects = reflect and play.horizon - play.turns > 1
        if reflects and step.done and not step.success and attempts == 1:
            attempts += 1
            play.forget()
            observation, kind = observation + REFLECT_ON_ALL, "RETRY"
        elif step.done:
            return
        elif reflects and not step.valid:
            observation, kind = observation + REFLECT, "REFLECT"


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


def load_agent(agent: str | Callable[..., Agent], agent_args: str = "") -> Callable[[Play], Agent]:
    """An agent's function with its settings (see `read_settings`).

    agent: a name of AGENTS, "FILE.py:FUNCTION", "module:function", or the function itself. Raises
    ValueError for an agent that does not exist, and for a setting that it does not have or that is
    not of the type of its default.
    """
    function = load_function(agent, AGENTS, "agent", agent_args)
    if not inspect.isgeneratorfunction(function):
        raise ValueError(f"agent {agent} is no generator function: it should yield messages")
    return function


def hash_of_sources(agent: str, agent_args: str = "") -> str:
    """The SHA-256 of an agent's source file, and of the files that its settings name: a run is not
    continued with another agent. "" if there are none: an agent of AGENTS is this project's."""
    settings = read_settings(agent_args, "--agent_args").values()
    paths = []
    for word in [agent, *" ".join(map(str, settings)).split()]:
        where = word.rpartition(":")[0]
        if re.fullmatch(r"[\w.]+:\w+", word) and not where.endswith(".py"):  # a module's
            where = getattr(importlib.util.find_spec(where), "origin", None) or ""
        paths += [Path(word), Path(where)]
    sources = b"".join(path.read_bytes() for path in paths if path.is_file())
    return hashlib.sha256(sources).hexdigest() if sources else ""


# ---- from text to token ids ----

Parts = list[tuple[str, dict[str, str] | None]]  # see `Chat._cut`


def _split(text: str, marked: str) -> list[str]:
    """A template's text, cut at the marks: text, mark, text, mark ... text. Raises ValueError if it
    does not have the marks of messages that stand in `marked`, in their order."""
    if re.findall(MARK, text) != re.findall(MARK, marked):
        raise ValueError("this tokenizer's chat template does not show each message once, in order")
    return re.split(f"({MARK}|@thought[0-9]+@)", text)


class Chat:
    """A tokenizer's chat template: messages as token ids.

    The template is tried once for a tokenizer, whose attribute `tried_template` keeps the result
    (see `try_template`). `prompt` renders a whole conversation. Where a conversation only grows,
    `turns` gives the ids of the messages that follow a reply, from the pieces that the template
    writes between messages.

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

    def __init__(self, tokenizer: Tokenizer, history: str | None = None):
        self.tokenizer = tokenizer
        # A copy of the fast tokenizer, because every transformers call resets
        # `encode_special_tokens` on the original. Calling it directly takes half the time.
        self.encoder = copy.deepcopy(tokenizer.backend_tokenizer)
        self.encoder.encode_special_tokens = True
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.tried = getattr(tokenizer, "tried_template", None)
        if self.tried is None or self.tried["of"] != tokenizer.chat_template:  # it was replaced
            self.tried = tokenizer.tried_template = try_template(tokenizer)

        # to_reply: between a message and a reply that is not the policy's. to_user: between a reply
        # and a message. to_policy: the generation prompt, between a message and the policy's reply.
        _, *pieces = _split(self.tried["marks"], "".join(MARKS))[::2]
        self.to_reply, self.to_user, self.to_policy = map(self._encode_piece, pieces)

        # Which tokens end a reply.
        self.eos_ids = {tokenizer.eos_token_id, *getattr(tokenizer, "generation_eos_ids", ())}
        special_ids = {*tokenizer.all_special_ids, *self.eos_ids}
        special_ids |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        if not self.to_user or self.to_user[0] not in special_ids:
            raise ValueError(
                f"this chat template ends a reply with {tokenizer.decode(self.to_user[:1])!r}, no "
                "special and no end-of-sequence token: give another one with --chat_template")
        self.end_id = self.to_user[0]

        # The template writes a reply of the history after the generation prompt. With channels, it
        # puts the header of the final channel between them, from one special token to another, and
        # the end-of-turn token is not an end-of-sequence token.
        header = self.to_reply[len(self.to_policy):]
        has_channels = (self.to_policy + header == self.to_reply
                        and special_ids.issuperset(header[:1] + header[-1:])
                        and self.end_id not in self.eos_ids and tokenizer.eos_token_id is not None)
        self.final_header = header if has_channels else []
        self.reply_end_id = tokenizer.eos_token_id if self.final_header else self.end_id
        self.drops_thoughts = bool(self.final_header) or "@thought@" not in self.tried["thought"]
        self.history = history or ("template" if self.drops_thoughts else "append")

        # Where the template shows no system message, its text stands before the first message's.
        marked = [{"role": "system", "content": "@system@"}, user("@user@")]
        self.shows_system = False
        with suppress(Exception):  # whatever the template's program raises
            self.shows_system = "@system@" in write(tokenizer, marked, self.tried)

    def _encode_piece(self, text: str) -> list[int]:
        """The token ids of a piece of the template: "<|im_end|>" becomes the special token."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)

    def _encode(self, text: str) -> list[int]:
        """The token ids of a text that is not trusted: "<|im_end|>" stays ordinary text. Several
        threads may encode at the same time."""
        # `encode_batch` releases the interpreter to other threads; `encode` does not.
        return self.encoder.encode_batch([text], add_special_tokens=False)[0].ids

    def prompt(self, messages: Messages, tools: list[dict] | None = None,
               sampled: Sequence[tuple[str, list[int]]] = ()) -> list[int]:
        """Ids of a whole conversation and the generation prompt, by the template.

        tools: see `Play`. sampled: (text, ids) of the replies that the policy has written, in
        order: a message that is one of them has its ids, and is not encoded again. Raises EnvError
        for messages whose text the template changes, ValueError or whatever the template's program
        raises for others that it does not show.
        """
        ids, rest = [], list(sampled)
        for text, message in reversed(self._cut(messages, tools)):
            is_reply = message == assistant(text)
            places = [i for i, (reply, _) in enumerate(rest) if is_reply and reply == text]
            if places:  # this prompt does not show the later ones
                *rest, (_, part) = rest[: places[-1] + 1]
            else:
                part = self._encode(text) if message else self._encode_piece(text)
            ids = part + ids
        return ids

    def _cut(self, messages: Messages, tools: list[dict] | None) -> Parts:
        """The template's text of a conversation, in parts: (text of the template, None), (text of a
        message, the message), ... No text of a message can be taken for one of the template,
        because the parts between the messages are known from a conversation of marks."""
        if self.tried["system"] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.tried["system"]}, *messages]
        if messages[0]["role"] == "system" and messages[1:] and not self.shows_system:
            text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [messages[1] | {"content": text}, *messages[2:]]
        described = json.dumps(tools, ensure_ascii=False)
        if self._encode(described) != self._encode_piece(described):
            raise ValueError("the tools of an agent hold a control token")
        written = write(self.tokenizer, messages, self.tried, tools)
        # A template may write something else around an empty text, or around a reply's thought.
        # So the marks stand for whole texts or, if the template changes them, for the thought and
        # the rest of each reply.
        whole, parted = [], []
        for number, message in enumerate(messages):
            mark, text = f"@message{number}@", message["content"]
            is_thinking = message["role"] == "assistant" and "</think>" in text
            text = text.rpartition("</think>")[2] if is_thinking and self.drops_thoughts else text
            thought = f"<think>\n@thought{number}@\n</think>\n\n" if is_thinking else ""
            whole.append(mark if text else "")
            parted.append(thought + (mark if text.strip() else ""))
        for marks in (whole, parted):
            marked = [message | {"content": mark} for message, mark in zip(messages, marks)]
            outline = write(self.tokenizer, marked, self.tried, tools)
            if parts := _matched(written, _split(outline, "".join(marks)), messages):
                return parts
        raise EnvError("this tokenizer's chat template changes the text of a message")

    def turns(self, messages: Messages, closed: bool) -> list[int]:
        """Ids of the messages that follow a reply, from the model's side and the other in turns
        and ending with one to the model, and of the generation prompt.

        closed: whether the policy ended the reply itself (`is_ended`). For a reply that was cut
        the end-of-turn token is the first of these ids, so it is part of the prompt and not of the
        loss.
        """
        before = {"user": self.to_user, "assistant": self.to_reply}
        ids = [token for m in messages for token in before[m["role"]] + self._encode(m["content"])]
        return ids[int(closed):] + self.to_policy

    def reply(self, text: str) -> list[int]:
        """Ids of a reply that the policy did not sample, with the token that ends it."""
        return self.final_header + self._encode(text) + [self.reply_end_id]

    def final_message(self, reply: list[int]) -> list[int]:
        """The part of a reply that the environment gets: all of it or, with channels, what follows
        the final channel's header; [] if there is none."""
        size = len(self.final_header)
        ends = (i for i in range(size, len(reply) + 1) if reply[i - size : i] == self.final_header)
        return reply[max(ends, default=len(reply)):] if size else reply

    def is_ended(self, reply: list[int]) -> bool:
        """Whether the last of these tokens ends the reply."""
        ends_message = reply[-1] == self.end_id and len(self.final_message(reply)) > 0
        return ends_message or (len(self.final_header) > 0 and reply[-1] in self.eos_ids)


def _matched(text: str, outline: list[str], messages: Messages) -> Parts | None:
    """`text` cut into the template's parts (`outline`) and the messages between them, which may
    lack their thoughts and the spaces around them: see `Chat._cut`. None: it is another text.

    outline: what the template writes around the marks "@message3@" and "@thought3@" of a
    conversation, and the marks: see `_split`."""
    parts = []
    for before, mark, after in zip(outline[::2], outline[1::2], outline[2::2]):
        message = messages[int(re.sub(r"\D", "", mark))]
        thought, _, rest = message["content"].rpartition("</think>")
        wholes = [thought.split("<think>")[-1]] if "thought" in mark else [message["content"], rest]
        forms = [form for whole in wholes
                 for form in (whole, whole.lstrip("\n"), whole.strip("\n"), whole.strip())]
        form = next((f for f in forms if text.startswith(before + f + after)), None)
        if form is None:
            return None
        parts += [(before, None), (form, message)]
        text = text[len(before) + len(form):]
    return [*parts, (text, None)] if text == outline[-1] else None


def note_history(chat: Chat) -> None:
    """Say on stderr what is done with a template that drops thoughts."""
    if chat.drops_thoughts:
        print("this chat template drops the thoughts of earlier replies: --history "
              f"{chat.history} (docs/agents.md)", file=sys.stderr)
