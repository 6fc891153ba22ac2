"""How much faster than a measured rollout another schedule could have been, from what its own rounds cost.

Every schedule reads the same KV and does the same work per request. It chooses how many requests share a round,
hence how often the fixed cost of a round is paid, and how many forwards prefill and how many pauses there are.
"""

import itertools
from collections.abc import Sequence

from s3r_sglang.bench.kv.records import KvJob, KvRun, KvSample
from s3r_sglang.bench.records import Record

# Samples that are taken together: a round is counted when it is launched, up to two rounds before it ends.
SAMPLES_PER_WINDOW = 5
# Fewer than this per unknown would fit noise.
WINDOWS = 20


class Costs(Record):
    """Seconds that a rollout spent per event, by least squares over its samples.

    Fields:
        round: each round, however many requests share it.
        request, page: each request that decodes in a round, each page of KV held in it.
        pause, prefill: each request paused, each forward that prefills.
    """

    round: float
    request: float
    page: float
    pause: float
    prefill: float


class Bound(Record):
    """What a rollout leaves to other schedules that start its requests in the same order.

    An upper estimate: pauses and prefills count as free, and rounds as full whenever a request waits. In what
    order requests start and are paused is taken as given; it decides how long the tail is, which only a scheduler
    that knew the lengths could shorten.

    Fields:
        costs: see `Costs`.
        pool: mean share of the KV pool in use per round, while requests waited and slots were free; None if that
            never was so.
        slack: seconds of rounds that full slots or a full pool would have saved while requests waited.
        pauses, prefills: seconds that these cost.
        gain: throughput without all three, over that measured.
    """

    costs: Costs
    pool: float | None
    slack: float
    pauses: float
    prefills: float
    gain: float


def bound(run: KvRun, job: KvJob) -> Bound | None:
    """Estimate what schedules other than that of `run` could gain.

    Returns:
        None if the samples are too few, or count no rounds (autoregressive decoding, reports of earlier versions).
    """
    windows = list(itertools.pairwise(run.samples[::SAMPLES_PER_WINDOW]))
    if len(windows) < WINDOWS or not run.samples[-1].rounds:
        return None
    costs = _fit(windows, job.pool_tokens)
    pressed = [window for window in windows if all(one.waiting + one.paused for one in window)]
    # While all slots are taken, memory is not what limits.
    limited = [window for window in pressed if _mean(window, "active") < 0.97 * job.slots]
    rounds = sum(_count(window, "rounds") for window in limited)
    held = sum(_count(window, "rounds") * _mean(window, "utilization") for window in limited)
    slack = costs.round * sum(_count(window, "rounds") * (1 - _fill(window, job.slots)) for window in pressed)
    pauses, prefills = (
        cost * sum(_count(window, name) for window in windows)
        for cost, name in ((costs.pause, "pauses"), (costs.prefill, "prefills"))
    )
    return Bound(
        costs=costs,
        pool=held / rounds if rounds else None,
        slack=slack,
        pauses=pauses,
        prefills=prefills,
        gain=run.seconds / (run.seconds - slack - pauses - prefills),
    )


Window = tuple[KvSample, KvSample]


def _fit(windows: Sequence[Window], pool_tokens: int) -> Costs:
    import numpy as np
    from scipy.optimize import nnls

    rounds = np.array([_count(window, "rounds") for window in windows], dtype=float)
    events = {
        "round": rounds,
        "request": rounds * [_mean(window, "active") for window in windows],
        "page": rounds * pool_tokens * [_mean(window, "utilization") for window in windows],
        "pause": np.array([_count(window, "pauses") for window in windows], dtype=float),
        "prefill": np.array([_count(window, "prefills") for window in windows], dtype=float),
    }
    seconds = np.array([_count(window, "seconds") for window in windows])
    # Scaled alike, for the numbers of events differ by six orders.
    scales = {name: max(1.0, column.max()) for name, column in events.items()}
    costs, _ = nnls(np.stack([events[name] / scales[name] for name in events], axis=1), seconds)
    return Costs(**{name: cost / scales[name] for name, cost in zip(events, costs, strict=True)})


def _fill(window: Window, slots: int) -> float:
    """How full the pool or the slots were, whichever was fuller."""
    return min(1.0, max(_mean(window, "utilization"), _mean(window, "active") / slots))


def _count(window: Window, name: str) -> float:
    return getattr(window[1], name) - getattr(window[0], name)


def _mean(window: Window, name: str) -> float:
    return (getattr(window[0], name) + getattr(window[1], name)) / 2
