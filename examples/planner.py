"""A planner and an actor, which are the same model in two conversations. The planner sees what has
happened and writes a plan; the actor sees the plan and the newest observation, and acts. Every
`every` actions the planner is asked again. A plan counts as a turn.

    python train.py --env textcraft --agent examples/planner.py:agent --agent_args "every=3"
"""

from agent import Agent, Play, user

ASK = "\n\nYou lead an agent that acts. In a few short lines, what should it do next?"


def agent(play: Play, every: int = 3) -> Agent:
    observation = play.reset()
    happened = []  # what the planner is shown
    while True:
        play.kind = "PLAN"
        history = "\n".join([*happened, observation])
        plan = yield [*play.start(), user(history + ASK)]
        for _ in range(every):
            reply = yield [*play.start(), user(f"The plan: {plan}\n\n{observation}")]
            step = play.act(reply)
            if step.done:
                return
            happened += [observation, f"> {reply}"]
            observation = step.observation


agent.instant = True  # it only computes
