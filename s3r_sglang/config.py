"""One frozen configuration, and the rules by which it is put together.

Sources, later wins: defaults, a YAML file (`--s3r-config`, or the environment variable `S3R_CONFIG`), flags
(`--s3r-budget-ratio 0.1`, or `sgl.Engine(s3r_budget_ratio=0.1)`). SGLang's own `--speculative-num-steps` is
the flag of `draft_length`.

Every field but `draft_length` is also a field `s3r_<name>` of SGLang's `ServerArgs` (patches/server_args.py).
Resolution writes the effective values back to these fields, so that they travel to the scheduler processes,
into copies and to `/server_info` the way all of SGLang's own do, and no process reads the file again.
"""

import copy
import math
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from s3r_sglang.faults import unknown
from s3r_sglang.scheduler.aimd import AimdConfig

ALGORITHM = "SELF_SPARSE"
CONFIG_ENV = "S3R_CONFIG"
FIELD_PREFIX = "s3r_"
# 0.05 * 60 is 3.0000000000000004 in float64: without slack such a product would gain a position.
CEIL_SLACK = 1e-9
CONFIG_FIELD = f"{FIELD_PREFIX}config"


class ConfigError(ValueError):
    """The configuration is unusable; the message is one sentence that says what to change."""


def _aimd(name: str) -> Any:
    """Default, bounds and description of a constant of the concurrency rule."""
    return copy.copy(AimdConfig.model_fields[name])


class S3RConfig(BaseModel):
    """Parameters of self-sparse speculative decoding (arXiv 2610.13202); none but `mode` changes what is sampled.

    A request with c committed positions gets the draft budget min(c, max(min_budget, ceil(budget_ratio * c)))
    per layer and KV head, of which the `recent_window` newest positions are always part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_length: int = Field(6, ge=1, le=32, description="Tokens drafted per round (k).")
    budget_ratio: float = Field(
        0.05, gt=0, le=1, description="Share of the context that a draft step reads (s)."
    )
    min_budget: int = Field(
        192, ge=1, lt=2**31, description="Positions that a draft step reads at least (K_min)."
    )
    recent_window: int = Field(64, ge=1, description="Newest positions always in the draft's index (R).")
    # The scoring kernel is unrolled over blocks of queries: thousands would compile for minutes.
    prompt_queries: int = Field(
        32, ge=1, le=256, description="Last prompt queries that select the first index."
    )
    exact_scores: bool = Field(
        False,
        description="Verify with SGLang's attention and score the index by the exact rule afterwards; otherwise "
        "our verify kernel scores it on its way (GPU).",
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed of requests without one; unset: SGLang's --random-seed."
    )
    kv_policy: Literal["recompute", "offload", "aimd"] = Field(
        "aimd",
        description="When KV memory runs out: recompute (SGLang's retraction), offload (pause requests, their KV "
        "in host memory) or aimd (offload, and adapt how many requests are active).",
    )
    kv_limit: int | None = Field(
        None,
        ge=1,
        description="Active requests at most with kv_policy offload; unset: --max-running-requests.",
    )
    kv_host_gb: float | None = Field(
        None,
        ge=0,
        le=2**20,
        description="Host memory for the KV of paused requests, in GB per process; unset: as much as the KV pool "
        "holds, but at most 32 and at most a quarter of what is free.",
    )
    # A restored request is the smallest again, and paused again once the headroom is used up. Simulated at paper
    # scale (responses of up to 4K and 16K tokens, demand for 1.25 and 1.5 pools), 3% moved a fifth to a third of
    # the pages that 0 did; 5% cost up to 3% of the throughput.
    kv_headroom: float = Field(
        0.03,
        ge=0,
        lt=1,
        description="Share of the KV pool that must be free for active requests to grow into, before one more is "
        "admitted or restored; 0: a round of each must fit.",
    )
    aimd_minimum: int | None = Field(
        None, ge=1, description="Lowest concurrency limit (C_min); unset: 5/8 of the highest."
    )
    aimd_maximum: int | None = Field(
        None, ge=1, description="Highest concurrency limit (C_max); unset: --max-running-requests."
    )
    aimd_increase: int = _aimd("increase")
    aimd_decrease: float = _aimd("decrease")
    aimd_low_utilization: float = _aimd("low_utilization")
    aimd_high_utilization: float = _aimd("high_utilization")
    aimd_backlog_threshold: int = _aimd("backlog_threshold")
    mode: Literal["exact", "direct"] = Field(
        "exact",
        description="exact: responses have the dense policy's law. direct, for ablations only: they are sampled "
        "from the sparse policy, without verification, and marked as unfaithful.",
    )

    @model_validator(mode="after")
    def _window_fits_budget(self) -> "S3RConfig":
        if self.recent_window > self.min_budget:
            raise ValueError(
                f"recent_window {self.recent_window} does not fit into min_budget {self.min_budget}: "
                "lower --s3r-recent-window or raise --s3r-min-budget"
            )
        return self

    @model_validator(mode="after")
    def _limits_are_used_and_ordered(self) -> "S3RConfig":
        if self.kv_limit is not None and self.kv_policy != "offload":
            raise ValueError(f"kv_limit is for kv_policy offload, not {self.kv_policy}: drop --s3r-kv-limit")
        if self.aimd_minimum and self.aimd_maximum and self.aimd_minimum > self.aimd_maximum:
            raise ValueError(
                f"aimd_minimum {self.aimd_minimum} exceeds aimd_maximum {self.aimd_maximum}: "
                "lower --s3r-aimd-minimum or raise --s3r-aimd-maximum"
            )
        if self.aimd_low_utilization > self.aimd_high_utilization:
            raise ValueError(
                f"aimd_low_utilization {self.aimd_low_utilization} exceeds aimd_high_utilization "
                f"{self.aimd_high_utilization}: lower --s3r-aimd-low-utilization"
            )
        return self

    def aimd(self, slots: int) -> AimdConfig:
        """The concurrency rule of an engine that runs at most `slots` requests at once.

        Raises:
            ConfigError: a configured bound is above the slots.
        """
        for name in ("aimd_minimum", "aimd_maximum"):
            bound = getattr(self, name)
            if bound is not None and bound > slots:
                raise ConfigError(
                    f"{flag_of(name)} {bound} exceeds the {slots} requests that the engine runs at once: lower it "
                    "or raise --max-running-requests."
                )
        constants = {name: getattr(self, f"aimd_{name}") for name in AimdConfig.model_fields}
        return AimdConfig.for_slots(slots, **constants)

    @property
    def faithful(self) -> bool:
        """Whether responses have the dense policy's law."""
        return self.mode == "exact"

    def budget(self, context: int) -> int:
        """Positions one draft step attends to per layer and KV head, given `context` committed positions."""
        return min(context, max(self.min_budget, math.ceil(self.budget_ratio * context - CEIL_SLACK)))


