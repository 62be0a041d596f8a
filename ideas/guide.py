"""The world's expert plays some of the turns, fewer and fewer: with the probability

    beta(step) = max(0, 1 - step / fade)

a turn is the expert's. Its action is context, not trained on; what it earns belongs to the reply
before it, so the policy begins every episode (Guided-OPD, arXiv 2606.15912; DAgger, arXiv
1011.0686). The turns are drawn for an item and a training step, so all trajectories of a group have
the same. In evaluation, and in step 0, the expert does not play. `turns` counts the policy's alone.

    python train.py --env babyai --agent guide --agent_args "fade=20 choose=true"

choose: the replies are chosen among the possible actions. keep, task: as in ideas/choose.py. With
the built-in model there was no gain over GRPO at equal turns (docs/ideas.md).
"""

import random

from agent import Agent, Choice, Play, assistant, user
from worlds import goal_line


def agent(play: Play, fade: int = 20, choose: bool = False, keep: int = 1000,
          task: bool = False) -> Agent:
    """Of the earlier turns, the expert's included, the model sees the last `keep`."""
    observation = play.reset()
    goal = f"\n\n{goal_line(observation)}" if task else ""
    turns = [user(observation + goal)]
    draws = random.Random(f"{play.item} {play.training_step} {play.seed}")
    beta = max(0.0, 1 - play.training_step / fade) if play.training_step else 0.0
    while True:
        shown = [*play.start(), *turns[-2 * keep - 1:]]
        reply = yield Choice(shown, play.replies() if choose else [])
        step = play.act(reply)
        while not step.done:
            turns += [assistant(reply), user(step.observation + goal)]
            action = play.expert() if draws.random() < beta else None
            if action is None:
                break
            reply = play.reply_with(action)
            step = play.act(reply)
        if step.done:
            return


agent.chooses = agent.instant = True
