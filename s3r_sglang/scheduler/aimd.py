"""Additive increase, multiplicative decrease of the number of requests that may decode at a time.

Long responses outgrow the KV pool. A fixed concurrency limit is either so low that slots idle while responses are
short, or so high that requests push each other out once they are long. This one follows the pressure (paper
section B.2, Eq. 18, arXiv 2610.13202). Pure arithmetic: what to admit, pause and restore under it is decided
elsewhere.
"""

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# 0.29 * 100 is 28.999999999999996 in float64: without slack such a product would lose a request.
FLOOR_SLACK = 1e-9
# C_min of C_max in the paper: 160 of 256.
MINIMUM_SHARE = 0.625


class AimdConfig(BaseModel):
    """Constants of the update rule; the defaults are the paper's (section C.2), for 256 slots per replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum: int = Field(160, ge=1, description="Lowest concurrency limit (C_min).")
    maximum: int = Field(256, ge=1, description="Highest concurrency limit (C_max), also the first one.")
    increase: int = Field(5, ge=1, description="Requests added per update under low utilisation (δ).")
    decrease: float = Field(0.7, gt=0, lt=1, description="Factor on the limit per update under pressure (β).")
    low_utilization: float = Field(
        0.8, gt=0, le=1, description="Share of the KV pool in use below which the limit rises (u_low)."
    )
    high_utilization: float = Field(
        0.95, gt=0, le=1, description="Share of the KV pool in use above which the limit falls (u_high)."
    )
    backlog_threshold: int = Field(
        3, ge=0, description="Paused requests above which the limit falls (O_th), unless utilisation is low."
    )

    @model_validator(mode="after")
    def _is_ordered(self) -> "AimdConfig":
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} exceeds maximum {self.maximum}")
        if self.low_utilization > self.high_utilization:
            raise ValueError(
                f"low_utilization {self.low_utilization} exceeds high_utilization {self.high_utilization}"
            )
        return self

    @classmethod
    def for_slots(
        cls, slots: int, minimum: int | None = None, maximum: int | None = None, **constants: Any
    ) -> "AimdConfig":
        """The rule of an engine that runs at most `slots` requests at once.

        Bounds that are not given follow the slots in the paper's proportion: 160 … 256 for 256. A higher maximum
        could not be reached, a fixed lower one would leave slots idle though memory is free.

        Raises:
            ValueError: the maximum exceeds the slots, or a constant is out of its range.
        """
        if maximum is not None and maximum > slots:
            raise ValueError(f"maximum {maximum} exceeds the {slots} requests that the engine runs at once")
        maximum = maximum or slots
        minimum = minimum or max(1, math.ceil(MINIMUM_SHARE * maximum))
        return cls(minimum=minimum, maximum=maximum, **constants)


class AimdPolicy:
    """The concurrency limit C of one replica.

    Attributes:
        config: constants of the rule.
        limit: C at present. Starts at the maximum, since the first responses are short; the paper does not say.
    """

    def __init__(self, config: AimdConfig) -> None:
        self.config = config
        self.limit = config.maximum

    def update(self, utilization: float, backlog: int) -> int:
        """Apply Eq. 18 once, before a batch is formed.

        Low utilisation comes first: a backlog of paused requests then waits for the limit, not for memory.

        Args:
            utilization: u, share of the KV pool that requests hold, in [0, 1].
            backlog: O, paused requests whose KV waits for restoration.

        Returns:
            The new limit, in [minimum, maximum].

        Raises:
            ValueError: an argument is out of its range; the limit stays.
        """
        if not 0 <= utilization <= 1 or backlog < 0:
            raise ValueError(f"utilization {utilization} is not in [0, 1], or backlog {backlog} is negative")
        config = self.config
        if utilization < config.low_utilization:
            self.limit = min(config.maximum, self.limit + config.increase)
        elif utilization > config.high_utilization or backlog > config.backlog_threshold:
            reduced = math.floor(config.decrease * self.limit + FLOOR_SLACK)
            self.limit = max(config.minimum, reduced)
        return self.limit
