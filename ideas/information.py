"""Template collapse: does a reply still depend on the item that it was written for?

    I = mean_i [log p(z_i | x_i) - log mean_j p(z_i | x_j)]    in nats

over the items i, j of one category of a step, z the first reply and x the first prompt: RAGEN-2
(arXiv 2604.06268). For each checkpoint of a run, of the step that it was saved before.

    python ideas/information.py runs/NAME
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import rl
import update
from envs import UserError
from trajectory import Trajectory, read_trajectories, reply_spans
from worlds import category_of

MOST_ITEMS = 8  # of each world: 64 short rows


def mutual_information(scores: Tensor) -> float:
    """How much a reply says about the item that it was written for, in nats.

        I = mean_i [log p(z_i | x_i) - log mean_j p(z_i | x_j)]

    scores [M, M]: log p(z_i | x_j) in row i and column j, the log-prob of the reply to item i,
    given the prompt of item j; NaN where item j is not compared with item i. At most log M. 0 if
    the replies do not depend on the item, however high their entropy is: the template collapse of
    RAGEN-2 (arXiv 2604.06268).

    >>> round(mutual_information(torch.tensor([[0.0, -50.0], [-50.0, 0.0]])), 4)  # log 2
    0.6931
    >>> mutual_information(torch.tensor([[-1.0, -1.0], [-3.0, -3.0]]))
    0.0
    """
    scores = scores.double()
    compared = ~scores.isnan()
    marginal = scores.masked_fill(~compared, -math.inf).logsumexp(1)  # [M]
    marginal -= compared.sum(1).double().log()
    return float((scores.diagonal() - marginal).mean())


def item_information(trajectories: Sequence[Trajectory],
                     logprobs_of: Callable[[dict[str, Tensor]], Tensor]) -> dict[str, float]:
    """World -> the mutual information of an item and the first reply to it, in nats
    (`mutual_information`), over up to MOST_ITEMS items of the step. logprobs_of: batch -> [B, T].

    Items are compared with those of their own category (level, depth, site): a policy that writes
    the same for all items of a category has 0. The largest categories come first. An item that is
    the only one of its category is left out, and so is a world in which no item remains.
    """
    found = {}
    for world in dict.fromkeys(t.env for t in trajectories):
        # The first reply to each item: group -> (category, first prompt, first reply).
        first = {}
        for t in trajectories:
            if t.env == world and t.group not in first and any(t.mask):
                if t.choices:
                    raise UserError("this reads replies that were sampled among all tokens")
                start, end = reply_spans(t.mask)[0]
                first[t.group] = category_of(t.item), t.tokens[:start], t.tokens[start:end]

        # The items of the largest categories. One that is left alone in its category is dropped.
        sizes = Counter(category for category, _, _ in first.values())
        chosen = sorted(first.values(), key=lambda entry: (-sizes[entry[0]], entry[0]))
        chosen = chosen[:MOST_ITEMS]
        sizes = Counter(category for category, _, _ in chosen)
        chosen = [entry for entry in chosen if sizes[entry[0]] > 1]
        if not chosen:
            continue

        # The log-prob of reply i after the prompt of item j, for items of the same category.
        categories, prompts, replies = zip(*chosen)
        num_items = len(chosen)
        pairs = [(i, j) for i in range(num_items) for j in range(num_items)
                 if categories[i] == categories[j]]
        rows = [Trajectory("", world) for _ in pairs]
        for row, (i, j) in zip(rows, pairs):
            row.append(prompts[j])
            row.append(replies[i], [0.0] * len(replies[i]))
        batch = update.collate(rows)
        logprobs = torch.where(batch["mask"], logprobs_of(batch), 0.0)
        pair_logprobs = torch.full((num_items, num_items), math.nan)
        pair_logprobs[tuple(zip(*pairs))] = logprobs.sum(1)
        found[world] = mutual_information(pair_logprobs)
    return found


def main(run: str) -> None:
    """Print the information of each world, for the checkpoints whose next step was played."""
    for folder in checkpoint.named(run):
        played = Path(run) / f"trajectories/step_{checkpoint.step_in(folder):06d}.jsonl"
        if played.exists():
            policy, _ = rl.load_policy(str(folder))

            def logprobs_of(batch):
                return rl.token_logprobs(policy, batch["ids"], batch["mask"])[0]

            with torch.no_grad():
                found = item_information(read_trajectories(played), logprobs_of)
            shown = ", ".join(f"{world} {nats:.3f}" for world, nats in found.items())
            print(f"step {checkpoint.step_in(folder)}: {shown or 'no two items of one category'}")


if __name__ == "__main__":
    main(sys.argv[1])
