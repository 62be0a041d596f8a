"""The worlds, one in a file, and what they share."""

from envs import ItemError


def check_item(world: str, item: int, end: int | None = None) -> None:
    """Raise ItemError unless `item` is an int from 0 on, below `end` if there is one."""
    is_number = isinstance(item, int) and not isinstance(item, bool)
    if not is_number or item < 0 or (end is not None and item >= end):
        last = "..." if end is None else end - 1
        raise ItemError(f"{world} has items 0 to {last}, not {item!r}")
