"""An expert for the embedded tasks: it follows a task's plan (websites/templates.py).

It sees what the agent sees, gives an action for each observation, and scrolls where an element is
not in the window.
"""

from envs import Env, Step
from worlds.webarena.tree import find


def next_reply(step: tuple, page: str) -> tuple[str, bool]:
    """One step of a plan -> (a reply, whether its action carries the step out).

    step: ("click", role, name), ("type", role, name, text, enter), ("goto", address) or
        ("stop", answer).
    page: the tree that the agent sees. If the step's element is not in it, the reply scrolls down,
        which does not carry the step out.

    A reply names what it is about, then gives the action.

    >>> next_reply(("click", "link", "Forums"), "[1] RootWebArea 'A'\\n\\t[2] link 'Forums'")
    ('Forums\\n```click [2]```', True)
    """
    kind = step[0]
    if kind == "goto":
        return f"nothing\n```goto [{step[1]}]```", True
    if kind == "stop":
        return f"{step[1] or 'nothing'}\n```stop [{step[1]}]```", True
    role, name = step[1:3]
    number = find(page, role, name)
    if number is None:
        return "nothing\n```scroll [down]```", False
    if kind == "click":
        return f"{name}\n```click [{number}]```", True
    text, enter = step[3:]
    return f"{name}\n```type [{number}] [{text}] [{enter}]```", True


class Follower:
    """Follows the plan of an episode, whoever acts.

    After an action that is not the plan's, it returns to the last page that the plan has opened or
    changed, and goes on from there: what was written into the page since then is lost.
    """

    def __init__(self, plan: list, answer: str, page: str, url: str):
        """page, url: the tree and the address that the agent sees first."""
        self.steps = [*plan, ("stop", answer)]
        self.place = 0  # index of the step that comes next
        self.page = page
        self.url = url
        self.return_to = (url, 0)  # an address, and the step that comes next there
        self.is_astray = False
        self.is_stuck = False  # scrolling does not show more of the page

    def reply(self) -> str | None:
        """The reply that goes on with the plan. None: the next element is not on the page."""
        if self.is_astray:
            return next_reply(("goto", self.return_to[0]), self.page)[0]
        if self.is_stuck:
            return None
        return next_reply(self.steps[self.place], self.page)[0]

    def take(self, as_planned: bool, page: str, url: str) -> None:
        """Note what the agent sees after an action: the tree `page` at the address `url`.

        as_planned: the action was that of the last `reply`.
        """
        if not as_planned:
            self.is_astray = True
        elif self.is_astray:
            self.is_astray = False
            self.is_stuck = False
            self.place = self.return_to[1]
        else:
            self._go_on(page, url)
        self.page = page
        self.url = url

    def _go_on(self, page, url):
        step = self.steps[self.place]
        _, is_carried_out = next_reply(step, self.page)
        if not is_carried_out:
            self.is_stuck = page == self.page
            return
        self.place += 1
        # A button may change something on the site, which must not be done twice.
        if url != self.url or step[:2] == ("click", "button"):
            self.return_to = (url, self.place)


def solve(env: Env, item: int) -> Step:
    """Play the item by the expert -> the last step. Raises RuntimeError if there is no way on."""
    env.reset(item)
    step = Step("")
    while not step.done:
        reply = env.expert()
        if reply is None:
            raise RuntimeError(f"item {item}: there is no way on from\n{step.observation}")
        step = env.step(reply)
    return step
