"""What both ways of TRL's GRPOTrainer have in common: its settings, and how it is watched."""

from benches.peers_scripts.measure import JOB, NUM_STEPS, Sampled, Watch, items_of_step  # first

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import agent

WORLD = JOB["world"]
FIRST_REPLY = agent.FIRST_REPLY


def trainer_for(dataset_rows, tokenizer, **way):
    """A GRPOTrainer with the job's settings. way: `environment_factory` or `rollout_func`, and so
    on."""
    rows = JOB["items_per_step"] * JOB["samples"]
    settings = JOB["settings"]
    parts = min(settings["micro_batches"], rows)
    config = GRPOConfig(
        output_dir="unused", max_steps=NUM_STEPS, learning_rate=JOB["lr"],
        per_device_train_batch_size=rows // parts, gradient_accumulation_steps=parts,
        num_generations=JOB["samples"], max_completion_length=4096, temperature=1.0,
        generation_kwargs={"max_new_tokens": JOB["max_tokens"]},
        max_tool_calling_iterations=JOB["horizon"], beta=0.0, loss_type="dapo",
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        shuffle_dataset=False, use_cpu=True, bf16=False, gradient_checkpointing=False,
        use_transformers_continuous_batching=settings["continuous_batching"],
        # Without num_blocks it takes half of the machine's memory.
        transformers_continuous_batching_config={
            "page_size": 32, "num_blocks": rows * 64, "max_batch_tokens": 1024,
            "return_logprobs": True},
        report_to="none", save_strategy="no", logging_steps=1000, disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype="float32")
    return GRPOTrainer(model, args=config, train_dataset=Dataset.from_list(dataset_rows),
                       processing_class=tokenizer, **way)


def load_tokenizer():
    return AutoTokenizer.from_pretrained(JOB["model"], padding_side="left")


def items():
    """The items of all steps, in order."""
    return [item for step in range(NUM_STEPS) for item in items_of_step(step)]


# ---- measurements, no part of the job ----


def train_and_report(trainer, tokenizer, turns_of):
    """Train, watched. turns_of: () -> for each episode of the last rollout, in order, the number of
    replies that its environment answered."""
    watch = Watch(trainer.model)
    state = {"checking": False}
    sampled = Sampled()

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kw):
            state["trained"] = state["answered"] = 0
            state["rewards"] = []
            if watch.checking:
                state["checking"] = True
                sampled.record(trainer.model, {tokenizer.eos_token_id})
            watch.begin()

        def on_step_end(self, *args, **kw):
            watch.end(state["trained"], state["answered"], sum(turns_of()), state["rewards"])

    trainer.add_callback(Steps())

    # The rollout ends when the rewards are known.
    generate = trainer._generate
    rewards_of = trainer._calculate_rewards

    def watched_generate(prompts):
        out = generate(prompts)
        _, completion_ids, masks, *_ = out
        for ids, mask, turns in zip(completion_ids, masks, turns_of()):
            runs = runs_of(mask)
            state["answered"] += sum(end - start for start, end in runs[:turns])
            if state["checking"]:
                check_episode(watch, tokenizer, ids, runs, turns)
        return out

    def watched_rewards(*args):
        rewards = rewards_of(*args)
        state["rewards"] = rewards.sum(1).tolist()
        watch.rollout_ends()
        return rewards

    trainer._generate = watched_generate
    trainer._calculate_rewards = watched_rewards

    # The update: its mask and its log-probs.
    compute_loss = trainer._compute_loss
    logprobs_and_entropies = trainer._get_per_token_logps_and_entropies

    def watched_logprobs(*args, **kw):
        out = logprobs_and_entropies(*args, **kw)
        state["logprobs"] = out[0].detach()
        return out

    def watched_loss(model, inputs):
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        state["trained"] += int(mask.sum())
        loss = compute_loss(model, inputs)
        if state["checking"]:
            compare_rows(watch, sampled, inputs, mask, state["logprobs"])
        return loss

    trainer._get_per_token_logps_and_entropies = watched_logprobs
    trainer._compute_loss = watched_loss
    trainer.train()
    watch.report()


def runs_of(mask):
    """Where the runs of ones in a mask start and end: [(start, end)]."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0])) if bool(a) != bool(b)]
    return list(zip(edges[::2], edges[1::2]))


def check_episode(watch, tokenizer, ids, runs, turns):
    """Count the trained tokens of replies that no environment answered, and the replies that were
    cut at their limit and that the history does not close."""
    watch.check["unanswered"] += sum(end - start for start, end in runs[turns:])
    for _, end in runs[:-1]:
        closed = tokenizer.eos_token_id in (ids[end - 1], ids[end])
        watch.check["unclosed_replies"] += not closed


def compare_rows(watch, sampled, inputs, mask, logprobs):
    """Compare the rows of a micro-batch with what was sampled."""
    parts = (inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"],
             inputs["completion_mask"], mask, logprobs)
    for prompt, in_prompt, completion, in_completion, trained, own in zip(*parts):
        prompt = prompt[in_prompt.bool()].tolist()
        length = int(in_completion.sum())
        none = [False] * len(prompt)
        watch.compare(prompt + completion[:length].tolist(),
                      none + trained[:length].bool().tolist(),
                      [0.0] * len(prompt) + own[:length].tolist(), sampled)
