"""Faults that the tests must notice: `python experiments/mutants.py [--files FILE ...]`.

mutmut (`pip install -e .[mutants]`) makes each fault by changing one expression of one function,
in a temporary clone of the last commit and never in the checkout, and runs the tests that call this
function, within a time limit. A fault survives if they pass: then a test is missing, unless the
fault changes nothing that matters. Decorated functions and code outside functions are left out.

The faults are one of each function, and others drawn by the seed. The survivors are printed as
changes of the code; the last line is "N faults, M survive". Exit code 1: a fault survives. Faults
in default values are not counted: mutmut calls every fault with the original's defaults.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {  # the files of tests/ that may notice a fault of the file
    "algos.py": ["algos", "update"],
    "update.py": ["update", "shaping"],
    "rollout.py": ["rollout", "segments"],
    "trajectory.py": ["rollout", "segments"],
    "schedule.py": ["schedule"],
    "checkpoint.py": ["checkpoint"],
}
# It starts a program, in whose process mutmut's changed modules cannot be imported.
PROGRAM = "tests/test_segments.py::test_a_program_in_a_process_of_its_own_is_played_unchanged"
CONFIG = f"""[mutmut]
timeout_multiplier = 2
timeout_constant = 10
process_isolation = forkserver
pytest_add_cli_args = -n0\n -p\n no:cacheprovider\n --disable-warnings\n --deselect\n {PROGRAM}
"""
IN_DEFAULTS = re.compile(r"^-(def |\s+\w+: [\w\[\], |]+ = .*[,)])", re.MULTILINE)


def make_copy(folder: Path, files: list[str]) -> None:
    """Clone the last commit, and configure mutmut."""
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    tests = sorted({f"tests/test_{name}.py" for file in files for name in TESTS[file]})
    lists = {"source_paths": files, "pytest_add_cli_args_test_selection": tests,
             "also_copy": sorted({path.name for path in folder.iterdir()} - {*files, ".git"})}
    (folder / "setup.cfg").write_text(CONFIG + "".join(
        "\n ".join([f"{key} =", *values]) + "\n" for key, values in lists.items()))


def mutmut(folder: Path, *arguments: str, output: int | None = subprocess.PIPE) -> str:
    """Run a command of mutmut -> what it printed. If it is interrupted, it leaves no process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mutmut", *arguments], cwd=folder, stdout=output, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        printed, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        sys.exit(f"mutants.py: mutmut {arguments[0]} ended with {process.returncode}: {printed}")
    return printed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=list(TESTS), choices=TESTS, metavar="FILE",
                        help=f"of {', '.join(TESTS)}; default: all")
    parser.add_argument("--number", type=int, default=100, help="of faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (%(default)s)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        make_copy(folder, flags.files)
        run = ["run", "--max-children", str(flags.jobs)]
        mutmut(folder, *run, "*__mutmut_1", output=None)  # the first of each function

        results = re.compile(r"(\S+): (.+)")
        first = dict(results.findall(mutmut(folder, "results", "--all", "true")))
        others = sorted(name for name, result in first.items() if result == "not checked")
        drawn = random.Random(flags.seed).sample(
            others, min(len(others), max(0, flags.number - len(first) + len(others))))
        if drawn:
            mutmut(folder, *run, *drawn, output=None)
        found = dict(results.findall(mutmut(folder, "results", "--all", "true")))
        tested = {name: result for name, result in found.items() if result != "not checked"}
        survivors = {name: mutmut(folder, "show", name) for name, result in tested.items()
                     if result in ("survived", "no tests")}
        defaults = {name for name, change in survivors.items() if IN_DEFAULTS.search(change)}
        for name in survivors.keys() - defaults:
            print(f"\n{name}: {tested[name]}\n{survivors[name]}")
    survive = len(survivors) - len(defaults)
    print(f"{len(tested) - len(defaults)} faults, {survive} survive")
    return 1 if survive else 0


if __name__ == "__main__":
    sys.exit(main())
