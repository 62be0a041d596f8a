"""Which estimator's advantages are the true ones? Measured, by playing on from every turn.

    python experiments/credit.py babyai            # the first column of docs/credit.md
    python experiments/credit.py babyai --data data/rooms --horizon 6 --items_per_step 12
    python experiments/credit.py textcraft --error 0.15 --critic_steps 0
    python experiments/credit.py draw              # the table and the picture of the kept rows

Every trajectory of a training step is cut before each of its replies. The environment is replayed
to there, and the policy plays on N times: the mean return is the value V of this prefix, and

    A_k = r_k + V(prefix_{k+1}) - V(prefix_k)

is the true advantage of turn k, up to the noise of N returns. Each estimator is given the same
trajectories, and is compared with it, turn by turn (an estimate: the mean over the turn's tokens):

corr        correlation with the true advantage, corrected for the truth's own noise (divided by the
            root of its reliability, from two halves of the continuations), and its 95 % interval: a
            bootstrap over items; * where the same bootstrap's interval of the difference to
            GRPO leaves out 0
explained   its square: the share of the true advantage's variance that the estimate explains
sign        how often the sign is right where the true advantage is larger than 0.1
noise       the share of the estimate's variance that does not come from the turn, but from the rest
            of the trajectory and the rest of the group: both are sampled once more
bias-free   the correlation that would be left if this noise were averaged out: below 1, the
            estimator is wrong about turns in the mean, too
gradient    cosine of its policy gradient with the gradient of the same tokens under the true
            advantages, with their noise (a model of n weights: of every n / 10,000,000th)

Below the table: mixed, groups whose returns differ; large, turns with a true advantage larger than
0.1; largest, the share of the truth's variance that one turn has; halves and gradient_halves, the
correlation of two halves of the truth and the cosine of their gradients; gradient_again, the cosine
of RLOO's gradient with that of the same items played again. If few groups are mixed, or one turn
has most of the variance, the columns say little.

The estimators: those of algos.ALGOS, every file of ideas/ that has an advantage (with the settings
of VARIANTS, if it has a row there), the truth with fewer continuations, and PPO's with a critic
that was trained for some steps on fresh trajectories of the same policy. All flags of train.py are
flags here, too: --items_per_step 16, --rollouts_per_item 8, --horizon, --model, --data, --seed ...
--invalid_penalty is 0: GRPO divides by the standard deviation of a group, and where nothing
succeeds, this makes as much of a small penalty as of a success elsewhere.
"""

import argparse
import hashlib
import itertools
import math
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from tqdm import tqdm

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from config import class_of, parse_config  # noqa: E402  (before the other modules: it sets threads)
from experiments.studies import play  # noqa: E402
from experiments.studies import rows as kept  # noqa: E402
import algos  # noqa: E402
import rl  # noqa: E402
import update  # noqa: E402
from envs import Env, EnvPool, UserError, items, load_function  # noqa: E402
from models.check import find_paths  # noqa: E402
from parallel import run_command  # noqa: E402
from rollout import Episode, make_engine, rollout  # noqa: E402
from schedule import items_at  # noqa: E402
from trajectory import Status, reply_spans  # noqa: E402
from update import gather_step  # noqa: E402
from worlds.replayed import continuations_of, prefixes  # noqa: E402

