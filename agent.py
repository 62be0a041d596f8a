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
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

from envs import AgentError, Env, EnvError, Step, UserError, close_quietly, load_function
from envs import read_settings, split_item
from models.packed import common_prefix_length
from models.template import MARK, MARKS, Tokenizer, try_template, write
from worlds import goal_line

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
Chooser = Callable[[str, list[str], str], str]


def parse(reply: str, action_format: str = "plain", choose: Chooser | None = None) -> str:
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
    answer = answer_of(reply) or ""
    found = actions_in(answer, action_format) if answer else []
    if choose is not None:
        bare = answer.strip() if action_format == "react" and not found else ""
        return choose(answer, found, bare)
    return found[0] if len(found) == 1 else ""


def answer_of(reply: str) -> str | None:
    """What stands after the last thought of a reply; None if this thought has no end.

    >>> answer_of("<think>Action: no</think>Action: go"), answer_of("go"), answer_of("<think>go")
    ('Action: go', 'go', None)
    """
    answer = reply.rpartition("</think>")[2]
    return None if "<think>" in answer else answer


def actions_in(reply: str, action_format: str = "plain") -> list[str]:
    """All actions in a reply, in order.

    [] for a reply that is cut off before its first action is complete. Never raises.
    """
    return [action.strip() for action in READERS[action_format](reply)]


def _actions_in_tags(reply: str) -> Iterator[str]:
    """The actions in tags. <search> and <answer> are SearchQA's own actions. They keep their
    tags."""
    tags = re.finditer(r"<(action|search|answer)>(.*?)</\1>", reply, re.DOTALL)
    return (tag[2] if tag[1] == "action" else tag[0] for tag in tags)


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


READERS = {  # action format -> the function that finds the actions in a reply
    "plain": lambda reply: [reply], "react": lambda reply: reply.split("Action:")[1:],
    "tags": _actions_in_tags, "backticks": re.compile(r"```(.*?)```", re.DOTALL).findall,
    "json": _actions_in_json, "code": _actions_in_code,
}


def complaint(reply: str, action_format: str) -> str:
    """What the agent is told about a reply in which `parse` finds no action or more than one.

    >>> print(complaint("Action: a Action: b", "react").replace(". ", ".\\n"))
    There must be one action in your reply, but there are 2.
    Answer in the form that you were told at the start.
    """
    answer = answer_of(reply)
    if answer is None:
        return "Your thought has no end: write </think> before your action."
    count = len(actions_in(answer, action_format))
    seen = f"are {count}" if count > 1 else "is none"
    hint = " Answer in the form that you were told at the start." if FORMATS[action_format] else ""
    return f"There must be one action in your reply, but there {seen}.{hint}"


# ---- an episode as its agent sees it ----

Messages = list[dict[str, str]]  # of a chat: {"role": "user" or another, "content": text}
# A generator. It yields the messages that the model is to answer, and is sent the model's reply.
# The episode ends when it returns, or after `horizon` replies.
Agent = Generator[Messages, str, None]


