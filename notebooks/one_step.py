# %% [markdown]
# # One training step, by hand
# A rollout, its mask, the advantages of each algorithm, one update, and what the update changed.
# `one_step.ipynb` shows what the cells of `one_step.py` print and draw; after a change,
# `python notebooks/render.py` makes it again. `python notebooks/one_step.py` is the same as a
# script. It takes half a minute on a laptop and downloads nothing.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import algos
import rl
from envs import EnvPool, items, make_env
from rollout import rollout
from trajectory import show
from update import collate

model, tokenizer = rl.load_policy("tiny")  # or a folder, or a hub id
num_parameters = sum(p.numel() for p in model.parameters())
print(f"{num_parameters / 1e6:.2f}M parameters, {len(tokenizer)} tokens")

# %% [markdown]
# ## An environment is a text game
# It has two methods: `reset` and `step`.

# %%
env = make_env("babyai")
print(env.prompt, "\n")
print(env.reset(8), "\n")
print(env.step("turn left"))

# %% [markdown]
# ## A rollout
# Four items, eight trajectories of each, at most four turns. The text that the policy sampled is
# green. It is marked by the mask, and only these tokens are trained on.

# %%
pool = EnvPool()
names = items("babyai", "train")[:4]
trajectories = rollout(model, tokenizer, pool, names, horizon=4, samples=8, seed=0)
show(next(t for t in trajectories if t.success), tokenizer)
rewards_by_item = [[t.reward for t in trajectories if t.group == group] for group in range(4)]
print("rewards by item:", rewards_by_item)

# %% [markdown]
# Tokens are canonical: a new forward pass gives the log-probs that were recorded while sampling.

# %%
batch = collate(trajectories, rewards=[t.rewards for t in trajectories])  # tensors [B, T]
mask, rewards = batch["mask"], batch["rewards"]
with torch.no_grad():
    before, _ = rl.token_logprobs(model, batch["ids"], mask)
print("largest difference:", (before - batch["old_logprobs"])[mask].abs().max().item())

# %% [markdown]
# ## The advantages of each algorithm
# The same rewards give four different advantages. The reward of a turn is on the last token that
# the policy sampled in it. GRPO and RLOO compare the sum of a trajectory's rewards with those of
# its group. REINFORCE++ and PPO sum the rewards that come after each token.

# %%
scores = torch.tensor([t.reward for t in trajectories])
groups = torch.tensor([t.group for t in trajectories])
values = torch.zeros_like(rewards)  # a critic that always says 0
gae_advantages, _ = algos.gae(rewards, values, mask, gamma=1.0, lam=0.95)
advantages = {
    "GRPO": algos.grpo_advantage(scores, groups)[:, None] * mask,
    "RLOO": algos.rloo_advantage(scores, groups)[:, None] * mask,
    "REINFORCE++": algos.reinforce_pp_advantage(rewards, mask),
    "PPO (GAE, critic 0)": algos.whiten(gae_advantages, mask),
}


def sampled_only(x):
    """Move the sampled tokens of each row to the left and pad with nan: [B, T] -> [B, most]."""
    rows = [row[row_mask].tolist() for row, row_mask in zip(x, mask)]
    most = max(len(row) for row in rows)
    return np.array([row + [np.nan] * (most - len(row)) for row in rows])


fig, axes = plt.subplots(1, 6, figsize=(12.5, 4.5), constrained_layout=True)
axes[0].imshow(mask, aspect="auto", cmap="Greens", vmax=2, interpolation="nearest")
axes[0].set(title="mask", ylabel="trajectory (eight of each item)", xlabel="token")
colours = dict(cmap="RdBu", vmin=-2.5, vmax=2.5)
for ax, (name, x) in zip(axes[1:], [("rewards", rewards), *advantages.items()]):
    image = ax.imshow(sampled_only(x), aspect="auto", interpolation="nearest", **colours)
    ax.set(title=name, xlabel="sampled token", facecolor="lightgrey")
    ax.set(yticks=[7.5, 15.5, 23.5], yticklabels=[])  # lines between the groups
    ax.grid(axis="y", color="black", lw=0.5)
fig.colorbar(image, ax=axes[-1], label="reward or advantage of a token (grey: none)")
plt.show()

# %% [markdown]
# ## One update
# The clipped loss over all sampled tokens, with one denominator, and one step of AdamW.
# `train.py` does the same in every step of a run.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
model.train()
logprobs, _ = rl.token_logprobs(model, batch["ids"], mask)
per_token, _ = algos.policy_loss(logprobs, batch["old_logprobs"], advantages["GRPO"], mask)
loss = algos.aggregate(per_token, mask)
loss.backward()
grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"loss {loss.item():.4f}, gradient norm {grad_norm.item():.3f}")

# %% [markdown]
# ## What the update changed
# Replies of trajectories that did better than their group have become more likely, the others less
# likely.

# %%
with torch.no_grad():
    after, _ = rl.token_logprobs(model, batch["ids"], mask)
change = ((after - before) * mask).sum(1)  # [B], of the log-prob of all sampled tokens together
advantage = advantages["GRPO"].sum(1) / mask.sum(1)  # [B]
better = advantage > 0
worse = advantage < 0
mean_better = change[better].mean()
mean_worse = change[worse].mean()
print(f"better than their group {mean_better:+.3f} nats, worse {mean_worse:+.3f}")
plt.figure(figsize=(6, 3.5))
for label, chosen, colour in [
    ("better than their group", better, "tab:blue"),
    ("worse", worse, "tab:red"),
    ("all of the group equal", advantage == 0, "grey"),
]:
    plt.scatter(advantage[chosen], change[chosen], color=colour, label=label)
plt.axhline(0, color="grey", lw=0.5)
plt.xlabel("advantage (GRPO)")
plt.ylabel("change of the log-prob (nats)")
plt.legend(title="trajectories")
plt.tight_layout()
plt.show()
assert mean_better > mean_worse
pool.close()
