"""The job in TRL's GRPOTrainer with `rollout_func`: its user writes the loop over the turns."""

from benches.peers_scripts.trl_common import JOB, WORLD  # first
from benches.peers_scripts.trl_common import items, load_tokenizer, train_and_report, trainer_for

import torch
from trl.trainer.utils import pad

import agent
import envs
from worlds.agentgym import LENIENT

turns = []  # of each episode of the last rollout
worlds = []  # the environments, which are used again


def sample_replies(trainer, histories):
    """A reply to each history. -> lists of ids"""
    if trainer.use_transformers_continuous_batching:
        outputs = trainer.model.generate_batch(
            histories, generation_config=trainer.generation_config,
            continuous_batching_config=trainer.continuous_batching_config, progress_bar=False)
        return [list(output.generated_tokens) for output in outputs.values()]
    pad_id, eos_id = trainer.processing_class.pad_token_id, trainer.processing_class.eos_token_id
    ids = [torch.tensor(history) for history in histories]
    mask = pad([torch.ones_like(row) for row in ids], 0, "left")
    ids = pad(ids, pad_id, "left")
    out = trainer.model.generate(input_ids=ids, attention_mask=mask,
                                 generation_config=trainer.generation_config)
    replies = out[:, ids.shape[1] :].tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in replies]


@torch.no_grad()
def play(prompts, trainer):
    tokenizer = trainer.processing_class
    chat = agent.Chat(tokenizer)
    names = [prompt[0]["content"] for prompt in prompts]
    while len(worlds) < len(names):
        worlds.append(envs.make_env(WORLD))
    plays = [agent.Play(world, name, JOB["horizon"], action_format=JOB["action_format"],
                        choose=LENIENT.get(WORLD)) for world, name in zip(worlds, names)]
    prompt_ids = [chat.prompt(play.send()) for play in plays]
    completions = [[] for _ in names]
    masks = [[] for _ in names]
    rewards = [0.0] * len(names)
    running = list(range(len(names)))
    trainer.model.eval()
    for turn in range(JOB["horizon"]):
        replies = sample_replies(trainer, [prompt_ids[i] + completions[i] for i in running])
        still_running = []
        for i, reply in zip(running, replies):
            completions[i] += reply
            masks[i] += [1] * len(reply)
            messages = plays[i].send(tokenizer.decode(reply, skip_special_tokens=True))
            rewards[i] += plays[i].turn.reward
            if messages is not None and turn + 1 < JOB["horizon"]:
                observation = chat.turns(messages[-1:], closed=chat.is_ended(reply))
                completions[i] += observation
                masks[i] += [0] * len(observation)
                still_running.append(i)
        running = still_running
        if not running:
            break
    trainer.model.train()
    turns[:] = [play.turns for play in plays]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None,
            "env_mask": masks, "reward": rewards}


def reward(reward, **kw):
    return reward


def main():
    tokenizer = load_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": item}]} for item in items()]
    trainer = trainer_for(rows, tokenizer, reward_funcs=reward, rollout_func=play)
    train_and_report(trainer, tokenizer, lambda: turns)


main()
