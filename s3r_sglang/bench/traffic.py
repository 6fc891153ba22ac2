"""Bytes that a decode step must read from device memory: weights and KV, from the model's shape."""

from dataclasses import dataclass
from pathlib import Path

import torch

from s3r_sglang.bench import paper
from s3r_sglang.config import S3RConfig


@dataclass(frozen=True)
class ModelShape:
    """What the traffic of a dense decoder-only model follows from.

    Attributes:
        name: of the paper's models if it has that shape, else of the folder.
        num_layers, num_kv_heads, head_dim, vocab_size: as in config.json.
        dtype_bytes: of weights and KV.
        weight_bytes: read by each step; without the input embedding, of which a step reads a few rows,
            unless the LM head is the same tensor.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype_bytes: int
    weight_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one position in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def read(cls, folder: Path, dtype: str | None = None) -> "ModelShape":
        """Read a Hugging Face folder's config.json; `dtype` overrides the one it names.

        Raises:
            FileNotFoundError: there is no config.json.
        """
        name = paper.name_of(paper.read_config(folder)) or folder.name
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        numbers = sum(weight.numel() for weight in model.parameters())
        if not config.tie_word_embeddings:
            numbers -= model.get_input_embeddings().weight.numel()
        dtype_bytes = (getattr(torch, dtype) if dtype else config.dtype or torch.bfloat16).itemsize
        heads = config.num_attention_heads
        return cls(
            name=name,
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            dtype_bytes=dtype_bytes,
            weight_bytes=numbers * dtype_bytes,
        )


@dataclass(frozen=True)
class StepBytes:
    """Bytes read by one step of a batch; activations, and what the index refresh writes, are left out."""

    weights: int
    kv: int


def dense_step(shape: ModelShape, batch_size: int, context: float) -> StepBytes:
    """An autoregressive step, or a verify step: KV is read once for all its queries."""
    return StepBytes(shape.weight_bytes, round(batch_size * context * shape.kv_bytes_per_token))


def draft_step(shape: ModelShape, config: S3RConfig, batch_size: int, context: float) -> StepBytes:
    """A draft step in the middle of a round: the budget, and the positions written since it was chosen."""
    positions = min(context, config.budget(round(context)) + config.draft_length / 2)
    return StepBytes(shape.weight_bytes, round(batch_size * positions * shape.kv_bytes_per_token))
