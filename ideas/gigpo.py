"""Credit by state: turns of an item's trajectories that begin in the same state are compared.

    A = A_trajectory + A_turn,    A_turn = (R_k - mean(R)) / std(R) over the turns of one state

GiGPO (arXiv 2505.10978, eq. 6 to 8). R_k is the turn's return, discounted by gamma a turn. The
world must tell its states (`Env.state`).

    python train.py --algo gigpo --algo_args "gamma=0.95 compare=grpo"
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import algos
from envs import UserError
from trajectory import Trajectory, reply_spans

COMPARE = {"grpo": algos.grpo_advantage, "rloo": algos.rloo_advantage}


def advantage(step, gamma: float = 0.95, compare: str = "grpo") -> Tensor:
    """step: see `update.Gathered`. gamma: discount per turn, 0.95 in GiGPO's experiments. compare:
    grpo | rloo. -> [B, T]"""
    if compare not in COMPARE:
        raise UserError(f"gigpo compares by {' or '.join(COMPARE)}, not {compare}")
    function = COMPARE[compare]
    of_trajectories = function(step.outcomes, step.groups, step.valid)[:, None] * step.mask
    of_turns = turn_advantage(step.turn_rewards, step.batch["turns"] - 1,
                              turns_by_state(step.trajectories), step.valid, gamma, function)
    return of_trajectories + of_turns * step.mask


advantage.compares_samples = advantage.needs_states = True
advantage.divides_unless = "compare", "rloo"


def turns_by_state(trajectories: Sequence[Trajectory]) -> Tensor:
    """Which turns are compared with each other: those of an item's trajectories that begin in the
    same state -> ids [B, K] long, for at most K turns. A turn whose state is unknown is a group of
    its own."""
    ids = {}
    num_turns = [len(reply_spans(t.mask)) for t in trajectories]
    out = torch.full((len(trajectories), max(num_turns, default=0)), -1)
    for b, t in enumerate(trajectories):
        for k in range(num_turns[b]):
            state = t.states[k] if t.states[k] is not None else (b, k)
            out[b, k] = ids.setdefault((t.group, state), len(ids))
    return out


@torch.no_grad()
def turn_returns(rewards: Tensor, turns: Tensor, gamma: float = 1.0) -> Tensor:
    """The return from each turn on: R_k = r_k + gamma R_{k+1}, where r_k is the turn's reward.

    rewards [B, T] float, turns [B, T] long, the number of each token's turn or -1 -> [B, K] for at
    most K turns, 0 after the last turn of a row. gamma discounts once per turn. Sums are rounded to
    six decimals, so that float32's rounding does not make equal returns unequal.

    >>> turns = torch.tensor([[-1, 0, 0, -1, 1]])
    >>> turn_returns(torch.tensor([[0., 0., 1., 0., 2.]]), turns, gamma=0.5)
    tensor([[2., 2.]])
    """
    num_turns = int(turns.max()) + 1 if turns.numel() else 0
    returns = torch.zeros(len(turns), num_turns, dtype=torch.float64, device=turns.device)
    row, column = (turns >= 0).nonzero(as_tuple=True)
    returns.index_put_((row, turns[row, column]), rewards[row, column].double(), accumulate=True)
    for k in reversed(range(num_turns - 1)):
        returns[:, k] += gamma * returns[:, k + 1]
    return returns.round(decimals=6).to(torch.float32)


@torch.no_grad()
def turn_advantage(rewards: Tensor, turns: Tensor, turn_groups: Tensor, valid: Tensor | None = None,
                   gamma: float = 1.0,
                   compare: Callable[..., Tensor] = algos.grpo_advantage) -> Tensor:
    """An advantage for each turn: its return, compared with the returns of its group of turns.

    turn_groups [B, K] long: arbitrary ids; K is at least the largest number of turns. With an id
    for each (item, state of the environment before the turn) this is the step-level advantage of
    GiGPO (arXiv 2505.10978, eq. 6 to 8). With gamma < 1 an action from which success comes sooner
    is better.
    rewards, turns: see `turn_returns`; valid [B] bool as for `grpo_advantage`. compare:
    `grpo_advantage` or `rloo_advantage`. -> [B, T], zero outside the turns.

    >>> turns = torch.tensor([[0, -1, 1], [0, -1, 1]])
    >>> rewards = torch.tensor([[0., 0., 1.], [0., 0., 0.]])
    >>> turn_advantage(rewards, turns, torch.tensor([[0, 1], [0, 2]]))
    tensor([[ 0.7071,  0.0000,  0.0000],
            [-0.7071,  0.0000,  0.0000]])
    """
    returns = turn_returns(rewards, turns, gamma)  # [B, K]
    row, column = (turns >= 0).nonzero(as_tuple=True)
    played = torch.zeros_like(returns, dtype=torch.bool)
    played[row, turns[row, column]] = True
    of_row = played.nonzero()[:, 0]  # [N], N turns in the batch
    advantages = torch.zeros_like(returns)
    groups = turn_groups[:, :returns.shape[1]][played]
    advantages[played] = compare(returns[played], groups, None if valid is None else valid[of_row])
    out = torch.zeros(turns.shape)
    out[row, column] = advantages[row, turns[row, column]]
    return out
