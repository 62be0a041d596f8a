"""Follow the README as a newcomer would: python experiments/readme.py [--quick]. Clones this repository, makes a virtual environment, and
runs every line of every bash block, of the README and then of docs/*.md, in order; those that cannot run here are listed with the reason. --quick: two training steps and
eight items, else as it stands (half an hour on two cores). Exit code 1 if a command failed."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_HERE = {  # what a command mentions -> why it is not run
    r"hf download": "a hub",
    r"Qwen/|nproc_per_node|nnodes": "needs GPUs and a model from a hub",
    r"make_tiny": "an hour",
    r"--env_url": "needs AgentGym servers",
    r"--data MY": "needs data of one's own",
    r"libwebarena|webarena.tasks": "needs WebArena's sites",
    r"base_url": "needs a model's server",
    r"envs.py serve": "serves until it is stopped",
    r"bench.py rollout|bench.py update|kill.py|load.py|experiments/gpu": "a measurement of minutes on a quiet machine: by hand",
    r"study.py|test_time.py": "hours",
}
QUICK = {r"train\.py": " --steps 2", r"eval\.py": " --items 8"}


def commands(text):
    """The lines of all bash blocks, those that end with a backslash joined with the next, without comments."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith("#") and (line := line.split("  #")[0].strip()):
                yield line


def pages(repo):
    """The README and what it sends its reader to, as one text."""
    return "\n".join(path.read_text() for path in (repo / "README.md", *sorted((repo / "docs").glob("*.md"))))


def reason(command):
    """Why it cannot be run here; "" if it can."""
    return next((why for mark, why in NOT_HERE.items() if re.search(mark, command)), "")


def main(quick=False):
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        repo = Path(folder) / "repo"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(repo)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(Path(folder) / "venv")], check=True)
        for command in commands(pages(repo)):
            if why := reason(command):
                print(f"not run   {command}\n          ({why})", flush=True)
                continue
            run = command
            if quick:
                for mark, more in QUICK.items():
                    run = re.sub(rf"({mark}[^&|]*)", lambda m, more=more: m[1].rstrip() + more, run)
                run = run.replace("python -m pytest", "python -m pytest tests/test_algos.py")
            begin = time.monotonic()
            done = subprocess.run(["bash", "-c", f". ../venv/bin/activate && {run}"], cwd=repo, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(f"{'ok' if done.returncode == 0 else 'FAILED':9} {command}   {time.monotonic() - begin:.0f} s", flush=True)
            if done.returncode:
                failed.append(command)
                print("          " + "\n          ".join(done.stdout.strip().splitlines()[-15:]), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv) if sys.argv[1:] in ([], ["--quick"]) else __doc__)
