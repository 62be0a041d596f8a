"""Faults that the tests must notice: `python experiments/mutants.py [--only TEXT] [--table]`.

Each fault of FAULTS changes one line of the code, in a copy of the repository and never in the
checkout. It survives if the test named beside it still passes: then a test is missing. Before the
faults, the unchanged copy must pass all the named tests.

Two faults are tested at a time, with one thread each; a test that exceeds its time limit has
noticed the fault. --only takes the faults whose row holds TEXT. --table writes docs/mutants.md.
The last line is "N faults, M survive". Exit code 1: a fault survives; 2: nothing can be said, and
one line says why.
"""

import argparse
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs/mutants.md"
JOBS = 2
TIME_LIMIT = 240  # seconds of one fault's test
UNCHANGED_TIME_LIMIT = 900  # seconds of all named tests, in the unchanged copy
PYTEST_FLAGS = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--tb=no", "-rfE",
                "--disable-warnings"]
TESTS_FAILED = 1  # pytest's exit code
# One thread each, and no compiled files: they would be taken for those of a changed source.
ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
       "PYTHONDONTWRITEBYTECODE": "1"}
FORKS = multiprocessing.get_context("forkserver")
LIBRARIES = ["transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2",
             "torch.distributed.checkpoint", "torch.distributed.fsdp", "matplotlib.figure",
             "gymnasium", "pytest"]


class Fault(NamedTuple):
    """A change of one line."""

    file: str
    old: str  # occurs exactly once in the file
    new: str
    breaks: str  # what is wrong then
    test: str  # "FILE::TEST" in tests/, for tests/test_FILE.py; the test that notices it


class Outcome(NamedTuple):
    survives: bool
    failed: str  # the test that noticed the fault


class Untestable(Exception):
    """The tests say nothing about the code."""


