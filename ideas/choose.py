"""The policy chooses among the actions that are possible: each reply is one of the texts that
`Env.valid_actions` lists, so every action is valid from the first step on.

    python train.py --env babyai --agent choose --action_format plain ...

Sampling is restricted to the tokens that continue one of the texts, and the log-probs are those of
the restricted distribution; a token that is the only one possible has log-prob 0 and is not trained
(GLAM, arXiv 2302.02662; invalid action masking, arXiv 2006.14171). The choice set is part of the
policy: without it the same weights may play no valid action at all.
"""

from agent import Agent, Choice, Play, assistant, reply_with, user


def agent(play: Play) -> Agent:
    """The model sees the whole conversation, and answers with a possible action. Where a world
    lists none, the reply is free."""
    messages = [*play.start(), user(play.reset())]
    action_format = "plain" if play.env.whole_reply else play.action_format
    while True:
        texts = [reply_with(action, action_format) for action in play.valid_actions()]
        reply = yield Choice(messages, texts)
        step = play.act(reply)
        if step.done:
            return
        messages = [*messages, assistant(reply), user(step.observation)]


agent.chooses = agent.instant = True
