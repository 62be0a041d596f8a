"""A chat template: the program, made by others, that a model brings to write conversations as text.

It is tried once, in a child process with limits. Then it runs in this process, in transformers'
sandbox (`write`).
"""

import json
import multiprocessing
import re
import resource
from contextlib import suppress
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jinja2 import Environment

from envs import read_settings

Tokenizer = Any  # transformers' PreTrainedTokenizerBase; to play by hand needs no transformers

# The conversations that a template is tried with: `agent.Chat` cuts the first at its marks, and the
# second shows whether the template drops the thought of an earlier reply.
MARK = "@message[0-9]+@"
MARKS = {"@message0@": "user", "@message1@": "assistant", "@message2@": "user"}
THOUGHT = {"@message0@": "user", "<think>\n@thought@\n</think>\n\n@message1@": "assistant",
           "@message2@": "user"}
# What a template may take: usual ones take 0.05 s.
SECONDS = 2  # of processor time: a busy machine makes no template fail
MEMORY = 2**29  # bytes


def try_template(tokenizer: Tokenizer, system: str = "", chat_args: str = "") -> dict[str, Any]:
    """Try a tokenizer's chat template -> what `agent.Chat` takes as the tokenizer's
    `tried_template`: the template ("of"), the same with a fixed time ("template"), its arguments,
    the system message, and the conversations of MARKS ("marks") and THOUGHT ("thought") as text.

    system: the text of a system message before every conversation; "": no such message. chat_args:
    see `read_settings`. Raises ValueError if there is no template, for one that fails or exceeds
    the limits, and for one that does not use `system` or a name in `chat_args`.
    """
    tried = {"of": tokenizer.chat_template,
             "template": with_fixed_time(tokenizer.get_chat_template()),
             "arguments": read_settings(chat_args, "--chat_args"), "system": system}
    fork = multiprocessing.get_context("fork")
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
    tried["marks"], tried["thought"] = answer
    if system.strip() not in tried["marks"]:
        raise ValueError("this tokenizer's chat template does not show the text of --system")
    return tried


def with_fixed_time(template: str) -> str:
    """The template, which shows the present time at any later time, too: the prompts of a run do
    not change at midnight. Raises ValueError for a form of the time that is not a literal."""
    now = datetime.now()
    fixed = re.sub(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""",
                   lambda match: json.dumps(now.strftime(match[2])), template)
    if "strftime_now(" in fixed:
        raise ValueError("this tokenizer's chat template computes how it shows the time")
    return fixed


def write(tokenizer: Tokenizer, messages: list[dict[str, str]], tried: dict[str, Any],
          tools: list[dict] | None = None) -> str:
    """The text of a conversation, and of the generation prompt, by the chat template."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=tried["template"], tokenize=False,
        add_generation_prompt=True, **tried["arguments"])


def _send_texts(tokenizer: Tokenizer, tried: dict[str, Any], sender: Connection) -> None:
    """In the child process: send the texts of both conversations, or what is wrong."""
    # The limit ends the process, also within one long operation on a number or a string.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        with suppress(OSError, ValueError):  # only Linux has /proc; there is a smaller limit
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        names = {text for _, kind, text in Environment().lex(tokenizer.get_chat_template())
                 if kind == "name"}
        if unknown := tried["arguments"].keys() - names:
            raise ValueError(f"--chat_args: it has no switch {', '.join(unknown)}")
        start = [{"role": "system", "content": tried["system"]}] if tried["system"] else []
        answer = [write(tokenizer, start + [{"role": role, "content": mark}
                                            for mark, role in marks.items()], tried)
                  for marks in (MARKS, THOUGHT)]
    except Exception as e:  # whatever the template's program raises
        answer = f"fails: {type(e).__name__} {str(e)[:300]}"
    sender.send(answer)
