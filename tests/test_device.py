"""Training keeps its tensors on one device: a test for machines without a GPU.

An `Other` is a tensor that reports the device "meta" and computes on the CPU. As with a GPU's
tensors, an operation that mixes it with ordinary tensors fails. WAITS gets the operations in which
the CPU would wait for a GPU: it reads a value, or copies one there without `non_blocking`.
"""

import copy
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import rl
import update as updates
from config import parse_config
from envs import EnvPool, items
from rollout import rollout
from update import advantages_of, update

DEVICE = torch.device("meta")
WAITS = []
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}


class Other(torch.Tensor):
    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=DEVICE)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def computed(function, args, kwargs):
    """function(*args, **kwargs) with the values of the other device's tensors."""
    tensors = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    others = {id(x.values): x for x in tensors if isinstance(x, Other)}
    on_other = bool(others)
    device = kwargs.get("device") if function == aten._to_copy.default else None
    crosses = device is not None and (torch.device(device) == DEVICE) != on_other
    masks = [x for x in others.values() if x.dtype == torch.bool and "index" in str(function)]
    if crosses and not kwargs.get("non_blocking") or others and function in READS or masks:
        WAITS.append(function)
    if kwargs.get("device") is not None:
        on_other = torch.device(kwargs["device"]) == DEVICE
        kwargs = kwargs | {"device": "cpu"}
    elif others and function != aten.copy_.default:
        # Indices and single numbers may be on the CPU.
        indices = args[1] if str(function).startswith("aten.index") and len(args) > 1 else ()
        indices = list(map(id, indices)) if isinstance(indices, (list, tuple)) else []
        mixed = [x.shape for x in tensors if not isinstance(x, Other) and x.dim()
                 and id(x) not in indices]
        assert not mixed, f"{function} takes tensors of two devices: {mixed} on the CPU"

    args, kwargs = tree_map_only(Other, lambda x: x.values, (args, kwargs))
    out = function(*args, **kwargs)
    if function == aten.copy_.default:
        return tensors[0]
    if not on_other:
        return out
    # An operation in place returns its argument.
    return tree_map_only(torch.Tensor, lambda x: others[id(x)] if id(x) in others else Other(x),
                         out)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Constants(TorchFunctionMode):
    """What does not go through the dispatcher: torch.tensor, Tensor.tolist, a list as an index."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_constant = function in (torch.tensor, torch.as_tensor)
        if is_constant and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            WAITS.append(function)
            return Other(function(*args, **kwargs | {"device": "cpu"}))
        if function is torch.Tensor.tolist and isinstance(args[0], Other):
            WAITS.append(function)
            return args[0].values.tolist()
        if function is torch.Tensor.__getitem__ and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]))
        return function(*args, **kwargs)


def on_other_device(model):
    """The model with its weights on the other device."""
    moved = {}  # weights that two modules share stay shared
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                own = moved.setdefault(id(p), torch.nn.Parameter(Other(p.detach().clone())))
                module._parameters[name] = own
        for name, buffer in module._buffers.items():
            module._buffers[name] = Other(buffer)
    return model


@pytest.mark.parametrize("flags, ways", [
    ("--algo grpo --gradient_checkpointing true", ("ragged", "packed")),
    ("--algo ppo --kl_in reward --kl_coef 0.1 --entropy_coef 0.01", ("ragged", "packed")),
    ("--algo rloo --set epochs=2 --set aggregation=sequence", ("padded", "padded")),
    ("--algo reinforce_pp --set turn_cost=0.1", ("alone", "padded"))])
def test_a_step_of_training_keeps_to_its_device(flags, ways, monkeypatch, tiny):
    check_device(flags, ways, monkeypatch, tiny)


def check_device(flags, ways, monkeypatch, tiny, more=lambda trajectories, policy, cfg: {}):
    """A step on the other device is that on the CPU. more: what else is computed -> numbers."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, *args, **kw: (
        nullcontext() if device == "meta" else autocast(device, *args, **kw)))
    monkeypatch.setitem(rl.MAX_LOGITS, "meta", 2**18)

    def objective(*args, original=updates.policy_objective, **kw):
        WAITS.clear()
        loss = original(*args, **kw)
        assert WAITS == [] or ways[1] == "padded"  # the model's own code waits
        return loss

    monkeypatch.setattr(updates, "policy_objective", objective)
    cfg = parse_config(["--env", "babyai", *flags.split(), "--out", "runs/never-made",
                        "--minibatches", "2", "--max_tokens", "12"])

    def step(other):
        place = on_other_device if other else lambda model: model
        with ExitStack() as stack:
            pool = stack.enter_context(EnvPool())
            for mode in (Operations, Constants) if other else ():
                stack.enter_context(mode())
            policy, reference = (place(copy.deepcopy(tiny[0])) for _ in range(2))
            critic = place(rl.Critic("tiny")) if cfg.algo == "ppo" else None
            for model in filter(None, (policy, reference, critic)):
                rl.set_compute_paths(model, rl.ComputePaths(*ways, {}))
            if cfg.gradient_checkpointing:
                rl.recompute_blocks(policy)
            trajectories = rollout(policy, tiny[1], pool, items("babyai", "train")[:2], 3,
                                   samples=4, seed=1, max_tokens=12,
                                   record_states=cfg.record_states)
            device = DEVICE if other else torch.device("cpu")
            batch = advantages_of(trajectories, cfg, device, reference, critic)
            found = more(trajectories, policy, cfg)
            # The fused one needs a device's own kernel.
            optimizers = [model and torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
                          for model in (policy, critic)]
            metrics = update(trajectories, batch, cfg, 0, policy, optimizers[0], critic,
                             optimizers[1])
        return [t.tokens for t in trajectories], metrics | found | {"seconds_adam": 0}

    (tokens, expected), (tokens_there, found) = step(False), step(True)
    assert tokens_there == tokens
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5) and expected["grad_norm"] > 0
