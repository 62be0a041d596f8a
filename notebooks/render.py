"""Write notebooks/one_step.ipynb: the cells of notebooks/one_step.py with what they print and draw.

    python notebooks/render.py

Jupyter is not needed. The value of a cell's last line is not shown, and stderr is left out. On one
machine, with one number of threads, the same code gives the same bytes.
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def split(text):
    """The cells of a script in the percent format -> [(kind, source)]; kind: markdown or code."""
    cells = []
    for part in ("\n" + text).split("\n# %%")[1:]:
        head, source = part.split("\n", 1)
        source = source.strip("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in source.split("\n")]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", source))
    return cells


def run(source, names):
    """Run a cell with the names of the cells before it -> its outputs, in Jupyter's format."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "notebooks/one_step.py", "exec"), names)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for number in plt.get_fignums():
        image = io.BytesIO()
        # Without matplotlib's version, which is the default for Software, in the file.
        plt.figure(number).savefig(image, dpi=90, metadata={"Software": None})
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def notebook(text):
    """Run a script in the percent format -> the notebook, as nbformat 4.5 describes it."""
    names = {"__name__": "__main__"}
    cells = []
    runs = 0
    for number, (kind, source) in enumerate(split(text)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {},
                "source": source.splitlines(keepends=True)}
        if kind == "code":
            runs += 1
            cell |= {"execution_count": runs, "outputs": run(source, names)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main():
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    made = notebook((ROOT / "notebooks/one_step.py").read_text())
    path = ROOT / "notebooks/one_step.ipynb"
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
