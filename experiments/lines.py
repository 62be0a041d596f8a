"""Lines of code by one rule: python experiments/lines.py FOLDER|FILE ...

Counts the lines that hold code, in the Python files of each folder: no blank lines, no comments, no
docstrings. Tests (folders `tests` and `test`, files `test_*`) and virtual environments are left
out. docs/comparison.md has the figures of other systems, each in a clone of its repository.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
         tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines without blank lines, comments and docstrings."""
    docstrings = [node.body[0] for node in ast.walk(ast.parse(source))
                  if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None]
    written = {line for token in tokenize.generate_tokens(io.StringIO(source).readline)
               if token.type not in EMPTY for line in range(token.start[0], token.end[0] + 1)}
    return len(written.difference(*(range(d.lineno, d.end_lineno + 1) for d in docstrings)))


def files_of(place: Path) -> list[Path]:
    """The Python files that are counted."""
    found = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [file for file in found if not any(
        part in ("tests", "test", "venv", ".venv", "runs") or part.startswith("test_")
        for part in file.relative_to(place.parent).parts)]


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        files = files_of(Path(name).resolve())
        code = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
        print(f"{code:8,} lines of code in {len(files):4} files: {name}")
