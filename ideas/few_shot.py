"""Episodes of the world's expert stand before the own one: the model sees how it is done.

    instructions, expert's episode 1, ... expert's episode K, the own episode

The examples are the world's first training items without the own item, so nearly all prompts begin
alike, and the KV cache computes that beginning once (in-context learning, arXiv 2005.14165). Their
tokens are context and not trained on.

    python train.py --env babyai --agent few_shot --agent_args "shots=2 choose=true"

choose: the replies are chosen among the possible actions, as by ideas/choose.py.
"""

from agent import Agent, Choice, Messages, Play, assistant, readable, reply_with, user
from envs import items, split_item

NEXT = "\n\nThe next task.\n\n"
LONGEST = 50  # actions of an example
EXAMPLES: dict[tuple[str, str], Messages] = {}  # (item, action format) -> its conversation


def example(play: Play, item: str, action_format: str) -> Messages:
    """The expert's episode of another item: user, assistant, ... user (what the last action gave).
    It is played once in a process."""
    if (item, action_format) not in EXAMPLES:
        shown = [user(play.reset(split_item(item)[1]))]
        while len(shown) < 2 * LONGEST:
            action = play.expert()
            if action is None:
                raise ValueError(f"{item} has no expert who reaches its goal")
            step = play.skip(action)
            shown += [assistant(reply_with(action, action_format)),
                      user(readable(step.observation) or "Done.")]
            if step.done:
                break
        EXAMPLES[item, action_format] = shown
    return EXAMPLES[item, action_format]


def agent(play: Play, shots: int = 2, choose: bool = False) -> Agent:
    """The model sees the examples and the whole conversation."""
    world, _ = split_item(play.item)
    action_format = "plain" if play.env.whole_reply else play.action_format
    names = [name for name in items(world, "train")[: shots + 1] if name != play.item][:shots]
    messages, before = play.start(), ""
    for name in names:
        first, *rest, last = example(play, name, action_format)
        messages += [user(before + first["content"]), *rest]
        before = last["content"] + NEXT
    messages = [*messages, user(before + play.reset())]
    while True:
        texts = [reply_with(a, action_format) for a in play.valid_actions()] if choose else []
        reply = yield Choice(messages, texts)
        step = play.act(reply)
        if step.done:
            return
        messages = [*messages, assistant(reply), user(step.observation)]


agent.chooses = agent.instant = True
