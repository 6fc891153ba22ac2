"""What OpenRLHF imports of vLLM at module level, for an environment without vLLM.

SamplingParams is used for real: OpenRLHF fills it, and `s3r_sglang.rl_integration.openrlhf.sampling` reads it.
"""

from dataclasses import dataclass, field

# Only compared with minimum versions, on paths that NCCL weight synchronisation takes too.
__version__ = "0.29.0"


@dataclass
class SamplingParams:
    """The fields of vLLM's that OpenRLHF 0.11.2 or an agent sets, with vLLM's defaults; others are refused."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
