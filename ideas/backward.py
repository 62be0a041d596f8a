"""Episodes that begin near their end: the world's expert plays to within k turns of the goal, and
the policy from there.

    k = share * horizon, so that with a growing horizon the start moves backward

A curriculum from the goal (reverse curriculum, arXiv 1707.05300; TCOD, arXiv 2604.24005), the
mirror image of ScalingInter, where episodes are cut at their end. The expert's turns are context:
they are not trained on, and do not count as turns. In evaluation, and in step 0, the policy plays
from the beginning.

    python train.py --env babyai --agent backward --agent_args "share=0.5 choose=true"

mixed: k is drawn from 1 to share * horizon, for an item and a step. choose: the replies are chosen
among the possible actions. keep, task: as in ideas/choose.py. With --shaping the expert's progress
is credited to the first reply: the same for all samples of an item.
"""

import random

from agent import Agent, Play, assistant, converse, user

LONGEST = 200  # actions of an expert


def expert_actions(play: Play) -> list[str]:
    """What the expert does from the beginning to the end of the episode; [] if it knows no way, as
    in some levels of BabyAI."""
    play.reset()
    actions = []
    while len(actions) < LONGEST and (action := play.expert()) is not None:
        actions.append(action)
        if play.skip(action).done:
            return actions
    return []


def agent(play: Play, share: float = 0.5, mixed: bool = False, choose: bool = False,
          keep: int = 1000, task: bool = False) -> Agent:
    """Of the earlier turns, the expert's included, the model sees the last `keep`."""
    actions = expert_actions(play) if play.training_step else []
    messages = [*play.start(), user(play.reset())]
    turns = max(1, int(share * play.horizon))
    if mixed:
        turns = random.Random(f"{play.item} {play.training_step} {play.seed}").randint(1, turns)
    for action in actions[: max(0, len(actions) - turns)]:
        observation = play.skip(action).observation
        messages += [assistant(play.reply_with(action)), user(observation)]
    yield from converse(play, messages, choose, keep, task)


agent.chooses = agent.instant = True
