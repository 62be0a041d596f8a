"""The numbers of a training step."""

import pytest
import torch

from metrics import explained_variance, rollout_metrics
from rollout import Status, Trajectory


def test_failed_environments_are_left_out_of_the_metrics():
    played = []
    for group, reward in ((0, 1.0), (0, 0.5), (1, 0.25), (1, 0.25)):
        t = Trajectory("babyai_8", "babyai", group=group, status=Status.DONE, reward=reward,
                       success=reward == 1.0, turns=2, valid_actions=1)
        t.append([5, 6])
        t.append([7, 8], [-1.0, -2.0])
        played.append(t)
    played[3].status = Status.HORIZON
    failed = Trajectory("babyai_8", "babyai", status=Status.ENV_ERROR, turns=9, error="fault: gone")
    row = rollout_metrics([*played, failed])
    expected = {
        "reward": 0.5, "success": 0.25, "turns": 2.0, "valid_actions": 0.5, "entropy": 1.5,
        "zero_gradient_groups": 0.5, "truncated": 0.25, "env_error": 0.2, "env_error/fault": 0.2,
        "trajectories": 5,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_the_explained_variance_counts_sampled_tokens_only():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    returns = torch.tensor([[1.0, 50.0, 2.0], [3.0, 4.0, -50.0]])
    # The variance of the returns is 1.25, that of the errors -0.5, 0.5, 0.5, -0.5 is 0.25.
    values = torch.tensor([[1.5, 0.0, 1.5], [2.5, 4.5, 0.0]])
    assert explained_variance(returns, values, mask) == pytest.approx(0.8)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns, torch.zeros(2, 3), mask) == 0.0
    assert explained_variance(torch.ones(2, 3), values, mask) == 0.0
