"""The model sees all of its replies, but only the last two observations.

    python train.py --agent examples/last_two.py:agent
"""

from agent import Agent, Play, assistant, user


def agent(play: Play, keep: int = 2, instead: str = "(an earlier observation)") -> Agent:
    """keep: so many observations are shown. instead: what stands for an older one."""
    messages = [*play.start(), user(play.reset())]
    while True:
        reply = yield messages
        step = play.act(reply)
        if step.done:
            return
        messages += [assistant(reply), user(step.observation)]
        observations = messages[2::2]  # after the instructions and the fixed reply
        for message in observations[:-keep]:
            message["content"] = instead


agent.instant = True  # it only computes
