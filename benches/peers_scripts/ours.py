"""The job in this project's own parts, as train.py calls them."""

from itertools import groupby

from benches.peers_scripts.measure import JOB, NUM_STEPS, Watch, items_of_step  # first

import torch

import algos
from config import parse_config
from envs import EnvPool
from rl import load_policy
from rollout import make_engine, rollout
from update import advantages_of, update


def main():
    cfg = parse_config([
        "--env", JOB["world"], "--model", JOB["model"], "--algo", "grpo", "--out", "unused",
        "--action_format", JOB["action_format"],
        "--rollouts_per_item", str(JOB["samples"]), "--max_tokens", str(JOB["max_tokens"]),
        "--lr", str(JOB["lr"]), "--minibatches", "1", "--kl_coef", "0", "--invalid_penalty", "0",
        "--microbatch_tokens", str(JOB["settings"]["microbatch_tokens"]), "--dtype", "float32"])
    policy, tokenizer = load_policy(cfg.model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=0.0, fused=True)
    engine = make_engine(policy, len(items_of_step(0)) * JOB["samples"], cfg)
    watch = Watch(policy)
    with EnvPool() as pool:
        for step in range(NUM_STEPS):
            if watch.checking:
                check_losses(watch)
            watch.begin()
            trajectories = rollout(policy, tokenizer, pool, items_of_step(step), JOB["horizon"],
                                   cfg, step=step, engine=engine, samples=JOB["samples"])
            watch.rollout_ends()
            batch = advantages_of(trajectories, cfg, torch.device("cpu"))
            update(trajectories, batch, cfg, step, policy, optimizer)
            report_step(watch, trajectories)
    check_masks(watch, trajectories, tokenizer)
    watch.report()


# ---- measurements, no part of the job ----


def report_step(watch, trajectories):
    trained = sum(sum(t.mask) for t in trajectories)
    answered = sum(sum(map(len, runs_of(t)[: t.turns])) for t in trajectories)
    watch.end(trained, answered, sum(t.turns for t in trajectories),
              [t.reward for t in trajectories])


def runs_of(t):
    """The runs of trained tokens of a trajectory: lists of ids."""
    return [[token for token, _ in run]
            for trained, run in groupby(zip(t.tokens, t.mask), key=lambda pair: pair[1])
            if trained]


def check_losses(watch):
    """Compare the log-probs of each loss with the recorded ones."""
    policy_loss = algos.policy_loss

    def recording(logprobs, old_logprobs, advantages, mask, *rest):
        watch.add_gaps((logprobs.detach() - old_logprobs)[mask].abs().tolist())
        return policy_loss(logprobs, old_logprobs, advantages, mask, *rest)

    algos.policy_loss = recording


def check_masks(watch, trajectories, tokenizer):
    """Each run of trained tokens must be the reply that the environment was sent."""
    for t in trajectories:
        runs = runs_of(t)
        # Without the fixed first reply.
        replies = [m["content"] for m in t.messages[2:] if m["role"] == "assistant"]
        for i, run in enumerate(runs):
            text = tokenizer.decode(run, skip_special_tokens=True)
            watch.check["trained"] += len(run)
            if i >= len(replies) or text != replies[i]:
                watch.check["not_sampled"] += len(run)
        watch.check["unanswered"] += sum(len(run) for run in runs[t.turns:])


main()