def readable(s: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which cannot be encoded.

    >>> readable("a\\ud800b") == "a\\ufffdb"
    True
    """
    return s if str.isascii(s) else s.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def user(text: str) -> dict[str, str]:
    """A message to the model, without the spaces around it."""
    return {"role": "user", "content": text.strip()}


def assistant(text: str) -> dict[str, str]:
    """A message of the model."""
    return {"role": "assistant", "content": text}


class Choice(NamedTuple):
    """What an agent may yield instead of messages: the reply to them is one of `texts`. The
    policy samples among the tokens that continue one of them, and its log-probs are those of that
    distribution. An agent that yields it has the attribute `chooses`."""

    messages: Messages
    texts: Sequence[str]  # []: any reply. After an `Open` text the reply is free.


class Open(str):
    """A text of a `Choice` that the reply only begins with."""


@dataclass(eq=False)
class Play:
    """One episode as its agent sees it: the environment, with every step credited to the reply that
    the agent was sent last.

    An agent may set `kind`: what the next reply is, if not an action. Credit by state compares only
    replies of one kind. It may set `tools`, a list in OpenAI's form, for templates that show them.
    `turns`: replies so far. `cut`: the last reply reached --max_tokens or --max_length.

    For drivers: `send` passes a reply on. Then `turn` is what the reply has earned: the sum of the
    rewards, and the newest score, success and progress. `forgets`: what was earned before does not
    count.
    """

    env: Env
    item: str  # "babyai_17"
    horizon: int  # the largest number of replies
    make_agent: "Callable[[Play], Agent] | None" = None  # see `load_agent`; None: react
    action_format: str = "plain"
    choose: Chooser | None = None  # see `parse`
    # "prompt" replaces the whole first message, "reply" the fixed reply to it.
    texts: dict[str, str] = field(default_factory=dict)
    training_step: int = 0  # 0 in evaluation
    seed: int = 0  # the run's
    deadline: float = 60.0  # seconds that the agent and its environment have between two replies

    def __post_init__(self):
        self.number = split_item(self.item)[1]
        self.tools: list[dict] | None = None
        self.turns, self.turn, self.kind = 0, Step(""), ""
        self.began = self.forgets = self.cut = False  # began: an episode of the environment
        self.choices: Sequence[str] = []  # of a `Choice`
        self._failure: Exception | None = None  # the environment's
        self.agent = (self.make_agent or react)(self)

    # What an agent calls.

    def start(self) -> Messages:
        """The instructions and the fixed reply to them."""
        text = self.texts.get("prompt") or instructions(self.env.prompt, self.form())
        return [{"role": "user", "content": text}, assistant(self.texts.get("reply", FIRST_REPLY))]

    def form(self) -> str:
        """The action format of replies. An environment that takes whole replies describes their
        form in its own prompt."""
        return "plain" if self.env.whole_reply else self.action_format

    def reply_with(self, action: str) -> str:
        """A reply in which `act` finds this action."""
        return reply_with(action, self.form())

    def reset(self, number: int | None = None) -> str:
        """Begin the episode, perhaps once more -> the first observation. number: of another item,
        to show an episode of it before the own one begins. Raises ItemError if there is no such
        item."""
        def begin():
            self.began, self.turn = True, replace(self.turn, score=0.0, progress=0.0, success=False)
            return readable(self.env.reset(self.number if number is None else number))

        return self._of_environment(begin)

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
        return self._of_environment(lambda: self._credited(self.skip(action)))

    def skip(self, action: str) -> Step:
        """Let the environment take an action that no reply has chosen. Its reward is not
        counted."""
        if not self.began:
            raise AgentError("the agent acts before it calls play.reset()")
        return self._of_environment(lambda: self.env.step(action))

    def earn(self, reward: float, success: bool | None = None) -> None:
        """Credit a reward to the last reply. After `reset`, success and score stay the
        environment's. Without an environment, or with `success`: the score is the reward within 0
        and 1, and success by default whether the reward is positive."""
        judged: dict[str, Any] = {}
        if success is not None or not self.began:
            judged = {"score": min(max(reward, 0.0), 1.0),
                      "success": reward > 0 if success is None else success}
        self._credited(replace(self.turn, reward=reward, **judged))

    def _credited(self, step: Step) -> Step:
        """Add a step to what the last reply has earned -> the step."""
        if not isinstance(step, Step):
            raise UserError(f"{type(self.env).__qualname__}.step returned {step!r:.40}, no Step")
        step.observation = readable(step.observation)
        if not (abs(step.reward) < 1e9 and 0 <= step.score <= 1 and 0 <= step.progress <= 1):
            raise EnvError("a reward is not below 1e9, or a score or progress is not from 0 to 1")
        if step.reward and not self.turns:
            raise AgentError("a reward before the first reply belongs to no reply")
        self.turn = replace(step, reward=self.turn.reward + step.reward,
                            valid=self.turn.valid and step.valid)
        return step

    def forget(self) -> None:
        """What was earned so far does not count: the episode is going to be played again."""
        self.forgets = True
        self.turn = replace(self.turn, reward=0.0)

    def replies(self) -> list[str]:
        """The replies of `Env.choices`, for a `Choice`."""
        actions, beginnings = self._of_environment(self.env.choices)
        return [*map(self.reply_with, actions), *map(Open, beginnings)]

    def expert(self) -> str | None:
        """`Env.expert`. Raises UserError in a world that has none."""
        if type(self.env).expert is Env.expert:
            raise UserError(f"{self.item} has no expert (servers have none)")
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
            self.forgets, self.kind, self.cut = False, "", cut
        try:
            said = self.agent.send(reply) if error is None else self.agent.throw(error)
            said, self.choices = said if isinstance(said, Choice) else (said, [])
            if self.choices and not getattr(self.make_agent, "chooses", False):
                raise ValueError("an agent that yields a Choice has the attribute chooses = True")
            # A copy, since the agent may change its own: role and content, no more.
            messages = [{"role": readable(m["role"]), "content": readable(m["content"])}
                        for m in said]
            if not messages or messages[-1]["role"] == "assistant":
                raise ValueError("the last message that an agent yields is one to the model")
            return messages
        except StopIteration:
            if not self.turns:
                raise AgentError("the agent has ended the episode before the first reply") from None
            return None
        except (EnvError, UserError):
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
            observation, kind = AGAIN + play.reset() if kind == "RETRY" else ACT, ""
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
    yield from converse(play, [*play.start(), user(play.reset())], keep=keep)


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


def converse(play: Play, messages: Messages, choose: bool = False, keep: int = 1000,
             task: bool = False) -> Agent:
    """The rest of an episode, for agents that begin it in their own way (`yield from`): the model
    acts in every turn.

    messages: the instructions, the reply to them, and the turns until now. choose: the model
    chooses among the actions of `Env.choices`; such an agent has the attribute `chooses`. keep: the
    number of earlier turns that it sees. task: the line of the first observation that names the
    goal is repeated after each observation.
    """
    start, turns = messages[:2], messages[2:]
    goal = f"\n\n{goal_line(turns[0]['content'])}" if task else ""
    turns = [m if m["role"] == "assistant" else user(m["content"] + goal) for m in turns]
    while True:
        reply = yield Choice([*start, *turns[-2 * keep - 1:]], play.replies() if choose else [])
        step = play.act(reply)
        if step.done:
            return
        turns = [*turns, assistant(reply), user(step.observation + goal)]


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


def hash_of_sources(run: dict[str, Any]) -> str:
    """The SHA-256 of the source files of a run's agent, algorithm and loss, and of the files that
    the agent's settings name: a run is not continued with other code. "" if there are none: what
    stands in the core's tables is this project's. run: has "agent" and "agent_args"."""
    settings = read_settings(run["agent_args"], "--agent_args").values()
    code = [run["agent"], run.get("algo", ""), run.get("loss", ""), *map(str, settings)]
    paths = []
    for word in " ".join(code).split():
        where = word.rpartition(":")[0]
        if re.fullmatch(r"[\w.]+:\w+", word) and not where.endswith(".py"):  # a module's
            where = getattr(importlib.util.find_spec(where), "origin", None) or ""
        paths += [Path(word), Path(where), Path(__file__).parent / f"ideas/{word}.py"]
    sources = b"".join(path.read_bytes() for path in paths if path.is_file())
    return hashlib.sha256(sources).hexdigest() if sources else ""


# ---- from text to token ids ----

Part = tuple[str, str | None]  # a text, and the role whose message it is; None: the template's
Cut = list[tuple[str, str, dict[str, str]]]  # see `Chat._cut`


def _split(text: str, marked: str) -> list[str]:
    """A template's text, cut at the marks: text, mark, text, mark ... text. Raises ValueError if it
    does not have the marks of messages that stand in `marked`, in their order."""
    if re.findall(MARK, text) != re.findall(MARK, marked):
        raise ValueError("this tokenizer's chat template does not show each message once, in order")
    return re.split(f"({MARK}|@thought[0-9]+@)", text)


MARKER = r"[<\[].*\w.*[>\]]"  # a token such as <|User|>


class Chat:
    """A tokenizer's chat template: messages as token ids.

    The template is tried once for a tokenizer, whose attribute `tried_template` keeps the result
    (see `try_template`). `prompt` renders a whole conversation. Its ids are those of the whole
    text, but for replies that the policy sampled, which keep their ids. Where a conversation only
    grows, `turns` gives the ids of the messages that follow a reply, from the pieces that the
    template writes between messages.

    history: "append": the ids of earlier replies stay as they are, also where the template would
    rewrite them. "template": every prompt is what the template writes. None: "template" where the
    template drops the thoughts of earlier replies (`drops_thoughts`), or where its pieces do not
    give what it writes (`is_pieced`), else "append", which then is the same.

    `control` is the ids that must not come from the text of others, `turn_control` those that must
    not come from a reply that the policy did not sample.

    `end_id` is the end-of-turn token, which the policy samples to finish a reply. Any
    end-of-sequence token finishes one, too. `opens_thought`: the generation prompt ends within a
    thought, which the policy has to close.

    A template may have channels, as GPT-OSS's has: the policy first writes a message to the channel
    "analysis", then one to the channel "final". `final_header` is the ids that open the final
    message ([] without channels). The environment gets only the text after it. Before
    `final_header` an end-of-turn token does not end the reply. Within a segment the analysis and
    the end-of-sequence token stay; the template would drop the analysis of earlier turns and write
    <|end|> instead.

    Raises ValueError for a template that fails, that does not show every message exactly once
    and in order, or that ends a reply with an ordinary token: replies would end anywhere.
    """

    def __init__(self, tokenizer: Tokenizer, history: str | None = None):
        self.tokenizer = tokenizer
        # A copy of the fast tokenizer: transformers changes the original's settings. Calling it
        # directly takes half the time.
        self.encoder = copy.deepcopy(tokenizer.backend_tokenizer)
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.tried = getattr(tokenizer, "tried_template", None)
        if self.tried is None or self.tried["of"] != tokenizer.chat_template:  # it was replaced
            self.tried = tokenizer.tried_template = try_template(tokenizer)

        # What the template writes between a message and a reply that is not the policy's, between a
        # reply and a message, and between a message and the policy's reply (the generation prompt).
        _, self.to_reply, to_user, self.to_policy = _split(self.tried["marks"], "".join(MARKS))[::2]
        # Some templates write a space before the token that ends a reply. The policy need not.
        self.to_user = to_user.lstrip(" ")

        # Tokens that only the template writes, and the policy: those that the tokenizer calls
        # special, that end a sequence, or that stand in the template. A reply that the policy did
        # not sample may have thoughts and calls of tools.
        eos_ids = {tokenizer.eos_token_id, *getattr(tokenizer, "generation_eos_ids", ())}
        self.eos_ids = eos_ids - {None}
        added = tokenizer.added_tokens_decoder
        self.control = {
            i for i, token in added.items() if token.special or i in self.eos_ids
            or str(token) in self.tried["template"] and re.fullmatch(MARKER, str(token))}
        self.forbidden = {None: set()}
        between = self._encode((self.to_reply + self.to_user + self.to_policy, None))
        self.turn_control = {
            i for i in self.control if added[i].special or i in self.eos_ids
            or i in between and not re.search("think|tool", str(added[i]))}
        self.forbidden["assistant"] = self.turn_control  # and of any other role `control`

        ends = self._encode((self.to_user, None))
        if not ends or ends[0] not in self.control | self.eos_ids:
            raise ValueError(
                f"this chat template ends a reply with {tokenizer.decode(ends[:1])!r}, no "
                "special and no end-of-sequence token: give another one with --chat_template")
        self.end_id = ends[0]

        # The template writes a reply of the history after the generation prompt, some with a header
        # between them: a space, an empty thought, or the final channel's name between two tokens.
        self.opens_thought = self.to_policy.rstrip().endswith("<think>")
        self.header = "</think>\n\n" if self.opens_thought else ""
        if self.to_reply.startswith(self.to_policy):
            self.header = self.to_reply.removeprefix(self.to_policy)
        header = self._after_prompt((self.header, None))
        has_channels = (
            self.end_id not in self.eos_ids and len(self.eos_ids) > 0 and len(header) > 2
            and {header[0], header[-1]} <= self.control and not self.control.issuperset(header))
        self.final_header = header if has_channels else []
        self.header_ids = [] if self.header.isspace() else header
        self.reply_end_id = tokenizer.eos_token_id if has_channels else self.end_id
        self.drops_thoughts = "@thought@" not in self.tried["thought"] or has_channels
        # Where the template shows no system message, its text stands before the first message's.
        marked = [{"role": "system", "content": "@system@"}, user("@user@")]
        self.shows_system = False
        with suppress(Exception):  # whatever the template's program raises
            self.shows_system = "@system@" in write(tokenizer, marked, self.tried)

        if "is_pieced" not in self.tried:
            self.tried["is_pieced"] = has_channels or self._is_pieced()
        is_appended = self.tried["is_pieced"] and not self.drops_thoughts
        self.history = history or ("append" if is_appended else "template")
        self.reply_once = lru_cache(2**16)(self.reply)  # choices hardly change from turn to turn

    def _is_pieced(self) -> bool:
        """Whether the ids of five messages are those of the first prompt, a reply, and the messages
        that follow it. Raises ValueError if they are not even where each prompt is written
        whole."""
        is_pieced = True
        for texts in (("Play.", "OK", "You see a wall.", "turn left", "A ball."),
                      ("Play a game.", "OK", "A wall", "", "A red ball 1.")):
            messages = [make(text) for make, text in zip([user, assistant] * 3, texts)]
            whole, start = self.prompt(messages), self.prompt(messages[:3])
            end = self.turns(messages[4:], closed=False)
            reply = whole[len(start): len(whole) - len(end)]
            is_pieced &= start + reply + end == whole
            reply = self.final_message(reply)
            messages[3] = assistant(self.tokenizer.decode(reply, skip_special_tokens=True))
            whole = self.prompt(messages)
            kept = self.prompt(messages, sampled=[(messages[3]["content"], reply)])
            if is_pieced and kept != whole:
                place = common_prefix_length(kept, whole)
                parts, at_once = (self.tokenizer.decode(ids[place:]) for ids in (kept, whole))
                raise ValueError("the ids of this chat template's parts are not those of the whole "
                                 f"text: {parts!r}, not {at_once!r}")
        return is_pieced

    def _encode(self, *parts: Part) -> list[int]:
        """The token ids of the texts of `parts`, side by side, as the tokenizer encodes a whole
        text. Where it finds an id that must not come from a text, the text is cut within it.
        Several threads may encode at the same time."""
        text = "".join(part for part, _ in parts)
        # In each character.
        forbidden = [*chain.from_iterable(repeat(self.forbidden.get(role, self.control), len(part))
                                          for part, role in parts)]
        cuts = {0, len(text)}
        while True:
            starts = sorted(cuts)
            # `encode_batch` releases the interpreter to other threads; `encode` does not.
            encodings = self.encoder.encode_batch(
                [text[start:end] for start, end in pairwise(starts)], add_special_tokens=False)
            found = {start + left + 1 for start, encoding in zip(starts, encodings)
                     for token, (left, right) in zip(encoding.ids, encoding.offsets)
                     if token in self.control
                     and any(token in ids for ids in forbidden[start + left:start + right])}
            if found <= cuts:
                if found:
                    raise EnvError("one character of a message is a control token")
                return [token for encoding in encodings for token in encoding.ids]
            cuts |= found

    def _after_prompt(self, *parts: Part) -> list[int]:
        """The ids of `parts` after the generation prompt, where they do not change its ids."""
        before = (self.to_policy, None)
        start, ids = self._encode(before), self._encode(before, *parts)
        return ids[len(start):] if ids[: len(start)] == start else self._encode(*parts)

    def prompt(self, messages: Messages, tools: list[dict] | None = None,
               sampled: Sequence[tuple[str, list[int]]] = ()) -> list[int]:
        """Ids of a whole conversation and the generation prompt, by the template -> [T].

        tools: see `Play`. sampled: (text, ids) of the replies that the policy has written, in
        order: a message that is one of them has its ids, and is not encoded again. Raises EnvError
        for messages whose text the template changes, ValueError or whatever the template's program
        raises for others that it does not show.
        """
        cut, end = self._cut(messages, tools)
        rest, section, ids = list(sampled), [(end, None)], []  # from the last part to the first
        for before, text, message in reversed(cut):
            places = [i for i, (reply, own) in enumerate(rest)
                      if own and message == assistant(reply) and text == reply]
            if not places:
                section = [(before, None), (text, message["role"]), *section]
                continue
            *rest, (_, own) = rest[: places[-1] + 1]  # this prompt does not show the later ones
            ids = own + self._encode(*section) + ids
            # SentencePiece's first token has a space, which the text of a reply lacks.
            first = str(self.tokenizer.convert_ids_to_tokens(own[0]))
            is_spaced = self.header == " " and first.startswith("▁") and not text.startswith(" ")
            section = [(before.removesuffix(" ") if is_spaced else before, None)]
        return self._encode(*section) + ids

    def _cut(self, messages: Messages, tools: list[dict] | None) -> tuple[Cut, str]:
        """The template's text of a conversation, cut: [(text of the template, text of a message,
        the message), ...], and the template's text after the last one. No text of a message can be
        taken for one of the template, because the parts between the messages are known from a
        conversation of marks."""
        if self.tried["system"] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.tried["system"]}, *messages]
        if messages[0]["role"] == "system" and messages[1:] and not self.shows_system:
            text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            messages = [messages[1] | {"content": text}, *messages[2:]]
        if tools and self.control.intersection(
                self._encode((json.dumps(tools, ensure_ascii=False), None))):
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
            outline = _split(write(self.tokenizer, marked, self.tried, tools), "".join(marks))
            cut = _matched(written, outline, messages)
            if cut is not None:
                return cut, outline[-1]
        raise EnvError("this tokenizer's chat template changes the text of a message")

    def turns(self, messages: Messages, closed: bool) -> list[int]:
        """Ids of the messages that follow a reply, from the model's side and the other in turns
        and ending with one to the model, and of the generation prompt.

        closed: whether the policy ended the reply itself (`is_ended`). For a reply that was cut
        the end-of-turn token is the first of these ids, so it is part of the prompt and not of the
        loss.
        """
        before = {"user": self.to_user, "assistant": self.to_reply}
        parts = [part for m in messages
                 for part in ((before[m["role"]], None), (m["content"], m["role"]))]
        return self._encode(*parts, (self.to_policy, None))[int(closed):]

    def reply(self, text: str) -> list[int]:
        """Ids of a reply that the policy did not sample, as they follow the generation prompt: its
        header, its text and the token that ends it."""
        return [*self._after_prompt((self.header, None), (text, "assistant")), self.reply_end_id]

    def options(self, texts: Sequence[str]) -> list[list[int | None]]:
        """The ids of each reply that may be written, to its end; None at the end of an `Open` text:
        from there on any ids."""
        return [[*self.reply_once(text)[:-1], None] if isinstance(text, Open)
                else self.reply_once(text) for text in texts]

    def final_message(self, reply: list[int]) -> list[int]:
        """The part of a reply that the environment gets: what follows the header of the final
        channel ([] if there is none) or, without channels, all but the template's header."""
        size = len(self.final_header)
        if not size:
            header = self.header_ids
            return reply[len(header):] if reply[: len(header)] == header else reply
        ends = (i for i in range(size, len(reply) + 1) if reply[i - size : i] == self.final_header)
        return reply[max(ends, default=len(reply)):]

    def is_ended(self, reply: list[int]) -> bool:
        """Whether the last of these tokens ends the reply."""
        return reply[-1] in self.eos_ids or reply[-1] == self.end_id and (
            not self.final_header or self.final_message(reply) != [])


