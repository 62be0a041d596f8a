"""A page as WebArena shows it to an agent: the accessibility tree of the window, an element a line.

    [4] link 'My orders'
    [7] textbox 'Quantity' focused: True required: False
        [8] StaticText '1'

Two calls of the browser's debugging protocol give all that is needed: the tree, and one snapshot
with every rectangle (one call for each element takes a hundred times as long). Elements are
numbered in order for each observation, because the browser's own numbers change on reload.
"""

import re
from typing import NamedTuple

# Properties that are not shown.
IGNORED_PROPERTIES = {
    "focusable", "editable", "readonly", "level", "settable", "multiline", "invalid", "url",
    "labelledby", "describedby", "details",
}
# Roles that are shown only with a name.
NAMED_ROLES = {
    "generic", "img", "image", "list", "strong", "emphasis", "paragraph", "banner", "navigation",
    "Section", "LabelText", "Legend", "listitem", "none", "MenuListPopup", "main", "form",
    "rowgroup", "SvgRoot", "LayoutTableRow",
}
# Roles that are never shown.
DROPPED_ROLES = {"InlineTextBox", "ListMarker", "LineBreak"}
FIELD_ROLES = {"textbox", "searchbox", "spinbutton"}


class Element(NamedTuple):
    node: int  # the browser's number of the element (backend node id)
    role: str
    box: tuple  # left, top, right, bottom of the visible part, pixels of the window
    editable: bool = False  # takes text


def rectangles(snapshot: dict, width: int, height: int) -> dict:
    """The visible rectangles of the main document: backend node id -> (left, top, right, bottom).

    snapshot: of DOMSnapshot.captureSnapshot. width, height: of the window, pixels. Nodes that the
    window does not show are left out.
    """
    page = snapshot["documents"][0]
    ids = page["nodes"]["backendNodeId"]
    scroll_x = page.get("scrollOffsetX", 0)
    scroll_y = page.get("scrollOffsetY", 0)
    layout = page["layout"]
    found = {}
    for index, (x, y, w, h) in zip(layout["nodeIndex"], layout["bounds"]):
        left = max(0, x - scroll_x)
        top = max(0, y - scroll_y)
        right = min(width, x - scroll_x + w)
        bottom = min(height, y - scroll_y + h)
        is_visible = right > left and bottom > top
        if is_visible and ids[index] not in found:
            found[ids[index]] = (left, top, right, bottom)
    return found


def _property_texts(node):
    """The node's properties that are shown, as "name: value"."""
    return [
        f"{p['name']}: {p['value']['value']}"
        for p in node.get("properties", ())
        if p["name"] not in IGNORED_PROPERTIES and "value" in p.get("value", {})
    ]


def _is_shown(role, name, properties, last_lines):
    """Whether an element gets a line, as in WebArena's code.

    A text is left out where one of the lines just above contains it already.
    """
    if role == "StaticText":
        quoted = repr(name)[1:-1]
        return bool(name.strip()) and not any(quoted in line for line in last_lines)
    return bool(name.strip()) or role not in NAMED_ROLES


def _is_editable(role, node):
    properties = node.get("properties", ())
    return role in FIELD_ROLES or any(p["name"] == "editable" for p in properties)


def render(nodes: list, boxes: dict) -> tuple[str, dict[int, Element]]:
    """Write the tree -> (the text, number -> element).

    nodes: of Accessibility.getFullAXTree. boxes: of `rectangles`.
    """
    if not nodes:
        return "", {}
    node_of_id = {node["nodeId"]: node for node in nodes}
    lines = []
    elements = {}
    seen = set()
    # Depth first without recursion, because pages may be deep. Each entry: the node's id, its depth
    # in the text, and the rectangle of the field or list that contains it, if there is one.
    todo = [(nodes[0]["nodeId"], 0, None)]
    while todo:
        node_id, depth, outer_box = todo.pop()
        node = node_of_id.get(node_id)
        if node is None or node_id in seen:
            continue
        seen.add(node_id)
        role = node.get("role", {}).get("value", "")
        name = node.get("name", {}).get("value")
        # The contents of a field or a list have no rectangle of their own.
        box = boxes.get(node.get("backendDOMNodeId")) or outer_box

        # Is the element a candidate, and does it say something?
        is_candidate = role == "RootWebArea" or (
            box is not None
            and not node.get("ignored")
            and role not in DROPPED_ROLES
            and isinstance(name, str)
        )
        shown = False
        if is_candidate:
            box = box or (0, 0, 1, 1)
            properties = _property_texts(node)
            shown = _is_shown(role, name, properties, lines[-3:])

        if shown:
            number = len(elements) + 1
            suffix = "".join(f" {text}" for text in properties)
            lines.append("\t" * depth + f"[{number}] {role} {name!r}{suffix}")
            backend_id = node.get("backendDOMNodeId", 0)
            elements[number] = Element(backend_id, role, box, _is_editable(role, node))

        child_depth = depth + 1 if shown else depth
        contains_hidden = role == "combobox" or role in FIELD_ROLES
        child_box = box if contains_hidden else outer_box
        for child in reversed(node.get("childIds", ())):
            todo.append((child, child_depth, child_box))
    return "\n".join(lines), elements


def find(text: str, role: str, name: str) -> int | None:
    """The number of the first element with this role and name in an observation, or None.

    >>> find("[1] link 'A'\\n\\t[2] link 'B' focused: True", "link", "B")
    2
    """
    pattern = rf"\[(\d+)\] {re.escape(role)} {re.escape(repr(name))}(?=\s|$)"
    match = re.search(pattern, text)
    return int(match[1]) if match else None
