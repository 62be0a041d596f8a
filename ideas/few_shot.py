"""The prompt begins with episodes of the world's expert (in-context learning, arXiv 2005.14165).

    instructions, expert's episode 1, ... expert's episode K, the episode that is played

The examples are the world's first training items, without the item that is played. So nearly all
prompts begin with the same tokens, and the KV cache computes these once. They are context: they are
not trained on.

    python train.py --env babyai --agent few_shot --agent_args "shots=2 choose=true"

choose: the replies are chosen among the possible actions, as by ideas/choose.py. data: the folder
whose training items are shown, if they are not those of data/: that of --data. With the built-in
model success was below GRPO's at equal turns (docs/ideas.md).
"""

from agent import Agent, Messages, Play, assistant, converse, readable, user
from envs import UserError, items, split_item

NEXT = "\n\nThe next task.\n\n"
LONGEST = 50  # actions of an example
EXAMPLES: dict[tuple[str, str], Messages] = {}  # (item, action format) -> its conversation


def example(play: Play, item: str) -> Messages:
    """The expert's episode of another item: user, assistant, ... user (what the last action gave).
    It is played once in a process."""
    if (item, play.form()) not in EXAMPLES:
        shown = [user(play.reset(split_item(item)[1]))]
        while len(shown) < 2 * LONGEST:
            action = play.expert()
            if action is None:
                raise UserError(f"{item}: the expert knows no way to its goal")
            step = play.skip(action)
            shown += [assistant(play.reply_with(action)),
                      user(readable(step.observation) or "Done.")]
            if step.done:
                break
        EXAMPLES[item, play.form()] = shown
    return EXAMPLES[item, play.form()]


def agent(play: Play, shots: int = 2, choose: bool = False, data: str = "") -> Agent:
    """The model sees the examples and the whole conversation."""
    world, _ = split_item(play.item)
    first = items(world, "train", data or None)[: shots + 1]
    names = [name for name in first if name != play.item][:shots]
    messages, before = play.start(), ""
    for name in names:
        first, *rest, last = example(play, name)
        messages += [user(before + first["content"]), *rest]
        before = last["content"] + NEXT
    yield from converse(play, [*messages, user(before + play.reset())], choose)


agent.chooses = agent.instant = True
