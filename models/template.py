"""A chat template: the program, made by others, that a model brings to write conversations as text.

It is tried once, in a child process with limits. Then it runs in this process, in transformers'
sandbox (`write`).
"""

import json
import re
import resource
from contextlib import suppress
from datetime import datetime
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from jinja2 import Environment

from envs import read_settings

Tokenizer = Any  # transformers' PreTrainedTokenizerBase; to play by hand needs no transformers

# The conversation that a template is tried with: `agent.Chat` cuts its text at the marks. A second
# one, where THOUGHT stands before the reply, shows whether the template drops earlier thoughts.
MARK = "@message[0-9]+@"
MARKS = {"@message0@": "user", "@message1@": "assistant", "@message2@": "user"}
THOUGHT = "<think>\n@thought@\n</think>\n\n"
# What a template may take: usual ones take 0.05 s.
SECONDS = 2  # of processor time: a busy machine makes no template fail
MEMORY = 2**29  # bytes


def try_template(tokenizer: Tokenizer, system: str = "", chat_args: str = "") -> dict[str, Any]:
    """Try a tokenizer's chat template -> what `agent.Chat` takes as the tokenizer's
    `tried_template`: the template ("of"), the same with a fixed time ("template"), its arguments,
    the system message, and the conversation as text, without THOUGHT ("marks") and with it
    ("thought").

    system: the text of a system message before every conversation; "": no such message. chat_args:
    see `read_settings`. Raises ValueError if there is no template, for one that fails or exceeds
    the limits, and for one that does not use `system` or a name in `chat_args`.
    """
    tried = {"of": tokenizer.chat_template,
             "template": with_fixed_time(tokenizer.get_chat_template()),
             "arguments": read_settings(chat_args, "--chat_args"), "system": system}
    fork = get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_texts, args=(tokenizer, tried, sender), daemon=True)
    child.start()
    sender.close()
    answer = f"gives no text within {SECONDS} s"
    with suppress(EOFError):  # a limit ended the child before it sent anything
        if receiver.poll(20 * SECONDS):
            answer = receiver.recv()
    child.kill()
    child.join()
    if isinstance(answer, str):
        raise ValueError(f"this tokenizer's chat template {answer}")
    if system.strip() not in answer["marks"]:
        raise ValueError("this tokenizer's chat template does not show the text of --system")
    return tried | answer


def with_fixed_time(template: str) -> str:
    """The template, which shows the present time at any later time, too: the prompts of a run do
    not change at midnight. Raises ValueError for a form of the time that is not a literal."""
    fixed = re.sub(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
                   lambda match: json.dumps(datetime.now().strftime(match[2])), template)
    if "strftime_now(" in fixed:
        raise ValueError("this tokenizer's chat template computes how it shows the time")
    return fixed


def write(tokenizer: Tokenizer, messages: list[dict[str, str]], tried: dict[str, Any],
          tools: list[dict] | None = None) -> str:
    """The text of a conversation, and of the generation prompt, by the chat template."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=tried["template"], tokenize=False,
        add_generation_prompt=True, **tried["arguments"])


def _send_texts(tokenizer: Tokenizer, tried: dict[str, Any], sender: connection.Connection) -> None:
    """In the child process: send the texts of both conversations, or what is wrong."""
    # The limit ends the process, also within one long operation on a number or a string.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        with suppress(OSError, ValueError):  # only Linux has /proc; there is a smaller limit
            size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        names = {text for _, kind, text in Environment().lex(tried["template"]) if kind == "name"}
        if unknown := tried["arguments"].keys() - names:
            raise ValueError(f"--chat_args: it has no switch {', '.join(unknown)}")
        start = [{"role": "system", "content": tried["system"]}] if tried["system"] else []
        messages = start + [{"role": role, "content": mark} for mark, role in MARKS.items()]
        answer = {"marks": write(tokenizer, messages, tried)}
        messages[-2]["content"] = THOUGHT + messages[-2]["content"]
        answer["thought"] = write(tokenizer, messages, tried)
    except Exception as e:  # whatever the template's program raises
        answer = f"fails: {type(e).__name__} {str(e)[:300]}"
    sender.send(answer)
