"""Two calls of the model a turn: a draft and, in a conversation of its own, the action. A call
counts as a turn, so give twice the horizon.

    python train.py --agent examples/two_calls.py:agent --horizon 8
"""

from agent import PLAN, Agent, Play, user


def agent(play: Play) -> Agent:
    observation = play.reset()
    while True:
        play.kind = "DRAFT"
        draft = yield [*play.start(), user(observation + PLAN)]
        reply = yield [*play.start(), user(f"{observation}\n\nYour draft: {draft}\n\nNow act.")]
        step = play.act(reply)
        if step.done:
            return
        observation = step.observation


agent.instant = True  # it only computes
