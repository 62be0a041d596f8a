"""The agent's side of the text: prompts, action formats, and chat rendering turn by turn.

Tokens are canonical. A conversation is rendered to token ids once, from left to right: `Chat.start`
gives the ids of the instructions and of the first observation, `Chat.turn` gives the ids that
follow a reply. Nothing is decoded and encoded again. So the prompt of each turn extends the
previous one exactly, even where the chat template would change earlier turns when it renders a
whole conversation (Qwen3's template removes their <think> blocks, GPT-OSS's their analysis).
"""

import ast
import copy
import inspect
import json
import multiprocessing
import re
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment

from envs import Env, Step

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


# ---- the conversation of an episode ----


class Phase(Enum):
    """What the agent is asked for in its next reply."""

    ACT = "act"  # an action
    PLAN = "plan"  # a plan, before the first action
    REFLECT = "reflect"  # what went wrong in an invalid action
    RETRY = "retry"  # what went wrong in a failed episode, which is then played again


class Dialogue:
    """The conversation of one episode: what the agent is told, and what is done with its replies.

    In Phase.ACT a reply holds an action, which the environment executes. In the other phases it is
    a plan or a reflection. The environment does not see it, but it counts as a turn.

    number: the number of the item. horizon: the largest number of turns. plan: ask for a plan
    before the first action. reflect: ask for a reflection after an invalid action and after a
    failed episode; a failed episode is then played once more. Plans and reflections are asked for
    only if at least one turn is left to act in after them. lenient_as: see `parse`. texts:
    {"prompt": ..., "reply": ...}: "prompt" replaces the whole first message (the world's
    instructions and the action format), "reply" replaces FIRST_REPLY.

    `phase` is what the next reply is asked to be. `first_reply` is the fixed reply.
    """

    def __init__(self, number: int, horizon: int, action_format: str = "plain",
                 plan: bool = False, reflect: bool = False, lenient_as: str = "",
                 texts: dict[str, str] | None = None):
        self.number = number
        self.horizon = horizon
        self.action_format = action_format
        self.plan = plan
        self.reflect = reflect
        self.lenient_as = lenient_as
        self.texts = texts or {}
        self.first_reply = self.texts.get("reply", FIRST_REPLY)
        self.turns = 0  # replies so far
        self.phase = Phase.ACT
        self.second_attempt = False
        self.last_step = Step("")

    @property
    def restarts(self) -> bool:
        """Whether the episode has failed and starts again after the next reply.

        True from the failing action until the reflection on it. The rewards of all turns so far
        then do not count, because they belong to the first attempt.
        """
        return self.phase is Phase.RETRY

    def begin(self, env: Env) -> tuple[str, str]:
        """Reset the environment -> the instructions and the first observation.

        An environment that takes whole replies describes their form in its own prompt.
        """
        observation = env.reset(self.number)
        if self.plan and self.horizon > 1:
            self.phase = Phase.PLAN
            observation += PLAN
        if self.texts:
            return self.texts["prompt"], observation
        action_format = "plain" if env.whole_reply else self.action_format
        return instructions(env.prompt, action_format), observation

    def reply(self, env: Env, text: str) -> Step:
        """Answer the agent's reply -> the environment's step or, if the environment does not see
        the reply, a step with reward 0 that keeps the last score."""
        phase = self.phase
        self.phase = Phase.ACT
        self.turns += 1
        if phase is Phase.RETRY:
            self.second_attempt = True
            step = Step(AGAIN + env.reset(self.number), score=self.last_step.score)
        elif phase is not Phase.ACT:
            step = self._unseen_step(ACT)
        else:
            step = self._act(env, text)
            if self.reflect and self.horizon - self.turns > 1:
                step = self._ask_to_reflect(step)
        self.last_step = step
        return step

    def _act(self, env: Env, text: str) -> Step:
        """Pass a reply or its action to the environment, unless it has no action to pass on."""
        action = text
        if not env.whole_reply:
            action = parse(text, self.action_format, self.lenient_as)
        if action or env.whole_reply:
            return env.step(action)
        return self._unseen_step(complaint(text, self.action_format), valid=False)

    def _unseen_step(self, observation: str, valid: bool = True) -> Step:
        """A step in which the environment did nothing: no reward, score and progress stay."""
        last = self.last_step
        return Step(observation, score=last.score, valid=valid, progress=last.progress)

    def _ask_to_reflect(self, step: Step) -> Step:
        """Append the request for a reflection to a step that calls for one, and set the phase."""
        if step.done and not step.success and not self.second_attempt:
            self.phase = Phase.RETRY
            return replace(step, done=False, observation=step.observation + REFLECT_ON_ALL)
        if not step.valid and not step.done:
            self.phase = Phase.REFLECT
            return replace(step, observation=step.observation + REFLECT)
        return step


