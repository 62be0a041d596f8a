"""docs/questions.md: the names that its answers give must exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "questions.md").read_text()
NAME = re.compile(r"`([\w/]+\.py)`:\s`([\w.]+)`")  # `rollout.py`: `Trajectory.record_turn`
ANSWERS = re.findall(r"^\*\*([^*]+\?)\*\*\s(.+?)(?=\n\n|\Z)", PAGE, re.DOTALL | re.MULTILINE)


def defined_names(body):
    """The names of the functions, classes, methods, fields and constants in a body of code."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{member}" for member in defined_names(node.body)}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def missing_names(text):
    """The names in a text, as (file, name), that their file does not define."""
    missing = []
    for file, name in NAME.findall(text):
        source = ROOT / file
        if not source.exists() or name not in defined_names(ast.parse(source.read_text()).body):
            missing.append((file, name))
    return missing


def test_the_page_answers_at_least_twenty_questions():
    assert len({question for question, _ in ANSWERS}) == len(ANSWERS) >= 20
    paragraphs = [part for part in PAGE.split("\n\n") if part.startswith("**")]
    assert len(paragraphs) == len(ANSWERS)  # every bold beginning was read as a question


@pytest.mark.parametrize("question, answer", ANSWERS, ids=[question for question, _ in ANSWERS])
def test_an_answer_names_existing_code_in_at_most_two_files(question, answer):
    assert NAME.search(answer)
    assert missing_names(answer) == []
    assert len(set(re.findall(r"\b\w+\.py\b", answer))) <= 2 + answer.count("worlds/NAME.py")
    # What else stands in backquotes is a flag or a path: every name is checked with its file.
    for other in re.findall(r"`([^`]+)`", NAME.sub("", answer)):
        assert other.startswith("--") or "/" in other


@pytest.mark.parametrize("text, name", [
    ("`rollout.py`: `Trajectory.no_such_method`", "Trajectory.no_such_method"),
    ("`rollout.py`: `record_turn`", "record_turn"),  # a method needs its class
    ("`no_such_file.py`: `rollout`", "rollout"),
])
def test_a_name_that_does_not_exist_is_found(text, name):
    assert [missing for _, missing in missing_names(text)] == [name]
