"""Chat templates of real families, each with three kinds of tokenizers: is every prompt of a
conversation what the template writes, with the ids that the tokenizer gives the whole text?

    python experiments/templates.py            # the table of docs/families.md
    python experiments/templates.py llama3     # one template

A scripted model plays four turns, as a rollout does. The oracle is `apply_chat_template` and one
call of the tokenizer. Only the ids within replies may differ: they stay as they were sampled. Then
all messages of the world forge turns: they hold the text of every control token, and no control
token may come of it. The exit code is 1 if any row differs.
"""

import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from agent import Chat, read_settings, try_template  # noqa: E402
from envs import Env, Step  # noqa: E402
from rollout import Conversation, Rollouts  # noqa: E402
from trajectory import Trajectory, reply_spans  # noqa: E402

FOLDER = ROOT / "tests" / "templates"
KINDS = ("byte-level", "metaspace", "prepend")
# What real tokenizers of these families hold as special tokens: found in the template's text.
SPECIAL = re.compile(
    r"<\|[^|<>\s']+\|>|<｜[^<>\s']+｜>|\[\|[^\]]+\|\]|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
    r"|</?s>|<eos>|<(?:start|end)_of_turn>|<\|?turn\|?>|<\|?channel\|?>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# The first that a template has ends a sequence.
ENDS = ("<|return|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<turn|>",
        "[|endofturn|]", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|eot|>",
        "<|end_of_text|>", "<|user|>", "</s>")
REPLY = 10**6  # no id
SAYS = ["Thought: a wall.\nAction: turn left",
        "<think>\nWhere?\n</think>\n\nThought: b\nAction: go", "",
        "Thought: done\nAction: go to red ball 1"]


def sentence_piece(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space as "▁", and one before the text ("metaspace") or before every
    stretch between control tokens ("prepend": Llama 2, Mistral)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    words.train_from_iterator((ROOT / "README.md").read_text().split("\n"),
                              trainers.BpeTrainer(vocab_size=1500, special_tokens=tokens))
    bare = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "prepend":
        bare.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bare.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    bare.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                      decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    merged = json.loads(bare.to_str())
    merged["model"] |= {name: json.loads(words.to_str())["model"][name]
                        for name in ("vocab", "merges")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(merged)))
    tokenizer.add_special_tokens(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def make_tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """Kind -> a tokenizer without a template."""
    return {kind: sentence_piece(kind) if kind != "byte-level"
            else AutoTokenizer.from_pretrained(ROOT / "data" / "tiny") for kind in KINDS}


def with_template(tokenizer: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer with a template, and the tokens that stand in it."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.add_tokens([AddedToken(token, normalized=False)
                          for token in ADDED if token in template])
    tokenizer.eos_token = next((end for end in ENDS if end in template), tokenizer.eos_token)
    tokenizer.bos_token = tokenizer.bos_token or "<|endoftext|>"
    tokenizer.chat_template, tokenizer.generation_eos_ids = template, []
    return tokenizer


class Echo(Env):
    """Says what it was told, and what `said` holds."""

    said = ""

    def reset(self, item: int) -> str:
        """The first observation."""
        self.prompt = f"You are an agent in a grid of rooms. {self.said}"
        return f"Your goal: go to the red ball{self.said}\n{self.said}You see nothing."

    def step(self, action: str) -> Step:
        """Nothing ends the episode."""
        return Step(f"{self.said} Now you see\na red ball 1 {self.said}")


def play(chat: Chat, said: str = "") -> tuple[Trajectory, list[list[dict]], list[list[int]]]:
    """A scripted conversation -> it, the messages of each prompt, and the ids of each reply that
    later prompts show."""
    env, prompts = Echo(), []
    env.said = said
    talk = Conversation(Trajectory("babyai_0", "babyai"), len(SAYS) + 1, Rollouts(), chat)
    talk.advance(env)
    for text in SAYS:
        assert talk.take()
        prompts.append(talk.prompt)
        ids = chat.reply(text)
        talk.trajectory.append(ids, [0.0] * len(ids))
        talk.advance(env, text, chat.final_message(ids[:-1]))
    return talk.trajectory, prompts, [ids for _, ids in talk.sampled]


def differences(chat: Chat, arguments: dict) -> list[str]:
    """What is not as it should be; [] if nothing is."""
    tokenizer, found = chat.tokenizer, []
    t, prompts, replies = play(chat)
    spans = reply_spans(t.mask)
    for (place, _), messages in zip(spans, prompts):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                             **arguments)
        whole = tokenizer.encode(text, add_special_tokens=False)
        start = max(s for s in t.starts if s <= place)
        ids = t.tokens[start:place]
        # Anything may stand where a reply stands: one of this segment, or of an earlier one.
        for a, b in reversed(spans):
            if start <= a < place:
                ids[a - start : b - start] = [REPLY]
        pattern = "".join(map(chr, ids))
        for reply in filter(None, replies):
            pattern = pattern.replace("".join(map(chr, reply)), chr(REPLY))
        pattern = ".*".join(map(re.escape, pattern.split(chr(REPLY))))
        if not re.fullmatch(pattern, "".join(map(chr, whole)), re.DOTALL):
            found.append(f"{pattern!r}, not {text!r}")
    # Forged turns.
    forged = "".join(str(tokenizer.added_tokens_decoder[i]) for i in sorted(chat.control))
    attacked, harmless = play(chat, forged)[0], play(chat, "x")[0]
    if len(attacked.starts) == len(harmless.starts):
        a, b = (Counter(i for i, sampled in zip(t.tokens, t.mask) if i in chat.control)
                for t in (attacked, harmless))
        if a != b:
            found.append(f"forged: {tokenizer.convert_ids_to_tokens([*(a - b)])}")
    else:
        found.append(f"{len(attacked.starts)} segments where turns are forged")
    return found


def row(tokenizer: PreTrainedTokenizerBase, template: str, chat_args: str = "") -> tuple[str, list]:
    """-> how the template is handled, for people, and what differs."""
    tokenizer = with_template(tokenizer, template)
    try:
        tokenizer.tried_template = try_template(tokenizer, chat_args=chat_args)
        chat = Chat(tokenizer)
    except ValueError as e:
        return f"refused: {str(e).removeprefix('this chat template ')[:60]}", []
    wrong = differences(chat, read_settings(chat_args, ""))
    count = len(play(chat)[0].starts)
    return "differs" if wrong else f"same, {count} segment{'s' * (count > 1)}", wrong


if __name__ == "__main__":
    tokenizers = make_tokenizers()
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.jinja"))
    print(f"| template | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    is_wrong = False
    for name in names:
        cells = [row(tokenizers[kind], (FOLDER / f"{name}.jinja").read_text()) for kind in KINDS]
        print(f"| {name} | {' | '.join(cell for cell, _ in cells)} |", flush=True)
        for text in (text for _, wrong in cells for text in wrong):
            print(f"{name}: {text}", file=sys.stderr)
            is_wrong = True
    sys.exit(is_wrong)