def _matched(text: str, outline: list[str], messages: Messages) -> Cut | None:
    """`text` cut into the template's parts (`outline`) and the messages between them, which may
    lack their thoughts and the spaces around them: see `Chat._cut`. None: it is another text.

    outline: what the template writes around the marks "@message3@" and "@thought3@" of a
    conversation, and the marks: see `_split`."""
    cut = []
    for before, mark, after in zip(outline[::2], outline[1::2], outline[2::2]):
        message = messages[int(re.sub(r"\D", "", mark))]
        thought, _, rest = message["content"].rpartition("</think>")
        wholes = [thought.split("<think>")[-1]] if "thought" in mark else [message["content"], rest]
        forms = [form for whole in wholes
                 for form in (whole, whole.lstrip("\n"), whole.strip("\n"), whole.strip())]
        form = next((f for f in forms if text.startswith(before + f + after)), None)
        if form is None:
            return None
        cut.append((before, form, message))
        text = text[len(before) + len(form):]
    return cut if text == outline[-1] else None


def note_history(chat: Chat) -> None:
    """Say on stderr what is done with a template that drops thoughts."""
    if chat.drops_thoughts:
        print("this chat template drops the thoughts of earlier replies: --history "
              f"{chat.history} (docs/agents.md)", file=sys.stderr)
