"""The job in TRL's GRPOTrainer with `environment_factory`.

The environment's method `act` is a tool. What makes a reply a call of that tool is the tokenizer's
response template: here the whole reply is the argument, so that a reply without an action is
answered as in this project, and the episode goes on. The chat template shows a tool's answer as a
user's message, which gives the same tokens as in this project.
"""

from benches.peers_scripts.trl_common import JOB, WORLD, FIRST_REPLY  # first
from benches.peers_scripts.trl_common import items, load_tokenizer, train_and_report, trainer_for

import agent
import envs
from worlds.agentgym import LENIENT

CHAT_TEMPLATE = """{% for m in messages %}{% set tool = m['role'] == 'tool' %}<|im_start|>{{
'user' if tool else m['role'] }}
{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function'] }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": {
        "close_pattern": r"<\|im_end\|>\s*", "content": "text",
        "transform": [{"type": "function",
                       "function": {"name": "act", "arguments": {"reply": "{content}"}}}]}},
}


class World:
    def __init__(self):
        self._env = envs.make_env(WORLD)

    def reset(self, item: str, **kw) -> str:
        self._play = agent.Play(self._env, item, JOB["horizon"],
                                action_format=JOB["action_format"], choose=LENIENT.get(WORLD))
        self._return = 0.0
        self._turns = 0
        self._done = False
        return self._play.send()[-1]["content"]

    def act(self, reply: str) -> str:
        """
        Takes an action.

        Args:
            reply: A thought and an action.

        Returns:
            What is seen then.
        """
        if self._done:
            raise ValueError("The episode is over.")
        messages = self._play.send(reply)
        self._return += self._play.turn.reward
        self._turns += 1
        self._done = messages is None
        return self._play.turn.observation if self._done else messages[-1]["content"]

    def get_reward(self) -> float:
        return self._return


def main():
    tokenizer = load_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    first = agent.instructions(envs.make_env(WORLD).prompt, JOB["action_format"])
    prompt = [{"role": "user", "content": first}, {"role": "assistant", "content": FIRST_REPLY},
              {"role": "user", "content": ""}]
    rows = [{"prompt": prompt, "item": item} for item in items()]
    trainer = trainer_for(rows, tokenizer, environment_factory=World)
    train_and_report(trainer, tokenizer, lambda: [env._turns for env in trainer.environments])


main()