FAULTS = [
    # ---- what a trajectory records ----
    Fault("trajectory.py", "[logprobs is not None] * len(ids)", "[True] * len(ids)",
          "Tokens of prompts and observations are in the mask, as if they were sampled.",
          "rollout::test_columns_align_and_each_turn_ends_where_the_policy_ended_it"),
    Fault("trajectory.py", "[logprobs is not None] * len(ids)", "[False] * len(ids)",
          "Sampled tokens are not in the mask.",
          "rollout::test_columns_align_and_each_turn_ends_where_the_policy_ended_it"),
    Fault("rollout.py", "self.trajectory.append(self.reply, self.reply_logprobs,",
          "self.trajectory.append(self.reply + [self.chat.end_id] * cut,"
          " self.reply_logprobs + [0.0] * cut,",
          "A reply that was cut at its limit gets an end-of-turn token in the loss.",
          "rollout::test_a_reply_cut_at_its_limit_gets_no_end_of_turn_in_the_loss"),
    Fault("agent.py", "self.to_user[1:] if closed else list(self.to_user)", "self.to_user[1:]",
          "A reply that was cut at its limit is not closed before the next observation.",
          "agent::test_a_cut_reply_is_closed_by_the_prompt"),
    Fault("trajectory.py", "self.rewards[-1] = reward",
          "self.rewards[self.mask.index(True)] = reward",
          "A turn's reward is put on the first token that the policy sampled.",
          "rollout::test_a_turns_reward_sits_on_its_last_sampled_token"),
    Fault("trajectory.py", "self.rewards[-1] = reward",
          "self.rewards[self.mask.index(True) - 1] = reward",
          "A turn's reward is put on a token of the observation.",
          "rollout::test_a_turns_reward_sits_on_its_last_sampled_token"),
    Fault("trajectory.py", "reward -= invalid_penalty", "reward += invalid_penalty",
          "The penalty of an invalid action is added to the reward.",
          "rollout::test_a_turns_reward_sits_on_its_last_sampled_token"),
    Fault("trajectory.py", "        reward = turn.reward\n", "        reward = turn.score\n",
          "A turn's reward is the world's score so far, not the increment.",
          "rollout::test_a_plan_is_asked_for_once_and_is_no_action"),
    Fault("trajectory.py", "self.valid_actions += turn.valid", "self.valid_actions += 1",
          "Invalid actions are counted as valid.",
          "rollout::test_a_reply_without_an_action_is_answered_with_a_complaint_and_does_not_"
          "reach_the_world"),
    Fault("trajectory.py", "self.rewards = [0.0] * len(self.rewards)", "pass",
          "The rewards of a failed first attempt still count after the restart.",
          "rollout::test_a_failed_episode_is_tried_once_more_within_the_same_turns"),
    Fault("rollout.py", "        if cut:", "        if closed:",
          "The replies that ended with an end-of-turn token are recorded as cut.",
          "engine::test_turns_whose_replies_reach_their_limit_are_recorded"),
    Fault("engine.py", "entropies = drawn - logprobs", "entropies = -logprobs",
          "The recorded entropy is not that of the distribution that the token was drawn from.",
          "rollout::test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob"),
    Fault("rollout.py", "skip_special_tokens=True", "skip_special_tokens=False",
          "The environment is sent the special tokens that the policy wrote.",
          "rollout::test_special_tokens_that_the_policy_writes_change_nothing"),

    # ---- where a trajectory ends, and which one it is ----
    Fault("rollout.py", "if t.turns >= self.horizon:", "if t.turns > self.horizon:",
          "A trajectory has one turn more than its horizon.",
          "rollout::test_the_horizon_ends_a_trajectory"),
    Fault("rollout.py", "held + len(answer.ids) >= self.max_length",
          "held + len(answer.ids) > self.max_length",
          "A trajectory goes on although its prompt has filled max_length.",
          "rollout::test_a_trajectory_fills_its_largest_length_exactly"),
    Fault("rollout.py", "t.starts[-1] + len(self.reply) >= self.max_length",
          "t.starts[-1] + len(self.reply) > self.max_length",
          "A trajectory is one token longer than max_length.",
          "rollout::test_a_trajectory_fills_its_largest_length_exactly"),
    Fault("rollout.py", "return any(s in text for s in stop_strings)", "return False",
          "A world's stop strings do not end a reply.",
          "engine::test_a_worlds_stop_string_ends_a_reply"),
    Fault("rollout.py", "t.step, item_key, sample]", "t.step, item_key]",
          "All samples of an item draw the same random numbers.",
          "rollout::test_a_trajectory_does_not_depend_on_what_is_played_beside_it"),
    Fault("rollout.py", "t.step, item_key, sample]", "item_key, sample]",
          "Every training step draws the same random numbers.",
          "rollout::test_the_random_numbers_of_a_trajectory_change_with_the_training_step"),
    Fault("rollout.py", "[self.config.seed, t.step", "[t.step",
          "The seed does not enter the random numbers.",
          "rollout::test_the_same_seed_repeats_bit_for_bit"),
    Fault("rollout.py", "t.step, item_key, sample]", "t.step, t.group, sample]",
          "An item's place in the call, and so the rank, enters the random numbers.",
          "rollout::test_a_trajectory_does_not_depend_on_what_is_played_beside_it"),
    Fault("rollout.py", "t.step, item_key, sample]",
          "t.step, item_key, t.sample, *map(len, self.pool.free.values())]",
          "How many slots are busy enters the random numbers.",
          "rollout::test_a_trajectory_does_not_depend_on_what_is_played_beside_it"),
    Fault("rollout.py", "[queue.finished[key] for key in queue.keys if key in queue.finished]",
          "list(queue.finished.values())",
          "Trajectories are returned in the order in which they ended.",
          "rollout::test_a_trajectory_does_not_depend_on_what_is_played_beside_it"),
    Fault("agent.py", 'return found[0] if len(found) == 1 else ""',
          'return found[0] if found else ""',
          "The first of two actions in a reply is taken.",
          "agent::test_react_replies"),
    Fault("agent.py", "self.turn.valid = False", "self.turn.valid = True",
          "A reply without an action is not flagged as invalid.",
          "rollout::test_a_reply_without_an_action_is_answered_with_a_complaint_and_does_not_"
          "reach_the_world"),
    Fault("agent.py", "return self.encoder.encode_batch([text], add_special_tokens=False)[0].ids",
          "return self._encode_piece(text)",
          "An observation that spells a special token becomes that token.",
          "agent::test_text_that_spells_a_special_token_is_not_one"),
    Fault("agent.py", " and attempts == 1", "",
          "A failed episode is played again without end.",
          "agent::test_the_episode_restarts_after_the_reflection_on_a_failure_and_only_once"),
    Fault("agent.py", "play.horizon - play.turns > 1", "play.horizon - play.turns > 0",
          "The last turn is spent on a reflection.",
          "agent::test_a_reflection_leaves_a_turn_to_act_in"),

    # ---- environments that fail ----
    Fault("rollout.py", "self.end(Status.ENV_ERROR, error)", "self.end(Status.DONE)",
          "A failed environment is a finished episode with reward 0.",
          "rollout::test_a_failing_environment_is_retried_a_bounded_number_of_times"),
    Fault("rollout.py", "self.tries[key] <= self.config.retries",
          "self.tries[key] < self.config.retries",
          "An episode is played again one time too few.",
          "rollout::test_a_failing_environment_is_retried_a_bounded_number_of_times"),
    Fault("rollout.py", "self.tries[key] <= self.config.retries", "self.tries[key] > 0",
          "An episode whose environment fails is played again without end.",
          "rollout::test_a_failing_environment_is_retried_a_bounded_number_of_times"),
    Fault("rollout.py", "self.leave(broken=bool(error))", "self.leave(broken=False)",
          "An environment that hangs is given to the next episode.",
          "rollout::test_an_environment_that_hung_is_not_used_again"),
    Fault("envs.py", "self.limit(deadline, create_deadline) - time.monotonic()", "deadline",
          "An environment that hangs is waited for without end.",
          "rollout::test_hung_environments_share_one_deadline"),
    Fault("envs.py", "except SystemExit as e:", "except GeneratorExit as e:",
          "A world that exits ends the run.",
          "rollout::test_an_instant_world_is_stepped_in_the_rollouts_own_thread_and_a_remote_one_"
          "is_played_the_same"),
    Fault("metrics.py", 'played = [t for t in trajectories if t.status != "env_error"]',
          "played = list(trajectories)",
          "Failed environments count in the metrics as reward 0.",
          "metrics::test_failed_environments_are_left_out_of_the_metrics"),

    # ---- sampling and the cache ----
    Fault("engine.py", "logits = logits / temperature", "logits = logits * 1.0",
          "The temperature is ignored.",
          "rollout::test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob"),
    Fault("engine.py", "logprobs = probs.gather(",
          "logprobs = (logits * temperature).softmax(-1).gather(",
          "The temperature is not applied to the recorded log-prob.",
          "rollout::test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob"),
    Fault("engine.py", "logprobs = probs.gather(",
          "kept = _truncate(probs, top_p, top_k)\n"
          "    logprobs = (kept / kept.sum(-1, keepdim=True)).gather(",
          "The recorded log-prob is the one after truncation.",
          "rollout::test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob"),
    Fault("engine.py", "mass_before >= top_p *", "mass_before + ordered >= top_p *",
          "top_p leaves out the token at which the mass reaches it.",
          "rollout::test_sample_draws_from_the_softmax_and_records_the_untruncated_logprob"),
    Fault("engine.py", "searchsorted(cdf, target, right=True)", "searchsorted(cdf, target)",
          "A token that truncation left out can be drawn.",
          "engine::test_a_token_that_is_left_out_is_never_drawn"),
    Fault("rollout.py", "answer.ids if answer.begins else self.pending + answer.ids", "answer.ids",
          "The last token of a reply is not fed to the model.",
          "rollout::test_recorded_logprobs_are_those_of_a_fresh_forward_pass"),
    Fault("engine.py", "held[source_slot, :, :prefix_length]",
          "held[slot, :, :prefix_length]",
          "A copied prompt has the keys of the slot's last trajectory.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py",
          "held[slot, :, :prefix_length] = held[source_slot, :, :prefix_length]",
          "held[slot, :, 1:prefix_length] = held[source_slot, :, 1:prefix_length]",
          "The cache is copied one id too short.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py", "self.ids[slot] = ids[:prefix_length]",
          "self.ids[slot] = ids[:prefix_length + 1]",
          "The cache is taken to hold one id more than was copied.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py", "larger[:, :, : smaller.shape[2]] = smaller",
          "larger[:, :, : smaller.shape[2]] = 0",
          "The cache is empty after it has grown.",
          "engine::test_a_cache_that_grows_keeps_what_it_holds"),
    Fault("engine.py", "held[None, chunk.slot, :, : chunk.length]",
          "held[None, chunk.slot - 1, :, : chunk.length]",
          "Attention reads the keys of another slot.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py", "slice(slots[0], slots[-1] + 1)",
          "slice(0, slots[-1] + 1 - slots[0])",
          "Decoding slots read the first slots of the cache, not their own.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("models/packed.py", "hidden.triu(first + 1)", "hidden.triu(first + 2)",
          "A token of an observation sees the token after it.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py", "seen = positions <= last", "seen = positions < last",
          "A decoded token does not see itself.",
          "rollout::test_recorded_logprobs_are_those_of_a_fresh_forward_pass"),
    Fault("engine.py", "positions += range(past, length)",
          "positions += range(past + 1, length + 1)",
          "Positions are off by one.",
          "engine::test_a_slot_is_used_again_and_again_without_traces"),
    Fault("engine.py", "self.kv_cache.batch_select_indices(rows)",
          "self.kv_cache.batch_select_indices(rows.flip(0))",
          "The reference keeps the wrong rows of its cache.",
          "engine::test_padded_rows_say_the_same"),
    Fault("engine.py", "rows = torch.tensor(rows, device=self.device)",
          "rows = torch.tensor([*rows, rows[-1]], device=self.device)",
          "The reference keeps one row of its cache too many.",
          "engine::test_padded_rows_say_the_same"),
    Fault("engine.py", "self.lengths + is_real.sum(1)", "self.lengths + width",
          "Positions of the reference count padding.",
          "engine::test_padded_rows_say_the_same"),

    # ---- log-probs and values ----
    Fault("rl.py", "index[mask.roll(-1, 1)]", "index[mask]",
          "The mask of packed rows is shifted by one: a token's own state gives its log-prob.",
          "rl::test_token_logprobs_and_entropies_against_a_plain_loop"),
    Fault("rl.py", "last_hidden_state[mask[:, 1:]]", "last_hidden_state[mask[:, :-1]]",
          "The mask of padded rows is shifted by one.",
          "rl::test_log_probs_of_other_families_are_those_of_their_own_forward"),
    Fault("rl.py", "scaled_logits(model, hidden) / temperature", "scaled_logits(model, hidden)",
          "The trainer's log-probs are those at temperature 1.",
          "rl::test_token_logprobs_and_entropies_against_a_plain_loop"),
    Fault("models/packed.py", "range(shared, len(row))", "range(len(row) - shared)",
          "Positions count from the end of a shared beginning.",
          "rl::test_token_logprobs_and_entropies_against_a_plain_loop"),
    Fault("models/packed.py",
          "places = torch.cat([places[:shared], ", "places = torch.cat([places, ",
          "A packed trajectory sees the whole trajectory before it.",
          "rl::test_token_logprobs_and_entropies_against_a_plain_loop"),
    Fault("models/packed.py", "is_causal=True", "is_causal=False",
          "A token of a packed row sees the tokens after it.",
          "rl::test_token_logprobs_and_entropies_against_a_plain_loop"),
    Fault("models/packed.py", "hidden.triu(first + 1)", "hidden.triu(first)",
          "A token behind a shared beginning does not see itself.",
          "rl::test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient"),
    Fault("models/packed.py", "range(shared, len(row))", "range(count)",
          "Positions behind a shared beginning start at 0.",
          "rl::test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient"),
    Fault("models/packed.py", "places[:shared], torch.arange", "places[-shared:], torch.arange",
          "A shared beginning is looked up at the end of the sequence before.",
          "rl::test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient"),
    Fault("update.py", "held = len(rows[i])", "held = len(rows[i]) - common",
          "The first of a micro-batch shares with the one before it.",
          "update::test_micro_batches_hold_everything_once_and_are_as_many_for_each_rank"),

    # ---- supervised training ----
    Fault("sft.py", "None if random_actions else [0.0] * len(ids)", "[0.0] * len(ids)",
          "Random actions are learnt, too.",
          "sft::test_an_experts_replies_are_learnt_and_random_ones_are_not"),
    Fault("sft.py", "if t.success and any(t.mask)", "if any(t.mask)",
          "Demonstrations that fail are kept.",
          "sft::test_only_trajectories_in_which_the_expert_succeeds_are_kept"),
    Fault("sft.py", "return -logp.sum() / denominator, {}", "return -logp.mean(), {}",
          "The loss is a mean over observations, too.",
          "sft::test_the_loss_is_the_mean_over_the_replies_tokens_alone"),
    Fault("sft.py", "permutation(count)", "integers(0, count, count)",
          "An epoch draws trajectories with replacement.",
          "sft::test_every_epoch_holds_each_trajectory_once_in_an_order_of_its_own"),
    Fault("metrics.py", "1 - (pairs[:, 0] - pairs[:, 1]).var()",
          "1 - pairs[:, 1].var()",
          "The explained variance is that of the values, not of the errors.",
          "metrics::test_the_explained_variance_counts_sampled_tokens_only"),
    Fault("rl.py", "entropy_gradient and torch.is_grad_enabled()", "False",
          "The entropy never has a gradient.",
          "rl::test_packed_rows_and_parts_of_the_head_change_neither_loss_nor_gradient"),
    Fault("rl.py", "hidden_before(self.body, ids, mask)",
          "hidden_before(self.body, ids.roll(-1, 1), mask)",
          "The critic sees the token whose state it values.",
          "rl::test_critic_values_only_look_back"),

    # ---- advantages ----
    Fault("algos.py", "r[:, k] + gamma * next_v", "r[:, k] + next_v",
          "GAE does not discount the next value.",
          "algos::test_gae_equals_the_double_sum"),
    Fault("algos.py", "gamma * lam * next_adv", "(gamma * lam) ** (r[:, k] != 0) * next_adv",
          "Rewards are discounted once a turn, not once a token.",
          "algos::test_gae_by_hand"),
    Fault("algos.py", "slot = mask.cumsum(1)[row, column] - 1", "slot = column",
          "Observations discount, too.",
          "algos::test_observations_between_the_sampled_tokens_change_nothing"),
    Fault("algos.py", "next_adv = next_v\n", "next_v, next_adv = v[:, -1:].sum(1), next_v\n",
          "The last value is bootstrapped from, as if the horizon were no end.",
          "algos::test_gae_equals_the_double_sum"),
    Fault("algos.py", "(kept - kept.mean()) * torch.rsqrt(kept.var()",
          "(kept - x.mean()) * torch.rsqrt(x.var()",
          "Whitening counts padding and observations.",
          "algos::test_reinforce_pp_equals_the_double_sum_then_whitened"),
    Fault("algos.py", "kept.var()", "kept.var(correction=0)",
          "Whitening divides by the biased standard deviation.",
          "algos::test_reinforce_pp_equals_the_double_sum_then_whitened"),
    Fault("algos.py", "len(rows) >= 2 and scores[rows].max() != scores[rows].min()",
          "len(rows) >= 2",
          "A group of equal scores gets advantages from rounding.",
          "algos::test_groups_without_spread_are_exactly_zero"),
    Fault("algos.py", "len(rows) >= 2 and scores[rows].max() != scores[rows].min()",
          "len(rows) >= 1",
          "A group of one gets an advantage.",
          "algos::test_groups_without_spread_are_exactly_zero"),
    Fault("algos.py", "((groups == group) & valid)", "(groups == group)",
          "Failed environments count in the statistics of their group.",
          "algos::test_group_advantages_equal_brute_force"),
    Fault("algos.py", "s.std() + eps", "s.std(correction=0) + eps",
          "GRPO divides by the biased standard deviation.",
          "algos::test_grpo_and_rloo_by_hand"),
    Fault("algos.py", "s - (s.sum() - s) / (len(s) - 1)", "s - s.mean()",
          "RLOO's baseline includes the trajectory itself.",
          "algos::test_grpo_and_rloo_by_hand"),
    Fault("update.py", "gamma ** (1 - length) * old", "old",
          "Shaping does not telescope: it changes which policy is best.",
          "shaping::test_every_sequence_of_actions_keeps_its_return"),
    Fault("update.py", "after[-1] = 0.0", "after[-1] = 1.0",
          "Shaping pays for the potential of the last state.",
          "shaping::test_every_sequence_of_actions_keeps_its_return"),
    Fault("update.py", "t.rewards[end - 1] += more", "t.rewards[end - 2] += more",
          "Shaping is not paid on the last sampled token of a turn.",
          "shaping::test_it_is_paid_where_a_turn_ends"),
    Fault("update.py", "more - turn_cost", "more + turn_cost",
          "The cost of a turn is added to its reward.",
          "shaping::test_it_is_paid_where_a_turn_ends"),
    Fault("update.py", 'torch.tensor([t.status != "env_error" for t in trajectories])',
          "torch.tensor([True for t in trajectories])",
          "A failed environment counts as reward 0 in its group.",
          "update::test_each_trajectorys_record_holds_its_advantage"),
    Fault("update.py", "outcomes = torch.tensor([t.reward for",
          "outcomes = torch.tensor([t.score for",
          "Groups compare the world's scores, not the rewards.",
          "update::test_each_trajectorys_record_holds_its_advantage"),
    Fault("update.py", "step.rewards - penalty", "step.rewards + penalty",
          "The KL in the reward is added, not taken off.",
          "update::test_the_kl_in_the_reward_is_taken_off_each_sampled_token"),
    Fault("update.py", "penalty = cfg.kl_coef * torch.where(mask, kl, 0.0)",
          "penalty = cfg.kl_coef * kl.abs()",
          "The estimator of the KL in the reward is not the chosen one.",
          "update::test_the_kl_in_the_reward_is_taken_off_each_sampled_token"),

    # ---- the loss ----
    Fault("algos.py", "torch.max(-ratio * adv, -clipped_ratio * adv)",
          "torch.min(-ratio * adv, -clipped_ratio * adv)",
          "The clip has the wrong sign: it keeps the steps that go too far.",
          "algos::test_the_clip_stops_only_the_direction_that_goes_too_far"),
    Fault("algos.py", "ratio.clamp(1.0 - clip_low, 1.0 + clip_high)",
          "ratio.clamp(max=1.0 + clip_high)",
          "The clip has one side only.",
          "algos::test_the_clip_stops_only_the_direction_that_goes_too_far"),
    Fault("algos.py", "1.0 - clip_low, 1.0 + clip_high", "1.0 - clip_high, 1.0 + clip_low",
          "The two sides of the clip are swapped.",
          "algos::test_the_clip_stops_only_the_direction_that_goes_too_far"),
    Fault("algos.py", "torch.max(-ratio * adv, -clipped_ratio * adv)",
          "torch.max(ratio * adv, clipped_ratio * adv)",
          "The loss has the wrong sign.",
          "algos::test_gradient_at_ratio_one_is_minus_the_advantage"),
    Fault("ideas/gspo.py", 'turns if per == "turn" else torch.zeros_like(turns)',
          "torch.zeros_like(turns)",
          "The ratio of a turn is that of the trajectory.",
          "ideas::test_the_losses_of_gspo_equal_the_loop_and_so_do_their_gradients"),
    Fault("ideas/gspo.py", "+ logp - logp.detach()).exp()", ").exp() * log_ratio.exp()",
          "The ratio of a sequence is multiplied with that of each token.",
          "ideas::test_the_gradient_of_gspo_is_that_of_the_papers_ratio_of_a_sequence"),
    Fault("ideas/gigpo.py", "returns[:, k] += gamma *", "returns[:, k] +=",
          "The return of a turn is not discounted.",
          "ideas::test_the_returns_and_advantages_of_turns_equal_the_loops"),
    Fault("ideas/gigpo.py", "returns.round(decimals=5).to(", "returns.to(",
          "Equal rewards in another order give turns an advantage of rounding noise.",
          "ideas::test_equal_turn_rewards_in_another_order_give_exactly_no_advantage"),
    Fault("ideas/gigpo.py", "None if valid is None else valid[of_row])", "None)",
          "Turns of failed environments count in the comparison of turns.",
          "ideas::test_the_returns_and_advantages_of_turns_equal_the_loops"),
    Fault("ideas/gigpo.py", "ids.setdefault((t.group, state), len(ids))",
          "ids.setdefault(state, len(ids))",
          "Turns of different items are compared with each other.",
          "ideas::test_turns_are_compared_by_state_within_an_item_alone"),
    Fault("ideas/gigpo.py", "t.states[k] if t.states[k] is not None else (b, k)", "t.states[k]",
          "Turns in unknown states are compared with each other.",
          "ideas::test_turns_are_compared_by_state_within_an_item_alone"),
    Fault("ideas/gigpo.py", "return of_trajectories + turn_advantage", "return turn_advantage",
          "Credit for states leaves out the trajectory's advantage.",
          "ideas::test_the_advantages_of_turns_are_those_of_the_loops"),
    Fault("worlds/babyai.py", 'False) == "success"', 'False) or False',
          "The state of a mission with two parts changes with the first action.",
          "babyai::test_a_way_back_and_two_ways_to_a_place_end_in_one_state"),
    Fault("ideas/distill.py", "- weight * kl", "+ weight * kl",
          "The student is driven away from its teacher.",
          "ideas::test_a_teacher_adds_its_log_prob_less_the_policys_to_each_tokens_advantage"),
    Fault("ideas/information.py", "-math.inf).logsumexp(1)", "-math.inf).logsumexp(0)",
          "Mutual information sums over replies in the place of items.",
          "ideas::test_mutual_information_is_that_of_a_small_channel"),
    Fault("ideas/information.py", "if categories[i] == categories[j]]", "if True]",
          "Replies are compared with those to items of other categories.",
          "ideas::test_the_information_of_a_step_is_that_of_each_first_reply_after_each_first_"
          "prompt"),
    Fault("algos.py", "logp = torch.where(mask, _as_float(logprobs), 0.0)",
          "logp = _as_float(logprobs)",
          "What stands outside the mask reaches the gradient of the policy.",
          "algos::test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient"),
    Fault("algos.py", "ref = torch.where(mask, ref, 0.0)", "ref = ref * 1.0",
          "The KL is taken on the prompt, too.",
          "algos::test_the_kl_of_masked_tokens_is_zero_outside_the_mask"),
    Fault("algos.py", "difference = (ref - logp)", "difference = (logp - ref)",
          "The arguments of k3 are swapped.",
          "algos::test_kl_by_hand_and_zero_for_equal_policies"),
    Fault("algos.py", "return -(logp.exp()", "return (logp.exp()",
          "The entropy has the wrong sign.",
          "algos::test_entropy_equals_the_sum_and_survives_excluded_words"),
    Fault("algos.py", "0.5 * torch.max((v - R)", "0.5 * torch.min((v - R)",
          "The critic's clip takes the smaller error.",
          "algos::test_value_loss_by_hand"),
    Fault("algos.py", "if denominator is None:", "if True:",
          "Each micro-batch has a denominator of its own.",
          "algos::test_micro_batches_add_up_to_the_whole"),
    Fault("update.py", "aggregate(loss, mask, cfg.aggregation, denominator,\n"
                       "                           part.get(\"num_sampled\")), stats",
          "aggregate(loss, mask, cfg.aggregation), stats",
          "The policy's loss is a mean of the means of micro-batches.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", 'batch["mask"][rows], cfg.aggregation)',
          'batch["mask"][rows][:1], cfg.aggregation)',
          "The denominator is counted over a part of the mini-batch.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", "loss - cfg.entropy_coef * entropy", "loss + cfg.entropy_coef * entropy",
          "The entropy bonus is a penalty.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", "entropy_gradient=cfg.entropy_coef > 0", "entropy_gradient=False",
          "The entropy bonus has no gradient.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", "loss = loss + cfg.kl_coef * kl", "loss = loss - cfg.kl_coef * kl",
          "The KL in the loss drives the policy away from the reference.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", 'enumerate(trajectories) if t.status != "env_error"]',
          "enumerate(trajectories)]",
          "Failed environments count in the loss.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", "if other_terms or has_advantage[i]", "if has_advantage[i]",
          "Trajectories of advantage 0 get neither KL nor entropy bonus.",
          "update::test_an_update_takes_the_step_of_the_plain_loss"),
    Fault("update.py", "if math.isfinite(norm):", "if True:",
          "A gradient that is not finite destroys the weights.",
          "update::test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_are"),

    # ---- several processes ----
    Fault("parallel.py", "dist.all_reduce(flat)", "dist.all_reduce(flat.clone())",
          "Gradients are not summed over ranks.",
          "parallel::test_gradients_are_the_same_however_they_are_computed[launcher5--300]"),
    Fault("update.py", "if is_repeat else num_ranks", "if is_repeat else 1",
          "A sharded model's gradient is divided by the number of ranks.",
          "parallel::test_gradients_are_the_same_however_they_are_computed[launcher6-shard-8192]"),
    Fault("update.py", "scale = 0.0 if is_repeat else num_ranks", "scale = num_ranks",
          "A trajectory that a rank computes again counts twice.",
          "parallel::test_gradients_are_the_same_however_they_are_computed"
          "[launcher7-shard,recompute-200]"),

    # ---- schedules ----
    Fault("schedule.py", "min(step // every,", "min((step + 1) // every,",
          "The horizon rises one step too early.",
          "schedule::test_horizon_rises_in_stages_and_stays_at_the_last"),
    Fault("schedule.py", "max(0, stage - 1), mean", "min(stage + 1, num_rounds - 1), mean",
          "The adaptive horizon goes forward on a collapse.",
          "schedule::test_the_adaptive_horizon_steps_back_once_from_a_collapse"),
    Fault("schedule.py", "if rise < MIN_RISE and math.fsum(cuts) / window > MIN_CUT:",
          "if rise < MIN_RISE:",
          "The adaptive horizon grows although hardly any trajectory is cut.",
          "schedule::test_the_adaptive_horizon_grows_when_success_levels_off_and_only_then"),
    Fault("schedule.py", "(step + 1) / max(1, warmup)", "1.0",
          "The learning rate has no warm-up.",
          "schedule::test_the_documented_examples_hold"),
    Fault("train.py", 'getattr(run.cfg, flag) * factor', 'getattr(run.cfg, flag)',
          "The schedule of the learning rate does not reach the optimizer.",
          "schedule::test_learning_rates_follow_their_schedule"),
    Fault("schedule.py", "default_rng([seed, epoch])", "default_rng([0, epoch])",
          "The items of a step do not depend on the seed.",
          "schedule::test_items_of_a_step_are_a_function_of_seed_and_step"),
    Fault("schedule.py", "[seed, epoch]).permutation(len(items))",
          "[seed, epoch]).integers(len(items), size=len(items))",
          "An epoch repeats items.",
          "schedule::test_items_of_a_step_are_a_function_of_seed_and_step"),
    Fault("config.py", 'return [default["rounds"][-1]]', 'return [default["rounds"][0]]',
          "A fixed horizon is the shortest of the preset.",
          "schedule::test_a_fixed_horizon_is_the_longest_of_the_preset"),
    Fault("config.py", "counts[world] += 1", "counts[world] += 0",
          "A mixture plays fewer items than a step has.",
          "train::test_each_world_of_a_mixture_has_its_share_of_a_steps_items"),

    # ---- checkpoints and final weights ----
    Fault("checkpoint.py", 'in named(run) if (folder / "state.json").exists()]', "in named(run)]",
          "A checkpoint without state.json counts as complete.",
          "checkpoint::test_checkpoints_are_whole_or_absent"),
    Fault("checkpoint.py", "            if own:\n", "            if own and False:\n",
          "A resumed run has lost the optimizer's state.",
          "checkpoint::test_checkpoints_are_whole_or_absent"),
    Fault("rl.py", "LORA_SCALE * b @ a", "0 * b @ a",
          "The final model lacks LoRA's adapters.",
          "parallel::test_lora_trains_adapters_alone_and_leaves_a_plain_model"),
    Fault("train.py", '"horizon": run.adaptive}', '"horizon": {}}',
          "A checkpoint lacks the state of the adaptive schedule.",
          "train::test_the_adaptive_horizon_follows_the_metrics_and_resumes"),
    Fault("train.py", 'json.loads(line)["step"] < step', 'json.loads(line)["step"] <= step',
          "A resumed run keeps the metrics of steps that it plays again.",
          "train::test_the_adaptive_horizon_follows_the_metrics_and_resumes"),

    # ---- which ways of computing a model are exact, and who plays which trajectory ----
    Fault("models/check.py", "            if is_exact:", "            if True:",
          "A way is used although its log-probs differ from the model's own.",
          "check::test_a_way_that_is_not_exact_is_not_used"),
    Fault("models/check.py", "if not paths.rollout or not paths.update:", "if False:",
          "A model without an exact way is used all the same.",
          "check::test_a_model_that_no_way_computes_exactly_is_refused"),
    Fault("models/check.py",
          "is_exact = statistics.mean(of_dtype) <= max(LARGEST_MEAN_GAP, rounding)", "pass",
          "The gap in the run's own dtype does not count.",
          "check::test_in_bfloat16_the_mean_gap_counts_too"),
    Fault("models/check.py", "max(LARGEST_MEAN_GAP, rounding)", "LARGEST_MEAN_GAP",
          "A model is refused because bfloat16 rounds its large log-probs.",
          "check::test_log_probs_that_bfloat16_rounds_by_more_than_the_limit_refuse_no_model"),
    Fault("models/check.py", "paths = rl.ComputePaths(**json.loads(kept.read_text()))",
          "raise ValueError",
          "A model is checked again in each run.",
          "check::test_the_result_is_kept_for_models_of_the_same_configuration"),
    Fault("models/check.py", "1 + kinds.index(kind)", "1",
          "The copy that is checked lacks a kind of layer.",
          "check::test_the_copy_has_the_models_first_layers_and_one_of_each_kind"),
    Fault("engine.py", "seen &= positions > last - window", "pass",
          "A decoded token sees what is beyond its sliding window.",
          "check::test_each_family_is_computed_in_the_fastest_exact_way"),
    Fault("models/packed.py", "scores = torch.cat([scores, sinks], -1)",
          "scores = torch.cat([scores, sinks - 99], -1)",
          "Attention sinks have no weight.",
          "check::test_each_family_is_computed_in_the_fastest_exact_way"),
    Fault("models/packed.py", "scores = softcap * torch.tanh(scores / softcap)", "pass",
          "Scores are not capped.",
          "check::test_each_family_is_computed_in_the_fastest_exact_way"),
    Fault("parallel.py", "start = self.dealt + sum(shares[: ranks()[0]])", "start = self.dealt",
          "Two ranks play the same trajectories.",
          "parallel::test_a_dealt_run_repeats_and_is_that_of_one_process"),
    Fault("parallel.py", "if self.dealt < self.count and not self.stopped:", "if False:",
          "A rank that is stopped leaves the others waiting for it.",
          "parallel::test_a_rank_that_leaves_tells_those_who_would_wait_for_it"),
    # ---- the page of a run ----
    Fault("view.py", '.replace("<", "\\\\u003c")', "",
          "A </script> that a model wrote ends the page's data.",
          "view::test_nothing_that_was_written_is_markup_and_the_page_needs_no_network"),
    Fault("page/table.js", "textContent: found.get(row)", "innerHTML: found.get(row)",
          "What a search has found is parsed as HTML.",
          "page::test_nothing_runs_that_a_model_wrote"),
    Fault("page/table.js", '(order.up ? "ascending" : "descending")',
          '(order.up ? "descending" : "ascending")',
          "The table's head announces the wrong order.",
          "page::test_the_table_is_sorted_by_each_column_and_says_so"),
    Fault("page/table.js", "x >= Number(range[1])", "x > Number(range[1])",
          "A range of a filter leaves out its first value.",
          "page::test_the_table_is_filtered"),
    Fault("page/table.js", ": after - before;", ": before - after;",
          "The change between two steps has the wrong sign.",
          "page::test_two_steps_are_compared"),
    Fault("page/data.js", 'sampled !== (where === "replies")', 'sampled === (where === "replies")',
          "A search in replies looks at the environment's text.",
          "page::test_search_finds_a_text_in_replies_or_in_the_environments_text"),
    Fault("page/data.js", "if (sampled) turn += 1;", "turn += 1;",
          "Turns of the page are counted twice.",
          "page::test_turns_have_their_reward_advantage_and_marks"),
    Fault("page/trajectory.js", "trajectory.invalid_turns.includes(turn);",
          "trajectory.invalid_turns.includes(turn - 1);",
          "The mark of an invalid action is on the turn after it.",
          "page::test_turns_have_their_reward_advantage_and_marks"),
    Fault("page/trajectory.js", "length[i + 1][j + 1] + 1", "length[i + 1][j + 1]",
          "Differences are not those to the longest common subsequence.",
          "page::test_what_differs_between_two_trajectories_is_marked"),
    Fault("page/trajectory.js", 'location.hash = wanted.map(addressOf).join("&");',
          "location.hash = addressOf(row);",
          "The address of the page forgets the first of two trajectories.",
          "page::test_each_trajectory_has_an_address_and_back_goes_back"),
    Fault("page/scenes.js", "`^[ \\\\t]*\\\\[${target[1]}\\\\].*$`", "`^[ \\\\t]*\\\\[.*$`",
          "The first element of a web page is marked, not the one that was clicked.",
          "page::test_textcraft_shows_inventories_and_webarena_the_element_that_was_clicked"),
    Fault("page/curves.js", "Math.abs(step - wanted) < Math.abs(best - wanted)",
          "Math.abs(step - wanted) > Math.abs(best - wanted)",
          "A curve shows the value of another step than the one under the cursor.",
          "page::test_curves_have_axes_say_their_values_and_choose_steps"),
    Fault("page/live.py", "if name not in LOCAL_NAMES:", "if not name:",
          "A page of another site can read the runs through a name that points here.",
          "page::test_a_live_page_is_for_this_machine_alone"),
    Fault("page/live.py", "stamp(file) != self.stamps[file]", "stamp(file) == ()",
          "A live page mixes a step with the same step played again.",
          "view::test_a_live_run_reads_steps_as_they_come_and_anew_if_one_is_played_again"),
    Fault("page/run.py", "is_number(reward) and reward < 0", "is_number(reward) and reward <= 0",
          "In older runs every turn without a reward counts as invalid.",
          "view::test_runs_that_did_not_record_invalid_turns_show_those_with_a_negative_reward"),
    Fault("page/replay.py", 'self.config.get("parse") == "lenient"', "False",
          "A room is drawn from replies that were read in another way.",
          "view::test_rooms_are_drawn_as_the_replies_were_read"),
]