# An algorithm or a file of ideas/ -> the settings with which it stands in the table.
VARIANTS = {
    "gigpo": ["", "gamma=1 compare=rloo"],
    "hgpo": ["", "gamma=1 normalize_std=false"],
    "gagpo": ["", "gamma=1 lam=0 normalize=false", "gamma=1 lam=0.9 normalize=false"],
    "tree": ["branches=2"],
    "vine": ["continuations=2", "continuations=4", "continuations=8"],
    "reinforce_pp": ["gamma=1", "gamma=0.95", "gamma=0.9"],
    "ppo": ["lam=1", "lam=0.95", "lam=0.9"],
}
SIGN_FROM = 0.1  # signs are compared where the true advantage is larger
RESAMPLES = 1000  # of the bootstrap
MOST_NOISE = 0.9  # of an estimate with more noise nothing can be said about its mean


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world")
    parser.add_argument("--error", type=float, default=0.09, help="wanted standard error of a "
                        "value, for returns from 0 to 1: N = 1 / (2 error)^2, 31 by default")
    parser.add_argument("--critic_steps", type=int, nargs="*", default=[0, 20],
                        help="PPO's critic after so many steps: 0 20 by default; none: no critic")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT",
                        help="estimators whose name holds one of these texts")
    parser.add_argument("--replays", type=int, default=0, metavar="N", help="only replay the "
                        "prefixes of at least N turns, and count what is not as recorded")
    parser.add_argument("--keep", metavar="NAME", help="keep the rows as this run of results")
    args, flags = parser.parse_known_args()
    if args.world == "draw":
        return args, None
    defaults = ["--items_per_step", "16", "--rollouts_per_item", "8", "--kl_coef", "0",
                "--invalid_penalty", "0"]
    if args.world == "babyai" and "--horizon" not in flags:
        defaults += ["--horizon", "4"]
    cfg = parse_config(["--env", args.world, "--out", "runs/credit", *defaults, *flags])
    return args, cfg


# ---- the truth ----


class Policy:
    """A fixed policy that plays items, and plays on after recorded turns."""

    def __init__(self, cfg, pool, horizon, with_states):
        self.cfg, self.pool, self.horizon = cfg, pool, horizon
        self.model, self.tokenizer = rl.load_policy(cfg.model, dtype=getattr(torch, cfg.dtype))
        rl.set_compute_paths(self.model, find_paths(self.model, cfg.dtype, torch.device("cpu")))
        self.settings = replace(cfg, record_states=with_states)
        self.engine = make_engine(self.model, cfg.slots, cfg)
        self.turns = 0

    def play(self, step, names, samples, episode_class=Episode):
        """-> the trajectories of `samples` for each name, played with random numbers of `step`."""
        total = len(names) * samples
        with tqdm(total=total, desc=f"playing {total}", mininterval=5) as bar:
            played = rollout(self.model, self.tokenizer, self.pool, names, self.horizon,
                             self.settings, samples=samples, step=step, engine=self.engine,
                             episode_class=episode_class, on_end=lambda t: bar.update())
        (after,) = getattr(episode_class, "args", [()])  # of a `Continuation`
        self.turns += sum(t.turns for t in played) - samples * sum(k for _, k in after)
        return played


def true_advantages(trajectories, returns):
    """returns: {(item, prefix): those of its continuations} -> the advantage of each turn, of all
    trajectories one after the other."""
    values = {key: sum(own) / len(own) if own else math.nan for key, own in returns.items()}
    found = []
    for t in trajectories:
        known = [values[prefix] for prefix in prefixes(t)] + [0.0]
        found += [sum(t.rewards[start:end]) + after - before for (start, end), before, after
                  in zip(reply_spans(t.mask)[: t.turns], known, known[1:])]
    return np.array(found)


# ---- the estimators ----


def estimators(args, with_states):
    """-> {name with settings: (function, steps of the critic that it needs or None)}"""
    named = {path.stem: f"ideas.{path.stem}:advantage" for path in (ROOT / "ideas").glob("*.py")
             if "def advantage(" in path.read_text()}
    found = {}
    for name, place in {**algos.ALGOS, **dict(sorted(named.items()))}.items():
        for text in VARIANTS.get(name, [""]):
            function = load_function(place, {}, "advantage", text)
            if getattr(function, "needs_models", ()) or (
                    getattr(function, "needs_states", False) and not with_states):
                continue
            if getattr(function, "needs_critic", False):
                for steps in args.critic_steps:
                    found[f"{name} {text}, critic after {steps} steps"] = function, steps
            else:
                found[f"{name} {text}".strip()] = function, None
    return {name: own for name, own in found.items()
            if any(text in name for text in args.only)}


def of_turns(trajectories, advantages):
    """Advantages of tokens [B, T] -> of the turns of all trajectories, one after the other."""
    return np.array([advantages[b, start:end].mean().item() for b, t in enumerate(trajectories)
                     for start, end in reply_spans(t.mask)[: t.turns]])


