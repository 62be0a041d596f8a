"""Look for the faults of docs/pitfalls.md in a dump of trajectories:

    python experiments/check_dump.py FILE [--model NAME] [--logprobs]

FILE: JSON lines or a JSON list, a trajectory each, with the fields of
- a run of this project: trajectories/*.jsonl;
- TRL: prompt_ids, completion_ids (or input_ids), completion_mask, tool_mask or env_mask, logprobs,
  reward, advantages, num_items_in_batch, and the messages prompt and completion;
- verifiers: prompt, completion, error, advantage, and `trajectory`: steps with `tokens`.
--model: the model that sampled, for its tokenizer and chat template; a run's dump needs no such
flag. --logprobs: that model has the very weights that sampled, at temperature 1; the log-probs that
it computes are compared with the recorded ones.
Prints a line a check. Exit code 1 if a fault was found, 2 if the file cannot be read, or has
nothing that a check can look at.
"""

import json
import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from collections import defaultdict, namedtuple
from itertools import pairwise, zip_longest
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import rl  # noqa: E402
from agent import Chat  # noqa: E402
from trajectory import Trajectory, read_trajectories, reply_spans  # noqa: E402

# A token is trained if all masks that are there say so.
MASKS = ("completion_mask", "tool_mask", "env_mask")
LOGPROBS = ("completion_logprobs", "logprobs", "sampling_per_token_logps", "old_log_probs")
STOPS = ("</search>", "</answer>")  # they end a reply in SearchQA, without an end-of-turn token


class Missing(Exception):
    """What a check needs and does not have."""


def need(value, what):
    """The value. Raises Missing if it is None."""
    if value is None:
        raise Missing(what)
    return value


# ---- a trajectory, in whatever form it was dumped ----

# What the model was fed in one context: lists [T], None where the dump does not say; `messages`:
# those of a step.
Part = namedtuple("Part", "ids mask logprobs rewards messages", defaults=[None])


def part_of(row, reward, messages=None):
    """A prompt and what follows it, in the fields of TRL or of a step of verifiers. The reward
    stands on the last sampled token or, if none was sampled, on the last token."""
    masks = [row[name] for name in MASKS if row.get(name) is not None]
    logprobs = [row[name] for name in LOGPROBS if row.get(name) is not None]
    prompt = row.get("prompt_ids") or []
    ids, zeros = prompt + (row.get("completion_ids") or row["input_ids"]), [0] * len(prompt)
    mask = zeros + [min(column) for column in zip_longest(*masks, fillvalue=1)] if masks else None
    last = max((n for n, sampled in enumerate(mask or []) if sampled), default=len(ids) - 1)
    rewards = None if reward is None else [reward * (n == last) for n in range(len(ids))]
    return Part(ids, mask, zeros + logprobs[0] if logprobs else None, rewards, messages)


class Record:
    """One trajectory. A field is None where the dump does not say. `cut`: of each reply, whether a
    limit ended it. `chosen`: whether replies were chosen from a list. `mates`: the records of its
    group. `denominators`: those of its step."""

    def __init__(self, row):
        self.parts, self.cut, self.chosen = None, None, bool(row.get("choices"))
        self.failed = bool(row["error"]) if "error" in row else None
        if {"item", "env", "tokens"} <= row.keys():
            row = vars(Trajectory("", "")) | row
            lists = [row[name] for name in ("tokens", "mask", "logprobs", "rewards")]
            ends = [*row["starts"][1:], max(map(len, lists))]
            self.parts = [Part(*(values[start:end] for values in lists))
                          for start, end in zip(row["starts"] or [0], ends)]
            self.failed, count = row["status"] == "env_error", len(self.replies())
            limits = {*row["cut_turns"], count * (row["status"] in ("length", "env_error"))}
            self.cut = [turn in limits for turn in range(1, count + 1)]
        elif steps := [step for step in row.get("trajectory", []) if step.get("tokens")]:
            self.parts = [part_of(step["tokens"], step.get("reward"),
                                  [*step["prompt"], *step["completion"]]) for step in steps]
            self.cut = [bool(step.get("is_truncated")) for step in steps]
        elif row.get("completion_ids") or row.get("input_ids"):
            self.parts = [part_of(row, row.get("reward"))]
        self.advantage = row.get("advantage", row.get("advantages"))
        self.denominator = row.get("num_items_in_batch")
        self.step, self.group = row.get("step"), row.get("group", row.get("example_id"))
        # A prompt that is one text is left out: it has the template's own tokens.
        lists = [row.get(name) for name in ("messages", "prompt", "completion")]
        self.messages = [m for messages in lists if isinstance(messages, list) for m in messages
                         if isinstance(m.get("content"), str)] or None

    def replies(self):
        """(ids, the id that follows, if there is one) of each reply."""
        return [(part.ids[start:end], part.ids[end:end + 1]) for part in self.parts
                for start, end in reply_spans(need(part.mask, "field completion_mask"))]

    def is_torn(self):
        """Whether lists of a part have different lengths."""
        return any(len({len(values) for values in part[:4] if values is not None}) > 1
                   for part in self.parts)


def read_record(row):
    """Raises ValueError for a row whose fields have other types than expected."""
    try:
        return Record(row)
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from e


# ---- the checks: whether a record has a fault ----


def reward_under_a_zero_mask(record, chat, policy):
    return any(reward and not sampled for part in record.parts for reward, sampled in zip(
        need(part.rewards, "field reward"), need(part.mask, "field completion_mask")))


