"""`benches limit`: what the bare loop repeats."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from benches import limit, memory


def test_the_recorder_keeps_every_product_with_its_shapes_and_the_weights_it_reads():
    weight = torch.randn(6, 4, requires_grad=True)
    x = torch.randn(3, 4)

    def job():
        q = torch.relu(x @ weight.T).view(1, 1, 3, 6)  # 1 product; relu is none
        o = scaled_dot_product_attention(q, q, q)
        o.sum().backward()  # attention's, and the weight's; x needs no gradient

    recorder = limit.Recorder([weight])
    with recorder:
        job()
    names = [str(function.overloadpacket) for function, _, _ in recorder.calls]
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert names == ["aten.mm", attention, attention + "_backward", "aten.mm"]
    _, (first, second), _ = recorder.calls[0]
    assert (first.size, first.strides) == ((3, 4), (4, 1))
    assert second.data_ptr() == weight.data_ptr() and second.stride() == (1, 4)

    again = limit.Recorder([weight])  # the loop makes the same calls
    with again:
        recorder.loop()()
    assert [str(function.overloadpacket) for function, _, _ in again.calls] == names
    for (_, args, _), (_, repeated, _) in zip(recorder.calls, again.calls):
        for a, b in zip(args, repeated):
            if isinstance(a, limit.Shape):
                assert (a.size, a.strides, a.dtype) == (b.size, b.strides, b.dtype)


def test_the_share_is_the_time_of_the_loop_over_ours(monkeypatch):
    times = iter([8.0, 2.0, 10.0, 4.0, 10.0, 6.0])
    monkeypatch.setattr(limit, "cpu_seconds", lambda function: next(times))
    monkeypatch.setattr(limit, "memory_bandwidth", lambda: 8.0)  # bytes a second
    threads = torch.get_num_threads()
    weight = torch.ones(2, 2)
    figures = limit.compare(lambda: torch.ones(2, 2) @ weight, limit.Recorder([weight]))
    assert figures == {
        "seconds": 10.0, "limit": 4.0, "share": 0.4, "products": 1, "gb_a_second": 8e-9,
        "memory": 16 / 8 / (4.0 / threads),  # the weight's bytes; its seconds; those of the loop
    }


def test_the_estimate_of_memory_has_ppos_critic_and_takes_nested_configs():
    config = memory.config_of("Qwen/Qwen2.5-0.5B-Instruct")
    alone, with_critic = (memory.estimate(config, gpus=2, ppo=ppo) for ppo in (False, True))
    critic = 12 * alone["parameters"] / 2  # weights and two moments in float32, on two GPUs
    assert with_critic["critic"] == pytest.approx(critic)
    for part in ("rollout", "update"):
        assert with_critic[part] - alone[part] == pytest.approx(critic)
    assert memory.estimate(AutoConfig.for_model("gemma3"), gpus=1)["cache"] > 0
