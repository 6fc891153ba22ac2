"""Shared set-up: on a machine without a GPU, SGLang runs with the CPU stand-in, in child processes too."""

import logging

import torch

from s3r_sglang import cpu

if not torch.cuda.is_available():
    cpu.prepare()

# `sgl.Engine` shuts down once more at exit and logs it, to a stream that pytest has closed by then.
logging.raiseExceptions = False
