"""Follow the README as a newcomer would: `python experiments/readme.py [--quick]`.

Clones this repository, makes a virtual environment, and runs every line of every bash block, of
the README and then of docs/*.md, in order. Commands that cannot run here are listed with the
reason. --quick: two training steps and eight items per command; without it the commands run as
printed (half an hour on two cores). Exit code 1 if a command failed.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MEASUREMENT = "a measurement of minutes on a quiet machine: by hand"
NOT_HERE = {  # pattern of a command -> why it is not run
    r"hf download": "a hub",
    r"Qwen/|nproc_per_node|nnodes": "needs GPUs and a model from a hub",
    r"make_tiny": "an hour",
    r"smollm2|runs/(levels_|craft_|qa_|find_|web_|mix_)?(warm|rl)\b": "hours of training",
    r"git clone|servers/|upstream\.py": "downloads AgentGym and its servers",
    r"--env_url": "needs AgentGym servers",
    r"--data MY|MY_DUMP": "needs data of one's own",
    r"-m gpu": "needs a GPU",
    r"libwebarena|webarena.tasks": "needs WebArena's sites",
    r"base_url": "needs a model's server",
    r"envs.py serve": "serves until it is stopped",
    r"benches rollout|benches update|kill.py|faults.py|experiments/gpu": MEASUREMENT,
    r"study.py|speedrun.py verify|references.py --only": "minutes to hours",
}
QUICK = {r"train\.py": " --steps 2", r"eval\.py": " --items 8"}  # pattern -> added flags


def commands(text):
    """The command lines of all bash blocks, without comments. Continued lines are joined."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("#"):
                continue
            command = line.split("  #")[0].strip()
            if command:
                yield command


def pages(repo):
    """The README and the pages of docs/, as one text."""
    paths = (repo / "README.md", *sorted((repo / "docs").glob("*.md")))
    return "\n".join(path.read_text() for path in paths)


def reason(command):
    """Why the command cannot be run here; "" if it can."""
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, command)), "")


def shortened(command):
    """The command as --quick runs it."""
    for pattern, flags in QUICK.items():
        # The flags go to the end of the command, before a pipe or an "&&".
        match = re.compile(rf"{pattern}[^&|]*")
        command = match.sub(lambda m, flags=flags: m[0].rstrip() + flags, command)
    return command.replace("python -m pytest", "python -m pytest tests/test_algos.py")


def main(quick=False):
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        repo = Path(folder) / "repo"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(repo)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(Path(folder) / "venv")], check=True)
        for command in commands(pages(repo)):
            why = reason(command)
            if why:
                print(f"not run   {command}\n          ({why})", flush=True)
                continue
            run = shortened(command) if quick else command
            begin = time.monotonic()
            done = subprocess.run(["bash", "-c", f". ../venv/bin/activate && {run}"], cwd=repo,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True)
            word = "FAILED" if done.returncode else "ok"
            print(f"{word:9} {command}   {time.monotonic() - begin:.0f} s", flush=True)
            if done.returncode:
                failed.append(command)
                end = done.stdout.strip().splitlines()[-15:]
                print("          " + "\n          ".join(end), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--quick"]):
        sys.exit(__doc__)
    sys.exit(main("--quick" in sys.argv))