def values_after(policy, steps_wanted, trajectories, names_of):
    """PPO's critic, trained on fresh trajectories of the policy -> {number of steps: the values of
    the trajectories [B, T]}. names_of: a step -> its items."""
    cfg, found = policy.cfg, {}
    critic = rl.Critic(cfg.model, torch.float32)
    rl.set_compute_paths(critic, rl.compute_paths_of(policy.model))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=cfg.critic_lr, weight_decay=0.0)

    def values_of(trajectories):
        with rl.compute_in(cfg.dtype, torch.device("cpu")):
            return update.map_rows(lambda critic, part: critic(part["ids"], part["mask"]), critic,
                                   update.collate(trajectories), cfg.microbatch_tokens)

    for step in range(max(steps_wanted, default=-1) + 1):
        if step in steps_wanted:
            found[step] = values_of(trajectories)
        if step == max(steps_wanted):
            break
        played = policy.play(1000 + step, names_of(step + 1), cfg.rollouts_per_item)
        data = gather_step(played, values=values_of(played))
        algos.ppo(data)
        batch = data.batch | {"old_values": data.values, "returns": data.returns}
        for rows in update.minibatches(played, cfg, step, 0):
            count = algos.loss_denominator(batch["mask"][rows], cfg.aggregation)
            update.optimizer_step(critic, optimizer, batch, rows,
                                  partial(update.value_objective, critic, cfg, count),
                                  cfg.microbatch_tokens, cfg.max_grad_norm)
    return found


# ---- what is reported of each ----


def correlation(x, y):
    """0 where one of them does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if np.std(x) > 0 and np.std(y) > 0 else 0.0


def corrected(estimate, truth, halves):
    """The correlation with the truth without its noise, from the correlation of two halves of it
    (Spearman 1904): r / sqrt(reliability), reliability = 2 h / (1 + h). nan if h is not above
    0."""
    h = correlation(*halves)
    return correlation(estimate, truth) / math.sqrt(2 * h / (1 + h)) if h > 0 else math.nan


def resampled(estimate, truth, halves, groups):
    """`corrected` in each resample of a bootstrap over the groups of the turns, the same resamples
    for every estimate; nan where the truth's halves disagree."""
    rng = np.random.default_rng(0)
    of_group = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    found = []
    for _ in range(RESAMPLES):
        picked = rng.integers(len(of_group), size=len(of_group))
        rows = np.concatenate([of_group[g] for g in picked])
        found.append(corrected(estimate[rows], truth[rows], [half[rows] for half in halves]))
    return np.array(found)


def interval(found):
    """95 % of resampled values; nan if one of them is."""
    return np.percentile(found, [2.5, 97.5]).round(3).tolist()


def differs(row):
    """"*" if the interval of the difference to GRPO leaves out 0, else ""."""
    low, high = row.get("beyond_grpo", (0, 0))
    return "*" * (low > 0 or high < 0)


def once_more(trajectories, companions, continuations, functions):
    """-> for each function each turn's estimate once more, with the rest of its trajectory and of
    its group sampled again. companions: other trajectories of the same groups, in the same
    order."""
    found = {name: [[None] * t.turns for t in trajectories] for name in functions}
    for sample in sorted({t.sample for t in trajectories}):
        for k in range(max(t.turns for t in trajectories)):
            batch = list(companions)
            own = [b for b, t in enumerate(trajectories) if t.sample == sample and t.turns > k]
            for b in own:
                t = trajectories[b]
                if k + 1 < t.turns:
                    others = continuations[prefixes(t)[k + 1]]
                    t = replace(others[-1], group=t.group) if others else t
                batch[b] = t
            step = gather_step(batch)
            spans = {b: slice(*reply_spans(batch[b].mask)[k]) for b in own}
            for name, function in functions.items():
                advantages = function(step)
                for b, span in spans.items():
                    found[name][b][k] = advantages[b, span].mean().item()
    return {name: np.array(sum(own, [])) for name, own in found.items()}


