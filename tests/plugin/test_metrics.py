"""Acceptance arithmetic, and the export through SGLang's multi-process registry."""

import os
import subprocess
import sys

import pytest

from s3r_sglang.config import S3RConfig
from s3r_sglang.metrics import RoundMetrics, acceptance_by_position, request_metrics


def test_acceptance_by_position_is_the_survival_of_the_histogram():
    assert acceptance_by_position([1, 0, 3], 3) == [0.75, 0.75, 0.0]
    assert acceptance_by_position([], 2) == [0.0, 0.0]


def test_request_metrics():
    metrics = request_metrics(S3RConfig(draft_length=2), [1, 1, 2], context=8000)
    assert metrics == {
        "s3r_faithful": True,
        "s3r_rounds": 4,
        "s3r_accept_length": 1 + 5 / 4,
        "s3r_acceptance_by_position": [0.75, 0.5],
        "s3r_budget": 400,
    }


def test_a_response_without_rounds_has_no_acceptance():
    metrics = request_metrics(S3RConfig(), [], context=8)
    assert metrics == {"s3r_faithful": True, "s3r_rounds": 0, "s3r_budget": 8}


def test_mode_direct_reports_rounds_and_no_acceptance(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    direct = S3RConfig(mode="direct", draft_length=3)
    assert request_metrics(direct, [0, 0, 5], context=8000) == {
        "s3r_faithful": False,
        "s3r_rounds": 5,
        "s3r_budget": 400,
    }
    totals = RoundMetrics(direct)
    totals.record([2, 2])
    assert totals.summary() == {"rounds": 2, "draft_tokens": 6}


def test_round_metrics_add_up_over_rounds(monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    metrics = RoundMetrics(S3RConfig(draft_length=3))
    assert metrics.accept_length == 0.0
    metrics.record([3, 0])
    metrics.record([1])
    assert metrics.tokens == 4 + 1 + 2
    assert metrics.summary() == {
        "rounds": 3,
        "draft_tokens": 9,
        "accept_length": pytest.approx(1 + 4 / 3),
        "accept_rate": pytest.approx(4 / 9),
        "acceptance_by_position": pytest.approx([2 / 3, 1 / 3, 1 / 3]),
    }


WRITER = """
from s3r_sglang.config import S3RConfig
from s3r_sglang.metrics import RoundMetrics
RoundMetrics(S3RConfig(draft_length=2), enabled=False).record([2])
metrics = RoundMetrics(S3RConfig(draft_length=2))
metrics.record([2, 1])
metrics.record([0])
"""


KV_WRITER = """
from s3r_sglang.metrics import KVMetrics
metrics = KVMetrics(1)
names = ["limit", "active", "paused", "waiting", "utilization", "host_pages_used", "host_pages_peak"]
names += ["pauses", "repauses", "pages_out", "pages_in", "recomputed", "restores", "restore_seconds", "tokens"]
for shown in (3, 5):
    metrics.show({name: shown + i for i, name in enumerate(names)})
"""


def exported(writer, folder):
    """What an HTTP process reads after a scheduler process has run `writer`."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", writer], env=environ, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values.items()}


def test_kv_metrics_are_states_and_totals(tmp_path):
    """Shown twice, 2 higher the second time: gauges and counters both have the second value."""
    gauges = ["limit", "active", "paused", "waiting", "utilization", "host_pages_used", "host_pages_peak"]
    counters = ["pauses", "repauses", "pages_out", "pages_in", "recomputed"]
    counters += ["restores", "restore_seconds", "tokens"]
    values = exported(KV_WRITER, tmp_path)
    assert values == {
        **{f's3r_kv_{name}{{replica="1"}}': 5.0 + i for i, name in enumerate(gauges)},
        **{f's3r_kv_{name}_total{{replica="1"}}': 12.0 + i for i, name in enumerate(counters)},
    }


def test_export_reaches_another_process(tmp_path):
    """As in the server: a scheduler process writes, the HTTP process reads; a disabled rank adds nothing."""
    assert exported(WRITER, tmp_path) == {
        "s3r_rounds_total": 3.0,
        "s3r_draft_tokens_total": 6.0,
        's3r_accepted_tokens_total{position="1"}': 2.0,
        's3r_accepted_tokens_total{position="2"}': 1.0,
        "s3r_accept_length": 2.0,
    }
