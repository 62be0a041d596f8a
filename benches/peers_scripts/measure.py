"""What every script of this folder measures, in the same way: seconds, positions, masks, log-probs.

A script runs a job in one program, in that program's own Python environment, as
`python SCRIPT JOB.json REPORT.json`. A job is a dict:

    root, model, world, action_format, items, items_per_step, samples, horizon, max_tokens, lr,
    threads, measured (number of training steps), checked, settings (of the program), versions_of
    (packages)

Each training step takes the next `items_per_step` items. The first step is a warm-up, the next
`measured` steps are timed. With `checked` a last one follows, in which all sampled tokens and their
log-probs are recorded; that costs time and memory.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path

with open(sys.argv[1]) as file:
    JOB = json.load(file)
os.environ["OMP_NUM_THREADS"] = str(JOB["threads"])
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path[:0] = [JOB["root"]]

import torch  # noqa: E402

torch.set_num_threads(JOB["threads"])
torch.manual_seed(0)


def clocks() -> tuple[float, float]:
    """-> seconds by the wall clock, and seconds of processor time of this process."""
    return time.perf_counter(), time.process_time()


NUM_STEPS = 1 + JOB["measured"] + JOB["checked"]


def items_of_step(step: int) -> list[str]:
    """The names of a training step's items."""
    count = JOB["items_per_step"]
    return JOB["items"][step * count : (step + 1) * count]


class Sampled:
    """The replies that `generate` has sampled: history -> [(reply, log-probs)]."""

    def __init__(self):
        self.by_history = {}

    def add(self, history: list[int], reply: list[int], logprobs: list[float]) -> None:
        self.by_history.setdefault(tuple(history), []).append((reply, logprobs))

    def logprobs_of(self, ids: list[int]) -> dict[int, float]:
        """Position in a trained row -> the log-prob with which its token was sampled there."""
        found = {}
        for start in sorted({len(history) for history in self.by_history}):
            for reply, logprobs in self.by_history.get(tuple(ids[:start]), []):
                part = ids[start : start + len(reply)]
                if part and part == reply[: len(part)]:
                    found.update(zip(range(start, start + len(part)), logprobs))
                    break
        return found

    def record(self, model, end_ids: set[int]) -> None:
        """From now on record what `model.generate` and `model.generate_batch` sample. The latter
        must be asked for log-probs."""
        generate = model.generate

        def recording(input_ids, attention_mask, **kw):
            out = generate(input_ids=input_ids, attention_mask=attention_mask,
                           output_logits=True, return_dict_in_generate=True, **kw)
            width = input_ids.shape[1]
            logits = torch.stack(out.logits, 1).float()  # [B, T, V]
            new = out.sequences[:, width:]
            logprobs = logits.log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
            for ids, mask, reply, own in zip(input_ids, attention_mask, new.tolist(),
                                             logprobs.tolist()):
                ends = [i for i, token in enumerate(reply) if token in end_ids]
                length = ends[0] + 1 if ends else len(reply)
                self.add(ids[mask.bool()].tolist(), reply[:length], own[:length])
            return out.sequences

        model.generate = recording
        generate_batch = model.generate_batch

        def recording_batch(inputs, **kw):
            outputs = generate_batch(inputs, **kw)
            for ids, output in zip(inputs, outputs.values()):
                self.add(list(ids), list(output.generated_tokens), list(output.logprobs))
            return outputs

        model.generate_batch = recording_batch


class Watch:
    """Collects the figures of a run, step by step, and writes the report."""

    def __init__(self, model: torch.nn.Module):
        self.positions = 0
        self.rows = []
        self.check = {"trained": 0, "not_sampled": 0, "sampled_not_trained": 0, "unanswered": 0,
                      "unclosed_replies": 0, "gap_max": 0.0, "gap_sum": 0.0, "gap_tokens": 0}
        self.memory_mb = 0.0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module, args):
        self.positions += args[0].numel()

    @property
    def checking(self) -> bool:
        """Whether this is the last step, which is checked and not timed."""
        return len(self.rows) == 1 + JOB["measured"]

    def begin(self) -> None:
        """A training step begins: its rollout."""
        self.positions = 0
        self.times = [clocks()]

    def rollout_ends(self) -> None:
        """The rollout ends, rewards included: advantages and the update begin."""
        self.times.append(clocks())
        self.rollout_positions = self.positions

    def end(self, trained: int, answered: int, turns: int, rewards: list[float]) -> None:
        """A training step ends. trained: its tokens in the loss. answered: those of them in replies
        that an environment answered. turns: the environments' steps."""
        (wall, cpu), (wall_middle, cpu_middle), (wall_end, cpu_end) = [*self.times, clocks()]
        self.rows.append({
            "rollout": wall_middle - wall, "update": wall_end - wall_middle,
            "cpu_rollout": cpu_middle - cpu, "cpu_update": cpu_end - cpu_middle,
            "rollout_positions": self.rollout_positions,
            "update_positions": self.positions - self.rollout_positions,
            "trained": trained, "answered": answered, "turns": turns,
            "reward": sum(rewards) / len(rewards), "episodes": len(rewards)})
        if len(self.rows) == 1 + JOB["measured"]:
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.memory_mb = kilobytes / 1024

    def compare(self, ids: list[int], trained: list[bool], logprobs: list[float],
                sampled: Sampled) -> None:
        """One row of the loss: its ids, which are trained on, and the trainer's log-probs."""
        drawn = sampled.logprobs_of(ids)
        for place, (in_loss, logprob) in enumerate(zip(trained, logprobs)):
            self.check["trained"] += in_loss
            if in_loss and place not in drawn:
                self.check["not_sampled"] += 1
            elif in_loss:
                self.add_gaps([abs(drawn[place] - logprob)])
            elif place in drawn:
                self.check["sampled_not_trained"] += 1

    def add_gaps(self, gaps: list[float]) -> None:
        """Differences between the trainer's log-probs and those with which tokens were sampled."""
        self.check["gap_max"] = max([self.check["gap_max"], *gaps])
        self.check["gap_sum"] += sum(gaps)
        self.check["gap_tokens"] += len(gaps)

    def report(self) -> None:
        """Write the report."""
        report = {
            "versions": {name: importlib.metadata.version(name) for name in JOB["versions_of"]},
            "settings": JOB["settings"],
            "steps": self.rows[1 : 1 + JOB["measured"]],
            "check": self.check if JOB["checked"] else None,
            "memory_mb": self.memory_mb,
        }
        Path(sys.argv[2]).write_text(json.dumps(report))
