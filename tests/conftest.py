"""Shared set-up: on a machine without a GPU, SGLang runs with the CPU stand-in, in child processes too."""

import torch

from s3r_sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()
