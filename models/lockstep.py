"""Decoding on the model's own attention and cache, with padded rows that advance together.

It is the reference for the engine, and it plays the models whose attention cannot be replaced.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from parallel import device_of


class Padded:
    """The KV cache of rows that advance together.

    The new ids of a step are padded on the left to one width. The attention mask hides the
    padding, and positions count real tokens only.
    """

    def __init__(self, policy: PreTrainedModel):
        self.policy = policy
        self.device = device_of(policy)
        self.forwarded = 0  # token positions computed, padding included
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.kv_cache = DynamicCache(config=self.policy.config.get_text_config())
        self.attention_mask: Tensor | None = None  # [B, columns] bool, True: a real token

    @torch.no_grad()
    def forward(self, chunks: list[list[int]]) -> Tensor:
        """Append new ids to the rows. chunks: B lists of ids, [] for a row that waits -> logits
        [B, V] after the last column; those of a row that waits mean nothing. At the start equal
        rows (the samples of an item) are computed once."""
        rows = list(range(len(chunks)))
        if self.attention_mask is None:
            distinct = list(dict.fromkeys(map(tuple, chunks)))
            rows = [distinct.index(tuple(chunk)) for chunk in chunks]
            chunks = distinct
        width = max(map(len, chunks))
        ids = [[0] * (width - len(chunk)) + [*chunk] for chunk in chunks]
        is_real = [[False] * (width - len(chunk)) + [True] * len(chunk) for chunk in chunks]
        ids, is_real = (torch.tensor(columns, device=self.device) for columns in (ids, is_real))
        before = is_real[:, :0] if self.attention_mask is None else self.attention_mask
        self.attention_mask = torch.cat([before, is_real], dim=1)
        positions = (self.attention_mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        self.forwarded += ids.numel()
        logits = self.policy(input_ids=ids, attention_mask=self.attention_mask.long(),
                             position_ids=positions, past_key_values=self.kv_cache,
                             use_cache=True, logits_to_keep=1).logits[:, -1]
        self.keep(rows)
        return logits[rows]

    def keep(self, rows: list[int]) -> None:
        """Replace the rows by these of them: a row may be left out, or repeated."""
        if rows == list(range(len(self.attention_mask))):
            return  # not every cache can select rows
        rows = torch.tensor(rows, device=self.device)
        self.kv_cache.batch_select_indices(rows)
        self.attention_mask = self.attention_mask[rows]


def decode_in_lockstep(policy: PreTrainedModel, queue: object, slots: int) -> int:
    """Play the episodes of a `rollout.TrajectoryQueue`: `slots` trajectories take their turns
    together, and wait for the slowest. -> number of token positions computed."""
    cache = Padded(policy)
    while True:
        queue.deal(slots - len(queue.todo))
        if not queue.todo and queue.is_dealt():
            return cache.forwarded
        rows = [queue.begin() for _ in range(min(slots, len(queue.todo)))]
        while kept := [place for place, e in enumerate(rows) if queue.take_answer(e)]:
            rows = [rows[place] for place in kept]
            if any(episode.begins for episode in rows):  # compute all rows anew
                cache.clear()
                for episode in rows:
                    episode.pending = episode.trajectory.segment()
            else:
                cache.keep(kept)
            writing = rows  # those whose replies are not complete
            while writing:
                logits = cache.forward([e.pending if e in writing else [] for e in rows])
                draw = queue.draw(logits[[e in writing for e in rows]], writing)
                writing = [e for e, is_complete in queue.take(draw).items() if not is_complete]