def gradients(policy, step, advantages):
    """The policy gradient under each of some advantages [B, T] -> [n, weights]: all weights of the
    built-in model, some 10 million of a larger one."""
    batch = step.batch | {f"advantage{n}": a for n, a in enumerate(advantages)}
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    every = sum(p.numel() for p in parameters) // 10**7 | 1  # odd: all columns of a matrix
    sums = [0.0] * len(advantages)
    for part, _ in update.own_micro_batches(policy.model, batch, range(len(batch["ids"])),
                                            policy.cfg.microbatch_tokens):
        with rl.compute_in(policy.cfg.dtype, torch.device("cpu")):
            logp, _ = rl.token_logprobs(policy.model, part["ids"], part["mask"],
                                        policy.cfg.temperature, False, part.get("allowed"))
        for n in range(len(advantages)):
            loss = (logp * part[f"advantage{n}"]).sum()
            own = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            sums[n] += torch.cat([g.flatten()[::every] for g in own if g is not None]).double()
    return torch.stack(sums)


def measure(args, policy, names_of):
    """names_of: a step -> its items. -> the rows of the table, what holds for all of them."""
    # The trajectories, once more with other random numbers, and the truth.
    samples = math.ceil(1 / (2 * args.error) ** 2)
    played, companions = (policy.play(step, names_of(0), policy.cfg.rollouts_per_item)
                          for step in (0, 1))
    failed = [t.error for t in [*played, *companions] if t.status == Status.ENV_ERROR]
    if failed:
        raise UserError(f"{len(failed)} environments failed: {failed[0]}")
    # One more than asked for: the last is for `once_more`, and not part of the truth.
    step = gather_step(played, play=partial(policy.play, 2))
    continuations = continuations_of(step, samples + 1)
    returns = {key: [sum(t.rewards[len(key[1]):]) for t in own[:-1]]
               for key, own in continuations.items()}
    truth = true_advantages(played, returns)
    halves = [true_advantages(played, {key: own[half::2] for key, own in returns.items()})
              for half in (0, 1)]
    groups = np.array([t.group for t in played for _ in range(t.turns)])
    turns = np.array([k for t in played for k in range(t.turns)])
    facts = {"trajectories": len(played), "success": float(np.mean([t.success for t in played])),
             "turns": len(truth), "prefixes": len(returns), "continuations": samples,
             "not_replayed": sum(len(own) <= samples for own in continuations.values()),
             "std": float(truth.std()), "halves": correlation(*halves),
             "mixed": len({t.group for t in played for other in played
                           if t.group == other.group and t.reward != other.reward}),
             "large": int((np.abs(truth) > SIGN_FROM).sum()),
             "largest": float(((truth - truth.mean()) ** 2).max() / len(truth) / truth.var())}

    # What the estimators make of the trajectories.
    wanted = estimators(args, policy.settings.record_states)
    critics = {steps for _, steps in wanted.values() if steps is not None}
    values = {None: None} | values_after(policy, critics, played, names_of)
    estimates = {name: function(gather_step(played, play=partial(policy.play, 3),
                                            values=values[steps]))
                 for name, (function, steps) in wanted.items()}
    of_truth = torch.zeros(3, len(played), max(len(t.tokens) for t in played))
    of_turn = zip(truth, *halves)
    for b, t in enumerate(played):
        for start, end in reply_spans(t.mask)[: t.turns]:
            of_truth[:, b, start:end] = torch.tensor(next(of_turn))[:, None]
    true_gradient, first, second, *own_gradients = gradients(
        policy, step, [*of_truth, *estimates.values()])
    facts["gradient_halves"] = torch.cosine_similarity(first, second, dim=0).item()
    of_batches = [gradients(policy, batch, [algos.rloo(batch)])[0]
                  for batch in (step, gather_step(companions))]
    facts["gradient_again"] = torch.cosine_similarity(*of_batches, dim=0).item()
    again = once_more(played, companions, continuations, {
        name: function for name, (function, steps) in wanted.items()
        if steps is None and not getattr(function, "needs_continuations", False)})

    rows, resamples = [], {}
    for (name, advantages), gradient in zip(estimates.items(), own_gradients):
        estimate = of_turns(played, advantages)
        resamples[name] = resampled(estimate, truth, halves, groups)
        r = corrected(estimate, truth, halves)
        large = np.abs(truth) > SIGN_FROM
        row = {"estimator": name, "corr": r, "interval": interval(resamples[name]),
               "explained": r * r, "gradient": torch.cosine_similarity(
                   gradient, true_gradient, dim=0).item(),
               "sign": float(np.mean(np.sign(estimate[large]) == np.sign(truth[large]))),
               "by_turn": [corrected(estimate[turns == k], truth[turns == k],
                                     [half[turns == k] for half in halves])
                           for k in range(turns.max() + 1) if (turns == k).sum() > 20]}
        if name in again:
            noise = ((estimate - again[name]) ** 2).mean() / 2 / (estimate.var() or math.nan)
            row["noise"] = noise
            if noise < MOST_NOISE:
                row["bias_free"] = r / math.sqrt(1 - noise)
        rows.append(row)
    for row in rows if "grpo" in resamples else []:  # --only may leave it out
        row["beyond_grpo"] = interval(resamples[row["estimator"]] - resamples["grpo"])
    return sorted(rows, key=lambda row: -row["corr"]), facts | {"played": policy.turns}


