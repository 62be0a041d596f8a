"""Chat templates of real families, each with three kinds of tokenizers: is every prompt of a
conversation what the template writes, with the ids that the tokenizer gives the whole text?

    python experiments/templates.py            # the table of docs/families.md
    python experiments/templates.py llama3     # one template

A scripted model plays four turns, as a rollout does. The oracle is `apply_chat_template` and one
call of the tokenizer. Only the ids within replies may differ: they stay as they were sampled. Then
all messages of the world, of the world on a server, and of a file --prompts forge turns: they hold
the text of every control token, and none may come of it. The exit code is 1 if any row differs.
"""

import copy
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from agent import Chat, read_settings, try_template  # noqa: E402
from config import read_prompts  # noqa: E402
from envs import WORLDS, Env, Step  # noqa: E402
from rollout import Conversation, Rollouts  # noqa: E402
from trajectory import Trajectory, reply_spans  # noqa: E402
from worlds import serve  # noqa: E402
from worlds.agentgym import RemoteEnv  # noqa: E402

FOLDER = ROOT / "tests" / "templates"
KINDS = ("byte-level", "metaspace", "prepend")
# What real tokenizers of these families hold as special tokens: found in the template's text.
SPECIAL = re.compile(
    r"<\|[^|<>\s']+\|>|<｜[^<>\s']+｜>|\[\|[^\]]+\|\]|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
    r"|</?s>|<eos>|<(?:start|end)_of_turn>|<\|?turn\|?>|<\|?channel\|?>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THOUGHT = ("<|channel>", "<channel|>")  # what is between them Gemma 4's template leaves out
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
    """Says what `said` holds, in this process and on a server in it."""

    prompt = said = ""

    def reset(self, item: int) -> str:
        """The first observation."""
        return f"Your goal: go to the red ball{self.said}\n{self.said}You see nothing."

    def step(self, action: str) -> Step:
        """Nothing ends the episode."""
        return Step(f"{self.said} Now you see\na red ball 1 {self.said}")


WORLDS["echo"] = f"{__name__}:Echo"


@contextmanager
def served_echo() -> Iterator[str]:
    """A server of `Echo` in a thread -> its address."""
    listener = serve.listen("127.0.0.1", 0)
    app = serve.build_app(serve.EpisodeStore("echo"), 4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def play(chat: Chat, said: str = "", url: str = "", prompts: str = "",
         ) -> tuple[Trajectory, list[list[dict]], list[list[int]]]:
    """A scripted conversation -> it, the messages of each prompt, and the ids of each reply that
    later prompts show. said: what the world says besides. url: of its server; "": in this process.
    prompts: see `read_prompts`."""
    Echo.said, Echo.prompt = said, f"You are an agent in a grid of rooms. {said}"
    env, shown = RemoteEnv("echo", url) if url else Echo(), []
    settings = Rollouts(prompt_texts=read_prompts(prompts, ["echo"]))
    talk = Conversation(Trajectory("echo_0", "echo"), len(SAYS) + 1, settings, chat)
    talk.advance(env)
    for text in SAYS:
        assert talk.take()
        shown.append(talk.prompt)
        ids = chat.reply(text)
        talk.trajectory.append(ids, [0.0] * len(ids))
        talk.advance(env, text, chat.final_message(ids[:-1]))
    env.close()
    return talk.trajectory, shown, [ids for _, ids in talk.sampled]


def forge(chat: Chat, way: str, url: str, said: str, replied: str) -> Trajectory:
    """A scripted conversation in which `way` says more. replied: in a reply that is not the
    policy's, which may have thoughts."""
    if way != "prompts":
        return play(chat, said, url if way == "server" else "")[0]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"echo": {"prompt": f"Play. {said}", "reply": f"OK {replied}"}}, file)
        file.flush()
        return play(chat, prompts=file.name)[0]


def differences(chat: Chat, arguments: dict, url: str) -> list[str]:
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
    added = tokenizer.added_tokens_decoder
    markers = {i for i, token in added.items() if token.special
               or str(token) in ADDED and str(token) in tokenizer.chat_template}
    said, replied = ("".join(str(added[i]) for i in sorted(ids))
                     for ids in (markers, [i for i in markers & chat.turn_control
                                           if str(added[i]) not in THOUGHT]))
    for way in ("world", "server", "prompts"):
        forged, harmless = forge(chat, way, url, said, replied), forge(chat, way, url, "x", "x")
        a, b = (Counter(i for i, sampled in zip(t.tokens, t.mask) if i in markers and not sampled)
                for t in (forged, harmless))
        if a != b or len(forged.starts) != len(harmless.starts):
            found.append(f"forged, {way}: {tokenizer.convert_ids_to_tokens([*(a - b)])}")
    return found


def row(tokenizer: PreTrainedTokenizerBase, template: str, url: str,
        chat_args: str = "") -> tuple[str, list]:
    """-> how the template is handled, for people, and what differs. url: see `served_echo`."""
    tokenizer = with_template(tokenizer, template)
    try:
        tokenizer.tried_template = try_template(tokenizer, chat_args=chat_args)
        chat = Chat(tokenizer)
    except ValueError as e:
        return f"refused: {str(e).removeprefix('this chat template ')[:60]}", []
    wrong = differences(chat, read_settings(chat_args, ""), url)
    count = len(play(chat)[0].starts)
    return "differs" if wrong else f"same, {count} segment{'s' * (count > 1)}", wrong


if __name__ == "__main__":
    tokenizers = make_tokenizers()
    names = sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.jinja"))
    print(f"| template | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    is_wrong = False
    with served_echo() as url:
        for name in names:
            template = (FOLDER / f"{name}.jinja").read_text()
            cells = [row(tokenizers[kind], template, url) for kind in KINDS]
            print(f"| {name} | {' | '.join(cell for cell, _ in cells)} |", flush=True)
            for text in (text for _, wrong in cells for text in wrong):
                print(f"{name}: {text}", file=sys.stderr)
                is_wrong = True
    sys.exit(is_wrong)
