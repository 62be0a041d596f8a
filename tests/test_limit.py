"""`benches limit`: what the bare loop repeats."""

import pytest
import torch
from conftest import run_script
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

import benches.__main__ as bench
from benches import limit, memory


def test_the_recorder_keeps_every_product_with_its_shapes_and_the_weights_it_reads():
    weight = torch.randn(6, 4, requires_grad=True)
    x = torch.randn(3, 4)

    def job():
        y = torch.relu(x @ weight.T)  # 1 product; relu is none
        q = y.view(1, 1, 3, 6)
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


@pytest.mark.parametrize("argv, states", [
    (["rollout"], True),
    (["rollout", "--scale"], False),
    (["update"], True),
    (["memory"], True),
    (["memory", "--model", "tiny"], False),
    (["limit"], False),
    (["check"], False),
    (["peers"], False),
])
def test_a_benchmark_without_a_stated_ratio_does_not_say_that_it_is_reached(argv, states):
    args = bench.parse_args(argv)
    assert bench.states_a_ratio(args) == states


def test_the_estimate_of_memory_has_ppos_critic_and_takes_nested_configs():
    config = memory.config_of("Qwen/Qwen2.5-0.5B-Instruct")
    alone, with_critic = (memory.estimate(config, gpus=2, ppo=ppo) for ppo in (False, True))
    critic = 12 * alone["parameters"] / 2  # weights and two moments in float32, on two GPUs
    assert with_critic["critic"] == pytest.approx(critic)
    for part in ("rollout", "update"):
        assert with_critic[part] - alone[part] == pytest.approx(critic)
    nested = memory.estimate(AutoConfig.for_model("gemma3"), gpus=1)
    assert nested["cache"] > 0


def test_bad_usage_is_one_line_before_anything_is_measured(tmp_path):
    for flags, says in ((("rollout", "--threads", "0"), "--threads must be positive"),
                        (("rollout", "--out", tmp_path / "none/x.json"), "there is no such folder"),
                        (("rollout", "--colour", "red"), "--colour")):
        done = run_script("benches/__main__.py", *flags)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert says in done.stderr
    done = run_script("view.py")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
