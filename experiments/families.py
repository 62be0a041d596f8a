"""Model families: the way in which each is computed, how exact it is, and whether it trains.

    python experiments/families.py [--speed] [FAMILY ...]

Each family is a tiny model with random weights and the built-in tokenizer. `models/check.py` tries
the ways of its rollout and its update; then train.py takes two steps of GRPO with it in BabyAI,
whose observations are of uneven length. Prints a table: the ways that were chosen, their gaps (the
largest difference of a log-prob to the model's plain forward pass), the `logprob_gap` of the two
steps (the mean difference between rollout and update), or the line with which the family is
refused. Exit status 1 if a family is neither trained exactly nor refused.

--speed: instead, the tokens a second of the engine over those of the model's own attention in
lockstep, both in the same run, for each family that the engine plays: benches' workload `long`,
48 trajectories of three turns, 16 slots. Where the first ratio is below 3.6 both are run twice
more, alternately, and the row has the medians. Exit status 1 if a ratio is below 3.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
import config  # noqa: E402
import rl  # noqa: E402
import train  # noqa: E402
from benches.rollout import play_ours  # noqa: E402
from models import check  # noqa: E402

WINDOW = 64
SPEED_RATIO = 3
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 4096}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2,
         "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_d_ssm": 128}

# Families whose configuration has nothing besides SIZE, a window, or experts.
PLAIN = """
    llama qwen2 qwen3 phi olmo olmo2 gemma smollm3 starcoder2 glm4 seed_oss ernie4_5
    hunyuan_v1_dense arcee helium nanochat stablelm gpt_neox gpt2 opt bloom nemotron xlstm
    rwkv
""".split()
WITH_WINDOW = """
    ministral olmo3 gemma2 gemma3_text gemma4_text cohere2 exaone4
""".split()
WITH_EXPERTS = """
    qwen2_moe qwen3_moe mixtral olmoe
""".split()
# name in the table -> (model type, what its configuration has besides SIZE)
FAMILIES = {
    **{name: (name, {}) for name in PLAIN},
    **{name: (name, {"sliding_window": WINDOW}) for name in WITH_WINDOW},
    **{name: (name, MOE) for name in WITH_EXPERTS},
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, window": ("phi3", {"sliding_window": WINDOW}),
    "granite": ("granite", {"logits_scaling": 8.0}),
    "gemma2, strong caps": ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": WINDOW,
                                       "final_logit_softcapping": 3.0}),
    "gemma3, nested": ("gemma3", {}),
    "cohere": ("cohere", {"logit_scale": 0.0625}),
    "deepseek_v3": ("deepseek_v3", {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {**MOE, "sliding_window": WINDOW}),
    "llama4_text": ("llama4_text", {**MOE, "attention_chunk_size": WINDOW}),
    "qwen3_next": ("qwen3_next", {**MOE, **LINEAR}),
    "qwen3_5_text": ("qwen3_5_text", LINEAR),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "falcon_h1": ("falcon_h1", MAMBA),
    "granitemoehybrid": ("granitemoehybrid", {
        **MOE, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16,
                          "n_groups": 1, "chunk_size": 16}),
    "recurrent_gemma": ("recurrent_gemma", {"attention_window_size": WINDOW}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4}),
}


def tiny_model(name: str):
    """A model of the family -> (model, tokenizer)."""
    family, options = FAMILIES[name]
    tokenizer = rl.load_tokenizer("tiny")
    size = dict(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, head_dim=16, initializer_range=0.1,
        tie_word_embeddings=False, max_position_embeddings=16384,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id)
    if name == "gemma3, nested":
        vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                      num_attention_heads=1, image_size=28, patch_size=14)
        options = {"text_config": size | {"sliding_window": WINDOW}, "vision_config": vision}
        size = {"mm_tokens_per_image": 4}
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(family, **size | options)
    return AutoModelForCausalLM.from_config(configuration).eval(), tokenizer


def measure(name: str) -> tuple[str, bool]:
    """-> the family's row of the table, and whether all is well."""
    start = time.perf_counter()
    model, tokenizer = tiny_model(name)
    try:
        paths = check.find_paths(model)
    except ValueError as e:
        return f"| {name} | refused: {e} | | | {time.perf_counter() - start:.0f} |", True
    gaps = [max(0.0, paths.gaps[f"{what} {way}"])
            for what, way in (("rollout", paths.rollout), ("update", paths.update))]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        flags = ["--env", "babyai", "--algo", "grpo", "--model", f"{folder}/model", "--steps", "2",
                 "--dtype", "float32", "--items_per_step", "2", "--rollouts_per_item", "3",
                 "--horizon", "3", "--horizon_schedule", "fixed", "--max_tokens", "8",
                 "--max_length", "1024", "--out", f"{folder}/run"]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                train.train(config.parse_config(flags))
            rows = Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()
            gap = max(json.loads(row)["logprob_gap"] for row in rows)
            trains, is_well = f"{gap:.1g}", len(rows) == 2 and gap <= 5e-4
        except (Exception, SystemExit) as e:
            trains, is_well = f"FAILS: {type(e).__name__} {e}"[:300], False
    return (f"| {name} | {paths.rollout}, {gaps[0]:.0e} | {paths.update}, {gaps[1]:.0e} | "
            f"{trains} | {time.perf_counter() - start:.0f} |"), is_well


def speed(name: str) -> tuple[str, bool]:
    """-> the family's row of the table of speeds, and whether the ratio is reached."""
    model, tokenizer = tiny_model(name)
    try:
        paths = check.find_paths(model)
    except ValueError:
        return f"| {name} | refused | | |", True
    if paths.rollout != "ragged":
        return f"| {name} | {paths.rollout} | | |", True
    speeds = {"ragged": [], "hf": []}
    for _ in range(3):
        for engine, measured in speeds.items():
            seconds, played, _ = play_ours(model, tokenizer, "long", 48, 16, 3,
                                           None if engine == "ragged" else engine)
            measured.append(sum(len(t.tokens) for t in played) / seconds)
        ratios = [ours / lockstep for ours, lockstep in zip(*speeds.values())]
        if ratios[0] >= 1.2 * SPEED_RATIO:
            break
    ratio = median(ratios)
    ours, lockstep = (median(measured) for measured in speeds.values())
    return f"| {name} | {ours:.0f} | {lockstep:.0f} | {ratio:.1f} |", ratio >= SPEED_RATIO


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES))
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    row_of = measure
    heads = ["family", "rollout, gap", "update, gap", "logprob_gap in training", "seconds"]
    if args.speed:
        row_of = speed
        heads = ["family", "engine, tokens/s", "lockstep, tokens/s", "ratio"]
        torch.set_num_threads(1)
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    are_well = True
    for name in args.families:
        row, is_well = row_of(name)
        print(row, flush=True)
        are_well = are_well and is_well
    return int(not are_well)


if __name__ == "__main__":
    sys.exit(main())
