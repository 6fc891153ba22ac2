"""Numbers of the paper (arXiv 2610.13202) that `s3r bench` is compared with, and model shapes to run them.

The paper measured on two H100 80 GB with tensor parallelism of two (Table 4); its verification ran eagerly.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRAFT_LENGTH = 6


@dataclass(frozen=True)
class PaperStages:
    """A row of Tables 6 and 7 (Qwen3-8B): stage costs in ms and what they imply."""

    batch_size: int
    context: int
    ar_attention_ms: float
    s3r_attention_ms: float
    seven_ar_steps_ms: float
    six_draft_steps_ms: float
    verify_ms: float

    @property
    def break_even_tau(self) -> float:
        """(k T_q + T_V) / T_p: tokens per round above which S3R wins, stages run one after another."""
        return (self.six_draft_steps_ms + self.verify_ms) / (self.seven_ar_steps_ms / 7)

    @property
    def break_even_acceptance(self) -> float:
        """The mean acceptance of a draft position that this takes."""
        return (self.break_even_tau - 1) / DRAFT_LENGTH


_K = 1024
TABLES_6_AND_7 = (
    PaperStages(16, 4 * _K, 2.31, 1.42, 54.42, 40.06, 28.06),
    PaperStages(16, 8 * _K, 3.83, 1.89, 65.55, 39.15, 27.97),
    PaperStages(16, 16 * _K, 6.82, 2.79, 88.51, 42.38, 28.10),
    PaperStages(32, 4 * _K, 3.80, 1.96, 66.70, 40.89, 29.03),
    PaperStages(32, 8 * _K, 6.83, 2.85, 88.12, 43.01, 26.86),
    PaperStages(32, 16 * _K, 12.91, 4.68, 133.18, 43.73, 28.56),
    PaperStages(64, 4 * _K, 6.91, 2.90, 87.22, 42.05, 27.96),
    PaperStages(64, 8 * _K, 13.02, 4.79, 129.85, 42.51, 26.68),
)

# Section F.2.3: median speed-up over autoregressive decoding at s = 0.05, by (B, S) of the start.
SPEEDUPS = {"qwen3-8b": {(64, 8 * _K): 1.370}, "qwen3-1.7b": {(64, 8 * _K): 1.533}}

# Table 2 and section 6.5, Qwen3-1.7B, by the keys of `s3r bench-kv`. The text gives these relations and nothing
# more: ratios of throughputs, and pages moved per 1,000 tokens (the size of a page is not given).
KV_RELATIONS = {
    "offload / recompute": ("offload", "recompute"),
    "aimd / offload": ("aimd", "offload"),
    "aimd / ar": ("aimd", "ar"),
}
KV_FINDINGS = {
    "offload / recompute": 1.020,
    "aimd / offload": 1.058,
    "aimd / ar": 1.595,
    "pages of offload / pages of aimd": 18.0 / 1.3,
}
KV_PAGES_PER_1000_TOKENS = {"offload": 18.0, "aimd": 1.3}
# What follows for the rows: gain over autoregressive decoding.
KV_GAINS = {
    "ar": 1.0,
    "recompute": 1.595 / 1.058 / 1.020,
    "offload": 1.595 / 1.058,
    "aimd": 1.595,
}


def stages_of(model: str | None, batch_size: int, context: int) -> PaperStages | None:
    """The paper's row for a setting, or None where it has none."""
    if model != "qwen3-8b":
        return None
    return next((r for r in TABLES_6_AND_7 if (r.batch_size, r.context) == (batch_size, context)), None)


def profile(first: float, last: float, mean: float, k: int = DRAFT_LENGTH) -> tuple[float, ...]:
    """Acceptance by draft position with given ends and mean.

    The paper gives the ends (section E.2) and the mean (section F.2.3) alone. Between them the steps
    a_i - a_{i+1} form a geometric sequence, whose one ratio the mean determines: below one, acceptance falls
    fast at first; above one, at the end.

    Args:
        first, last: P(draft 1 is accepted) and P(draft k is accepted), unconditional.
        mean: over the k positions; τ = 1 + k * mean.
        k: draft length, at least 3.

    Raises:
        ValueError: no such sequence has this mean.
    """
    if not last < mean < first:
        raise ValueError(f"the mean {mean} is not between {last} and {first}")
    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        if sum(_geometric_steps(first, last, middle, k)) / k < mean:
            low = middle
        else:
            high = middle
    found = _geometric_steps(first, last, low, k)
    if abs(sum(found) / k - mean) > 1e-9:
        raise ValueError(f"no profile from {first} to {last} has the mean {mean} over {k} positions")
    return tuple(found)


def _geometric_steps(first: float, last: float, ratio: float, k: int) -> list[float]:
    steps = [ratio**i for i in range(k - 1)]
    return [first - (first - last) * sum(steps[:i]) / sum(steps) for i in range(k)]


# Ends at step 20 of training, means (τ = 5.82 and 5.77) at s = 0.05 and 64 x 8K.
PROFILES = {"paper-8b": profile(0.958, 0.679, 0.804), "paper-1.7b": profile(0.950, 0.629, 0.795)}

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
# config.json of the paper's models: enough to time them with `--load-format dummy`.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
_DEFINING = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; raises FileNotFoundError."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
    return json.loads((folder / "config.json").read_text())


def write_model(name: str, folder: Path) -> None:
    """Make a model folder of the shape `name`, without weights or tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1))


def name_of(config: dict[str, Any]) -> str | None:
    """Which of the paper's models has the shape of this config.json, if any."""
    for name, shape in SHAPES.items():
        if all(config.get(key) == shape[key] for key in _DEFINING):
            return name
    return None
