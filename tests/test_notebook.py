"""notebooks/one_step.py runs, and its .ipynb holds its cells and what they print and draw."""

import base64
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPT = (ROOT / "notebooks/one_step.py").read_text()
NOTEBOOK = json.loads((ROOT / "notebooks/one_step.ipynb").read_text())
CELLS = NOTEBOOK["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
MAKE_AGAIN = "python notebooks/render.py makes notebooks/one_step.ipynb again"
NUMBER = re.compile(r"[-+]?\d+\.\d+(?:e[-+]\d+)?")


def as_script(cells):
    """The cells as the text of a script in the percent format."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            lines = [f"# {line}".rstrip() for line in source.split("\n")]
            parts.append("\n".join(["# %% [markdown]", *lines]))
        else:
            parts.append(f"# %%\n{source}")
    return "\n\n".join(parts) + "\n"


def printed(cells):
    """What the cells printed."""
    return "".join("".join(output["text"]) for cell in cells for output in cell["outputs"]
                   if output["output_type"] == "stream")


def pictures(cell):
    """The pictures that a cell drew, as the bytes of PNG files."""
    return [base64.b64decode(output["data"]["image/png"]) for output in cell["outputs"]
            if output["output_type"] == "display_data"]


def words_and_numbers(text):
    """-> (the text without its decimal fractions, the fractions)."""
    return NUMBER.sub("NUMBER", text), [float(number) for number in NUMBER.findall(text)]


def test_the_rendered_notebook_has_the_cells_of_the_script():
    assert as_script(CELLS) == SCRIPT, MAKE_AGAIN


def test_the_script_prints_what_the_rendered_notebook_shows():
    """The same words; numbers to 0.01, which other processors and threads may need."""
    env = {"PATH": "/usr/bin:/bin", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1",
           "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "notebooks/one_step.py"], cwd=ROOT, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout
    assert "better than their group +" in done.stdout
    words, numbers = words_and_numbers(done.stdout)
    shown_words, shown_numbers = words_and_numbers(printed(CODE))
    assert words == shown_words, MAKE_AGAIN
    assert numbers == pytest.approx(shown_numbers, abs=0.01), MAKE_AGAIN


def test_the_rendered_notebook_ran_in_order_without_an_error_and_its_pictures_are_small():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    kinds = {output["output_type"] for cell in CODE for output in cell["outputs"]}
    assert kinds == {"stream", "display_data"}  # an error would be a third kind
    for cell in CODE:
        assert len(pictures(cell)) == "".join(cell["source"]).count("plt.show()")
    files = [picture for cell in CODE for picture in pictures(cell)]
    assert len(files) == 2 and all(file.startswith(b"\x89PNG") for file in files)
    assert sum(map(len, files)) < 150_000


def test_the_rendered_notebook_is_one_that_jupyter_opens():
    """What nbformat 4.5 requires of every cell; nothing in it tells where or when it was made."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    ids = {cell["id"] for cell in CELLS}
    assert len(ids) == len(CELLS) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in ids)
    assert not any(cell["metadata"] for cell in CELLS)