def replay(args, policy, names_of):
    """Play until there are prefixes of so many turns, and replay each of them: tokens and
    observations are compared. -> no rows, what was found"""
    facts = {"trajectories": 0, "prefixes": 0, "not_replayed": 0}
    for step in itertools.count():
        played = policy.play(step, names_of(step), policy.cfg.rollouts_per_item)
        data = gather_step(played, play=partial(policy.play, step))
        found = continuations_of(data, 1)
        facts["trajectories"] += len(played)
        facts["prefixes"] += len(found)
        facts["not_replayed"] += sum(not own for own in found.values())
        if facts["prefixes"] >= args.replays:
            return [], facts | {"played": policy.turns}


# ---- the table and the picture of docs/credit.md ----

SHOWN = {  # the row in the table -> the estimator
    "GRPO": "grpo", "RLOO": "rloo", "turn-level returns": "turns",
    "REINFORCE++": "reinforce_pp gamma=1", "REINFORCE++, gamma 0.9": "reinforce_pp gamma=0.9",
    "PPO, lambda 1, critic after 20 steps": "ppo lam=1, critic after 20 steps",
    "PPO, lambda 0.9, critic after 20 steps": "ppo lam=0.9, critic after 20 steps",
    "GiGPO": "gigpo", "GiGPO, gamma 1, by RLOO": "gigpo gamma=1 compare=rloo",
    "HGPO": "hgpo", "HGPO, gamma 1, no std": "hgpo gamma=1 normalize_std=false", "GAGPO": "gagpo",
    "GAGPO, gamma 1, lambda 0.9, no std": "gagpo gamma=1 lam=0.9 normalize=false",
    "GAGPO, gamma 1, lambda 0, no std": "gagpo gamma=1 lam=0 normalize=false",
    "VinePPO, 2 continuations": "vine continuations=2",
    "VinePPO, 8 continuations": "vine continuations=8",
}
FACTS = {  # the last rows of the table: of all trajectories of a setting
    "groups whose returns differ; trajectories": "{mixed}; {trajectories}",
    "turns with a true advantage beyond 0.1; turns": "{large}; {turns}",
    "share of the largest turn in the variance": "{largest:.2f}",
    "two halves of the truth: correlation; cosine": "{halves:.2f}; {gradient_halves:.2f}",
}
RUNS = {"babyai_before": "go-to levels, before", "babyai_during": "after 30 steps",
        "rooms_before": "rooms, before", "textcraft_before": "TextCraft, before",
        "smollm2_before": "SmolLM2, go-to levels"}
TRAINED = {"sciworld_8": "SciWorld", "searchqa_60": "SearchQA",
           "smollm2_warm": "SmolLM2, go-to levels", "smollm2_searchqa_warm": "SmolLM2, SearchQA"}
SIZES = {"babyai_group4": "groups of 4", "babyai_group32": "of 32", "babyai_g64": "of 64",
         "babyai_h10": "horizon 10", "babyai_h20": "20"}