# ---- copies of the repository ----


def make_copy(folder: Path) -> None:
    """Copy what git tracks or would track, as it stands in the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str], time_limit: float) -> tuple[int | None, str]:
    """Run tests in a copy -> (pytest's exit code, or None at the time limit; its output).

    The processes are forked from one that has imported the large libraries, and nothing of ours.
    """
    output = folder.with_suffix(".txt")
    process = FORKS.Process(target=pytest_process, args=(folder, tests, output))
    process.start()
    process.join(time_limit)
    if process.is_alive():
        # Tests start processes of their own: end all of this session.
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None, output.read_text()
    return process.exitcode, output.read_text()


def pytest_process(folder: Path, tests: list[str], output: Path) -> NoReturn:
    """Run pytest in this process, in a new session."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.exit(int(pytest.main([*PYTEST_FLAGS, *map(node, tests)])))


def node(test: str) -> str:
    """"rl::test_a" -> "tests/test_rl.py::test_a", as pytest wants it."""
    file, name = test.split("::", 1)
    return f"tests/test_{file}.py::{name}"


def try_fault(fault: Fault, folder: Path) -> Outcome:
    """Apply the fault in a copy, run its test, and restore the copy.

    Raises Untestable if the test neither passed nor failed.
    """
    file = folder / fault.file
    unchanged = file.read_text()
    file.write_text(unchanged.replace(fault.old, fault.new))
    try:
        code, output = run_tests(folder, [fault.test], TIME_LIMIT)
    finally:
        file.write_text(unchanged)
    if code is None:
        return Outcome(False, f"{fault.test} (time limit)")
    if code not in (0, TESTS_FAILED):
        raise Untestable(f"{fault.file}: '{fault.old}': pytest ended with {code}: "
                         f"{last_line(output)}")
    return Outcome(code == 0, fault.test)


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


# ---- what must hold before the faults ----


def check_texts(faults: list[Fault]) -> None:
    """Raise Untestable unless each old text occurs exactly once in its file."""
    for fault in faults:
        count = (ROOT / fault.file).read_text().count(fault.old)
        if count != 1:
            raise Untestable(f"{fault.file} has '{fault.old}' {count} times, not once")


def check_unchanged(faults: list[Fault], folders: list[Path]) -> None:
    """Raise Untestable unless all named tests pass in the unchanged copies.

    The tests of a file stay together, because they share what is slow to make.
    """
    by_file = {}
    for test in sorted({fault.test for fault in faults}):
        by_file.setdefault(test.split("::")[0], []).append(test)

    def run_file(tests, folder):
        code, output = run_tests(folder, tests, UNCHANGED_TIME_LIMIT)
        if code != 0:
            found = re.search(r"^(FAILED|ERROR) .*", output, re.MULTILINE)
            wrong = found[0] if found else last_line(output)
            raise Untestable(f"the unchanged copy fails its tests: {wrong}")

    in_copies(run_file, by_file.values(), folders, "unchanged copy, files of tests")


# ---- all faults ----


def in_copies(function: Callable[[Any, Path], Any], work: Iterable, folders: list[Path],
              label: str) -> list:
    """[function(one, a copy), ...] for each of `work`, as many at a time as there are copies."""
    free = queue.SimpleQueue()
    for folder in folders:
        free.put(folder)

    def run(one):
        folder = free.get()
        try:
            return function(one, folder)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as threads:
        futures = [threads.submit(run, one) for one in work]
        try:
            for future in tqdm(as_completed(futures), total=len(futures), desc=label):
                future.result()
        except Untestable:
            threads.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def table(faults: list[Fault], outcomes: list[Outcome]) -> str:
    """docs/mutants.md."""
    lines = [
        "# Faults that the tests notice",
        "",
        "Each fault changes one line of the code. `python experiments/mutants.py --table` applies",
        "it in a copy of the repository, runs the test named beside it, and writes this table.",
        "",
        "| fault | file | test that fails |",
        "|---|---|---|",
    ]
    for fault, outcome in zip(faults, outcomes):
        noticed = "**none**" if outcome.survives else f"`tests/test_{outcome.failed}`"
        lines.append(f"| {fault.breaks} | `{fault.file}` | {noticed.replace('::', '.py::', 1)} |")
    survivors = sum(outcome.survives for outcome in outcomes)
    lines += ["", f"{len(faults)} faults, {survivors} survive."]
    return "\n".join(lines) + "\n"


def usage_error(text: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"mutants.py: {text}", file=sys.stderr)
    sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose row holds TEXT")
    parser.add_argument("--table", action="store_true", help="write docs/mutants.md")
    flags = parser.parse_args()
    faults = [fault for fault in FAULTS if any(flags.only in text for text in fault)]
    if not faults:
        usage_error(f"no fault's row holds '{flags.only}'")
    if flags.table and len(faults) < len(FAULTS):
        usage_error("--table is for all faults, not with --only")

    began = time.monotonic()
    os.environ.update(ENV)
    FORKS.set_forkserver_preload(LIBRARIES)
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / f"copy{n}" for n in range(JOBS)]
        try:
            check_texts(faults)
            for folder in folders:
                make_copy(folder)
            check_unchanged(faults, folders)
            outcomes = in_copies(try_fault, faults, folders, "faults")
        except Untestable as e:
            usage_error(e)

    if flags.table:
        TABLE.write_text(table(faults, outcomes))
    for fault, outcome in zip(faults, outcomes):
        if outcome.survives:
            print(f"survives: {fault.file}: {fault.breaks} ({fault.test})")
    survivors = sum(outcome.survives for outcome in outcomes)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    print(f"{len(faults)} faults, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