# ---- from text to token ids ----

# The conversation that a chat template is rendered with.
MARKS = {"@first@": "user", "@reply@": "assistant", "@next@": "user"}
# What a chat template may take: usual ones take 0.05 s, and give less than 10 kB.
TEMPLATE_SECONDS = 2  # of processor time: a busy machine makes no template fail
TEMPLATE_MEMORY = 2**29  # bytes
TEMPLATE_LENGTH = 2**20  # bytes of text


def template_arguments(chat_args: str) -> dict[str, object]:
    """--chat_args, a JSON object or NAME=VALUE pairs, as a dict. Raises ValueError for what cannot
    be read.

    >>> template_arguments("enable_thinking=false reasoning_effort=low")
    {'enable_thinking': False, 'reasoning_effort': 'low'}
    >>> template_arguments('{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    if chat_args.lstrip().startswith("{"):
        try:
            return json.loads(chat_args)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"--chat_args is not a JSON object: {e}") from e
    arguments = {}
    for part in chat_args.split():
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"cannot read --chat_args '{part}'; write enable_thinking=false, "
                             "or a JSON object")
        try:
            arguments[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


def render_marks(tokenizer: "PreTrainedTokenizerBase", system: str = "",
                 chat_args: str = "") -> str:
    """The conversation of MARKS as the tokenizer's chat template writes it.

    system: the text of a system message before it; "": no such message. chat_args: see
    `template_arguments`. The template is a program that comes with a model, so it runs in a child
    process with limits. Raises ValueError if there is no template, for one that fails or exceeds
    them, and for one that does not use `system` or a name in `chat_args`.
    """
    if not tokenizer.chat_template:
        raise ValueError("this model has no chat template: take its Instruct version, or give a "
                         "file with --chat_template")
    arguments = template_arguments(chat_args)
    messages = [{"role": role, "content": mark} for mark, role in MARKS.items()]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = _render_in_child(tokenizer, messages, arguments)
    if system.strip() not in text:
        raise ValueError("this tokenizer's chat template does not show the text of --system")
    return text


def _render_in_child(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]],
                     arguments: dict[str, object]) -> str:
    """The messages as the chat template writes them, in a child process with limits."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_text, args=(tokenizer, messages, arguments, sender),
                         daemon=True)
    child.start()
    sender.close()
    text, problem = "", f"gives no text within {TEMPLATE_SECONDS} s"
    try:
        if receiver.poll(20 * TEMPLATE_SECONDS):
            text, problem = receiver.recv()
    except EOFError:
        pass  # its timer ended the child before it sent anything
    child.kill()
    child.join()
    receiver.close()
    if problem:
        raise ValueError(f"this tokenizer's chat template {problem}")
    return text