MISSING = {"corr": math.nan, "interval": [math.nan, math.nan], "gradient": math.nan}


def table(found, titles):
    """Print a column for each of the kept runs of `titles` as Markdown. -> their rows"""
    runs = {run: {row["estimator"]: row for row in found[run][:-1]} for run in titles}
    print(f"\n| | {' | '.join(titles.values())} |\n|---|{'---|' * len(runs)}")
    for name, estimator in SHOWN.items():
        own = [of_run.get(estimator, MISSING) for of_run in runs.values()]
        cells = (f"{row['corr']:.2f}{differs(row)} [{row['interval'][0]:.2f}, "
                 f"{row['interval'][1]:.2f}]; {row['gradient']:.2f}" for row in own)
        if any(row is not MISSING for row in own):
            print(f"| {name} | {' | '.join(cells)} |".replace("nan [nan, nan]; nan", "-").replace(
                "[nan, nan]", "[none]"))
    for name, cell in FACTS.items():
        cells = (cell.format(**facts) if "mixed" in facts else "not kept"
                 for facts in (found[run][-1] for run in runs))
        print(f"| {name} | {' | '.join(cells)} |")
    return runs


def draw():
    """Print the tables of the kept rows, and make docs/credit.png of the first."""
    found = kept.load("credit_truth")
    runs = table(found, RUNS)
    table(found, TRAINED)
    table(found, SIZES)
    plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3})
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for n, run in enumerate(runs):
        own = [runs[run].get(estimator, MISSING) for estimator in SHOWN.values()]
        places = np.arange(len(own)) + 0.15 * (n - 2)
        values = [row["corr"] for row in own]
        bars = np.abs(np.array([row["interval"] for row in own]).T - values)
        axes[0].errorbar(values, places, xerr=bars, fmt="osD^v"[n], ms=4, lw=0.8, label=RUNS[run])
        axes[1].plot([row["gradient"] for row in own], places, "osD^v"[n], ms=5)
    axes[0].set(yticks=range(len(SHOWN)), yticklabels=SHOWN, xlim=(-0.2, 1.05),
                title="correlation with the true advantage")
    axes[1].set(title="cosine of the policy gradient", xlim=(-0.2, 1.05))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(ROOT / "docs/credit.png", dpi=110)


def main(settings):
    args, cfg = settings
    if cfg is None:
        return draw()
    (world,) = cfg.worlds
    training = items(world, "train", cfg.data or None)
    with EnvPool() as pool:
        policy = Policy(cfg, pool, cfg.worlds[world].rounds[-1],
                        class_of(world).state is not Env.state)
        measured = replay if args.replays else measure
        rows, facts = measured(args, policy, lambda step: items_at(
            training, cfg.seed, step, cfg.items_per_step))
    width = max((len(row["estimator"]) for row in rows), default=0)
    if rows:
        print(f"{'':{width}}   corr  95 % interval  explained  sign  noise  bias-free  gradient")
    for row in rows:
        rest = "".join(f"{row[name]:{size}.2f}" if name in row else f"{'-':>{size}}"
                       for name, size in (("noise", 5), ("bias_free", 11)))
        low, high = row["interval"]
        print(f"{row['estimator']:{width}}  {row['corr']:5.2f}{differs(row):1} {low:5.2f} .. "
              f"{high:4.2f}  {row['explained']:9.2f}  {row['sign']:4.2f}  {rest}  "
              f"{row['gradient']:8.2f}")
    print(", ".join(f"{name} {value:.3g}" for name, value in facts.items()))
    if args.keep:
        weights = next(Path(rl.model_path(cfg.model)).glob("*.safetensors")).read_bytes()
        kept.keep("credit_truth", {args.keep: [*rows, facts | {
            "command": shlex.join(["python", "experiments/credit.py", *sys.argv[1:]]),
            "commit": play.revision(), "seed": cfg.seed, "machine": play.machine(),
            "model_sha256": hashlib.sha256(weights).hexdigest()}]})


if __name__ == "__main__":
    run_command("credit.py", parse, main)