def tokens_after_the_end(record, chat, policy):
    return any(need(chat, "--model").is_ended(reply[:n])
               for reply, _ in record.replies() for n in range(1, len(reply)))


def end_of_turn_not_trained(record, chat, policy):
    """If the dump does not say which replies were cut: in all, and an end follows one."""
    lacks = [not need(chat, "--model").is_ended(reply)
             and not chat.tokenizer.decode(reply).endswith(STOPS) for reply, _ in record.replies()]
    if record.cut is not None:
        return any(lacks_end and not cut for lacks_end, cut in zip(lacks, record.cut))
    return all(lacks) and any(after and chat.is_ended(after) for _, after in record.replies())


def changed_steps(record, chat):
    """Of the steps whose messages extend those of the step before, but not their ids: whether the
    text extends that of the step before."""
    return [need(chat, "--model").tokenizer.decode(b.ids).startswith(chat.tokenizer.decode(a.ids))
            for a, b in pairwise(record.parts) if b.ids[: len(a.ids)] != a.ids
            and a.messages and b.messages[: len(a.messages)] == a.messages]


def encoded_again(record, chat, policy):
    """Lists of different lengths, a step with the same text and other ids, or log-probs that differ
    by more than 0.5: engines that round differently differ by less."""
    gaps = [0.0]
    for part in [] if record.is_torn() else record.parts:
        recorded = torch.tensor([need(part.logprobs, "field logprobs")])
        if policy:
            need(not record.chosen or None, "log-probs over all tokens: replies were chosen")
            mask = torch.tensor([need(part.mask, "field completion_mask")]).bool()
            own, _ = rl.token_logprobs(policy, torch.tensor([part.ids]), mask)
            gaps += (own - recorded)[mask].abs().tolist()
    return record.is_torn() or any(changed_steps(record, chat)) or max(gaps) > 0.5


def history_rewritten(record, chat, policy):
    """A step shows another text than the last one, or what is trained is no text of a reply."""
    said = [m["content"].removeprefix("<think>\n").strip()
            for m in need(record.messages, "field messages") if m["role"] == "assistant"]
    shown = [need(chat, "--model").tokenizer.decode(reply, skip_special_tokens=True).strip()
             for reply, _ in record.replies()]
    is_other = not all(text.endswith(tuple(filter(None, said))) for text in filter(None, shown))
    return is_other and not record.failed or not all(changed_steps(record, chat))


def failure_in_the_baseline(record, chat, policy):
    """A failed trajectory has an advantage, or those of the rest of its group do not sum to 0."""
    own, is_failed = need(record.advantage, "field advantage"), need(record.failed, "field error")
    if is_failed or isinstance(own, list):
        return is_failed and bool(torch.tensor(own).any())
    rest = [other.advantage for other in record.mates if not other.failed]
    return len(rest) < len(record.mates) and abs(sum(rest)) > 1e-3


def denominator_of_a_micro_batch(record, chat, policy):
    return need(record.denominator, "field num_items_in_batch") and len(record.denominators) > 1


def in_words(ids):
    return f" {' '.join(map(str, ids))} "


def forged_turn(record, chat, policy):
    """The ids hold a control token and its neighbours as the text of an observation has them."""
    for message in need(record.messages, "field messages"):
        ids = need(chat, "--model").tokenizer.encode(message["content"], add_special_tokens=False)
        places = [n for n, i in enumerate(ids) if i in chat.control]
        piece = in_words(ids[max(0, places[0] - 1):places[-1] + 2] if places else [None])
        if message["role"] != "assistant" and any(piece in in_words(p.ids) for p in record.parts):
            return True
    return False


CHECKS = (reward_under_a_zero_mask, tokens_after_the_end, end_of_turn_not_trained, encoded_again,
          failure_in_the_baseline, denominator_of_a_micro_batch, history_rewritten, forged_turn)


def report(check, records, chat, policy):
    """Print the line of a check -> whether it has found something; None: it could not look."""
    found, count, missing = [], 0, "trajectories"
    for number, record in enumerate(records, 1):
        try:
            need(record.parts, "field completion_ids, tokens or trajectory")
            is_readable = check is encoded_again or not record.is_torn()
            found += [number] * (is_readable and check(record, chat, policy))
            count += 1
        except Missing as e:
            missing = e
    ok = f"ok ({count} of {len(records)})"
    result = f"FOUND {len(found)} of {count} (first: line {found[0]})" if found else ok
    print(f"{check.__name__.replace('_', ' ')}:", result if count else f"not checked: no {missing}")
    return bool(found) if count else None


def main(argv=None):
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--logprobs", action="store_true")
    args = parser.parse_args(argv)
    records = read_trajectories(args.file, read_record)
    groups, steps = defaultdict(list), defaultdict(set)
    for record in records:
        record.mates, record.denominators = groups[record.step, record.group], steps[record.step]
        record.mates.append(record)
        record.denominators.add(record.denominator)
    run = args.file.resolve().parent.parent / "config.json"
    name = args.model or run.exists() and json.loads(run.read_text()).get("model")
    chat = Chat(rl.load_tokenizer(name)) if name else None
    policy = rl.load_model(name) if args.logprobs else None
    found = [report(check, records, chat, policy) for check in CHECKS]
    if set(found) == {None}:
        raise ValueError(f"nothing in {args.file} could be checked")
    return int(any(found))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as e:
        print(f"check_dump.py: {e}", file=sys.stderr)
        sys.exit(2)