def _send_text(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]],
               arguments: dict[str, object], sender: Connection) -> None:
    """In the child process: send the messages' text and "", or "" and what is wrong."""
    # The timer's signal ends the process, also within one long operation on a number or a string.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_SECONDS)
    try:
        _limit_memory()
        for name in arguments:
            if name not in _switches(tokenizer):
                raise ValueError(f"--chat_args: it has no switch '{name}'")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                             **arguments)
        answer = text, ""
        if len(text.encode()) > TEMPLATE_LENGTH:
            answer = "", f"writes more than {TEMPLATE_LENGTH} bytes around three words"
    except Exception as e:  # whatever the template's program raises
        answer = "", f"fails: {type(e).__name__} {str(e)[:300]}"
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
    """A tokenizer's chat template, cut into the pieces that stand between messages.

    The template is rendered once for a tokenizer, whose attribute `rendered_marks` keeps the text:
    a template that shows the date would give another one after midnight.

    `end_id` is the end-of-turn token, which the policy samples to finish a reply.

    A template may have channels, as GPT-OSS's has: the policy first writes a message to the channel
    "analysis", then one to the channel "final". `final_header` is the ids that open the final
    message ([] without channels). The environment gets only the text after it. Before
    `final_header` an end-of-turn token does not end the reply; an end-of-sequence token (GPT-OSS's
    <|return|>) always does. The trajectory keeps the analysis and the end-of-sequence token. The
    template would drop the analysis of earlier turns and write <|end|> instead.

    Raises ValueError for a template that fails, that does not show every message exactly once
    and in order, or that ends a reply with an ordinary token: replies would end anywhere.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self.tokenizer = tokenizer
        # A copy of the fast tokenizer, because every transformers call resets
        # `encode_special_tokens` on the original. Calling it directly takes half the time.
        self.encoder = copy.deepcopy(getattr(tokenizer, "backend_tokenizer", None))
        if self.encoder is not None:
            self.encoder.encode_special_tokens = True
            self.encoder.no_truncation()
            self.encoder.no_padding()
        template = tokenizer.chat_template
        if getattr(tokenizer, "rendered_template", template) != template:
            vars(tokenizer).pop("rendered_marks", None)  # its template was replaced
        if not hasattr(tokenizer, "rendered_marks"):
            tokenizer.rendered_marks = render_marks(tokenizer)
            tokenizer.rendered_template = template
        # Cut the text at the marks.
        text = tokenizer.rendered_marks
        pieces = []
        for mark in MARKS:
            if text.count(mark) != 1:
                raise ValueError(
                    "this tokenizer's chat template does not show each message once, in order")
            piece, text = text.split(mark)
            pieces.append(self._encode_piece(piece))
        # head: before the instructions. to_reply: between the instructions and the fixed reply.
        # to_user: between a reply and an observation. to_policy: the generation prompt, between
        # an observation and a reply.
        self.head, self.to_reply, self.to_user = pieces
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
        """Token ids of an observation. max_ids: how many there is room for; None: no limit.

        A text that is certainly longer is cut before it is encoded, which saves encoding
        megabytes. At least `max_ids` ids are still returned, so the caller sees that the
        observation does not fit.
        """
        text = text.strip()
        if max_ids is not None and len(text) > max_ids * self.longest_token:
            ids = self._encode(text[: max_ids * self.longest_token])
            if len(ids) >= max_ids:  # fewer: the tokenizer shortens the text before it cuts it
                return ids
        return self._encode(text)

    def start(self, prompt: str, observation: str, max_ids: int | None = None,
              reply: str = FIRST_REPLY) -> list[int]:
        """Ids of the beginning of a conversation: the instructions, the fixed reply to them, the
        first observation (see `observation`) and the generation prompt."""
        ids = self.head + self._encode(prompt)
        ids += self.to_reply + self._encode(reply)
        ids += self.to_user + self.observation(observation, max_ids)
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
        """Ids between a reply and the next one: the observation (see `observation`) and the
        generation prompt.

        closed: whether the policy ended the reply itself (`is_ended`). For a reply that was cut
        the end-of-turn token is the first of these ids, so it is part of the prompt and not of the
        loss.
        """
        before = self.to_user[1:] if closed else self.to_user
        return before + self.observation(observation, max_ids) + self.to_policy
