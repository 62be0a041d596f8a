"""The agent's side of the text: prompts, action formats, and chat rendering turn by turn into token ids.

Tokens are canonical. A conversation is rendered once, left to right: `Chat.start` gives the ids of the instructions and
the first observation, `Chat.turn` those that follow a reply. Nothing is ever decoded and encoded again, so each turn's
prompt extends the last one exactly, whatever the chat template would do to old turns (Qwen3's drops their <think>).
"""

import threading

LOCK = threading.Lock()
FORMATS = {  # action format -> what the agent is told about it
    "plain": "",
    "react": "\n\nThink first, then act. Answer in this form:\nThought: what you see and what to do next\n"
             "Action: one action, nothing else",
}


def instructions(prompt: str, action_format: str = "plain") -> str:
    """The first user message: the world's own `prompt` and how to answer. Raises ValueError for an unknown format."""
    if action_format not in FORMATS:
        raise ValueError(f"unknown action format '{action_format}'; choose from {', '.join(FORMATS)}")
    return prompt + FORMATS[action_format]


def parse(reply: str, action_format: str = "plain") -> str:
    """The action in a reply; "" (which no world accepts) if there is none or more than one. Never raises.

    >>> parse(" turn left\\n"), parse("Thought: a wall.\\nAction: turn left", "react"), parse("Action: a Action: b", "react")
    ('turn left', 'turn left', '')
    """
    if action_format == "react":
        parts = reply.split("Action:")
        return parts[1].strip() if len(parts) == 2 else ""
    return reply.strip()


class Chat:
    """A tokenizer's chat template, cut into the pieces between messages.

    `end_id` is the end-of-turn token: what the policy samples to finish a reply."""

    def __init__(self, tokenizer):
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
