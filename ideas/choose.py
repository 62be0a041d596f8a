"""The policy chooses among the actions that are possible: each reply is one of the texts that
`Env.choices` lists, so every action is valid from the first step on. Typed text stays free: in
SearchQA queries and answers, in WebArena what is written into a field and the final answer.

    python train.py --env babyai --agent choose --agent_args "keep=0 task=true"

Sampling is restricted to the tokens that continue one of the texts, and the log-probs are those of
the restricted distribution; a token that is the only one possible has log-prob 0 and is not trained
(GLAM, arXiv 2302.02662; invalid action masking, arXiv 2006.14171). The choice set is part of the
policy: without it the same weights may play no valid action at all.

keep: the number of earlier turns that the model is shown. task: the line of the first observation
that names the goal (`worlds.goal_line`) is repeated after each observation. free: replies are not
restricted, to see what a trained policy does without its choice set. docs/ideas.md has what they do
to a small pretrained model, and what was taken out.
"""

from agent import Agent, Play, converse, user


def agent(play: Play, keep: int = 1000, task: bool = False, free: bool = False) -> Agent:
    """Answers with a possible action. Where a world lists none, the reply is free."""
    yield from converse(play, [*play.start(), user(play.reset())], not free, keep, task)


agent.chooses = agent.instant = True