def flag_fields() -> dict[str, str]:
    """`S3RConfig` field -> its `ServerArgs` field, for all that have a `--s3r-*` flag."""
    return {name: FIELD_PREFIX + name for name in S3RConfig.model_fields if name != "draft_length"}


def server_args_fields() -> list[str]:
    """All `ServerArgs` fields of the plugin: the flags and the path of the YAML file."""
    return [CONFIG_FIELD, *flag_fields().values()]


def flag_of(name: str) -> str:
    """The command-line flag that sets the `S3RConfig` field `name`."""
    if name == "draft_length":
        return "--speculative-num-steps"
    return "--" + flag_fields()[name].replace("_", "-")


def build(values: dict[str, Any], places: Mapping[str, str] | None = None) -> S3RConfig:
    """Validate `values`; raises ConfigError with one sentence for the first fault.

    Args:
        places: where settings that did not come from their flags are to be changed: name -> "name in file".
    """
    try:
        return S3RConfig(**values)
    except ValidationError as error:
        text = _sentence(error.errors()[0])
        for name, place in (places or {}).items():
            text = re.sub(rf"{flag_of(name)}\b", place.replace("\\", r"\\"), text)
        raise ConfigError(text) from None


def _sentence(fault: ErrorDetails) -> str:
    if not fault["loc"]:
        return fault["msg"].removeprefix("Value error, ") + "."
    name = str(fault["loc"][0])
    if fault["type"] == "extra_forbidden":
        return unknown("S3R setting", name, S3RConfig.model_fields)
    rule = fault["msg"].replace("Input should be", "must be")
    return f"S3R setting {name} {rule}, not {fault['input']!r}; change {flag_of(name)}."


def config_path(source: str) -> Path:
    """Path of a YAML file named by path, or by the stem of one that the package ships (`qwen3-8b`)."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = Path(str(resources.files("s3r_sglang.configs")))
    if (shipped / f"{source}.yaml").is_file():
        return shipped / f"{source}.yaml"
    names = sorted(file.stem for file in shipped.glob("*.yaml"))
    raise ConfigError(f"S3R config '{source}' is neither a file nor one of {', '.join(names)}.")


def load_yaml(source: str) -> dict[str, Any]:
    """Settings of a YAML file; raises ConfigError if it is not a flat mapping of known settings."""
    path = config_path(source)
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping such as 'budget_ratio: 0.05'.")
    for name in values:
        if name not in S3RConfig.model_fields:
            raise ConfigError(f"{path}: {unknown('setting', str(name), S3RConfig.model_fields)}")
    return values


def resolve(arguments: Mapping[str, Any]) -> S3RConfig:
    """Merge all sources, given keyword arguments of `ServerArgs` (absent or None: not set by the user)."""
    source = arguments.get(CONFIG_FIELD) or os.environ.get(CONFIG_ENV)
    values, path = (load_yaml(source), config_path(source)) if source else ({}, None)
    flags = {name: arguments.get(field) for name, field in flag_fields().items()}
    flags["draft_length"] = arguments.get("speculative_num_steps")
    given = {name: value for name, value in flags.items() if value is not None}
    places = {name: f"{name} in {path}" for name in values if name not in given}
    return build(values | given, places)


def is_self_sparse(algorithm: str | None) -> bool:
    """Whether `--speculative-algorithm` names ours, in either spelling and any case."""
    return (algorithm or "").upper().replace("-", "_") == ALGORITHM


def serves_rollouts(server_args: Any) -> bool:
    """Whether a server has the rollout service: those of S3R, and others started with S3R_ROLLOUT_SERVICE=1.

    The latter are the controls of an experiment: the same service without speculation.
    """
    return is_self_sparse(server_args.speculative_algorithm) or os.environ.get("S3R_ROLLOUT_SERVICE") == "1"


def config_of(server_args: Any) -> S3RConfig:
    """Effective configuration of resolved server arguments, in any process.

    Raises ConfigError if they do not select self-sparse decoding.
    """
    if not is_self_sparse(server_args.speculative_algorithm):
        raise ConfigError("No S3R configuration without --speculative-algorithm self-sparse.")
    values = {name: getattr(server_args, field) for name, field in flag_fields().items()}
    return build(values | {"draft_length": server_args.speculative_num_steps})
