"""`s3r bench-kv`: the workload, the arithmetic behind the tables, wrong answers, and the whole command."""

import json
import math
import os
import random
import subprocess
import sys
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3r_testing import random_llama
from typer.testing import CliRunner

from s3r_sglang.bench import load, page, paper
from s3r_sglang.bench.kv import execute, render, run
from s3r_sglang.bench.kv.bound import SAMPLES_PER_WINDOW, bound
from s3r_sglang.bench.kv.records import VARIANTS, KvJob, KvReport, KvRun, KvSample, KvTotals
from s3r_sglang.bench.kv.workload import Workload, median_length, peak_demand, response_lengths
from s3r_sglang.bench.load import LoadError
from s3r_sglang.bench.probe import planned_rid
from s3r_sglang.cli import app


def a_workload(requests=20, groups=5, prompt_length=10, longest=100):
    prompts = load.random_prompts(64, groups, prompt_length)
    return Workload.make(prompts, requests=requests, group_size=4, longest=longest, seed=0)


def test_lengths_have_a_long_tail_and_the_same_head_for_any_count():
    lengths = response_lengths(20_000, 16384, seed=3)
    assert lengths[:50] == response_lengths(50, 16384, seed=3) != response_lengths(50, 16384, seed=4)
    assert min(lengths) >= 1
    assert max(lengths) == 16384
    # The median is 0.2 of the longest; 1 - Φ(ln 5 / 0.9) = 3.7% of the responses are cut off.
    assert sorted(lengths)[10_000] == pytest.approx(0.2 * 16384, rel=0.03)
    assert lengths.count(16384) / len(lengths) == pytest.approx(0.037, abs=0.005)
    assert sum(lengths) / len(lengths) / 16384 == pytest.approx(0.28, abs=0.01)


def test_a_median_may_be_given_in_tokens():
    assert response_lengths(50, 16384, seed=3, median=3277) == pytest.approx(
        response_lengths(50, 16384, seed=3), abs=1
    )
    lengths = response_lengths(20_000, 16384, seed=3, median=700)
    assert sorted(lengths)[10_000] == pytest.approx(700, rel=0.03)
    assert sum(lengths) / len(lengths) == pytest.approx(700 * math.exp(0.9**2 / 2), rel=0.03)
    with pytest.raises(LoadError, match="median of 101 tokens exceeds the longest response, 100"):
        response_lengths(5, 100, seed=3, median=101)


def test_responses_of_a_group_have_one_prompt():
    workload = a_workload(requests=18)
    prompts = [tuple(prompt) for prompt in workload.prompts]
    assert len(prompts) == 18
    assert len(set(prompts)) == 5
    assert all(prompts[i] == prompts[4 * (i // 4)] for i in range(18))
    assert workload == a_workload(requests=18)
    assert workload.tokens == sum(workload.lengths)


def by_steps(prompts, lengths, slots):
    """Most positions held, one token per request and step."""
    waiting, active, peak = deque(range(len(lengths))), {}, 0
    while waiting or active:
        while waiting and len(active) < slots:
            active[waiting.popleft()] = 0
        active = {request: grown + 1 for request, grown in active.items()}
        peak = max(peak, sum(prompts[request] + grown for request, grown in active.items()))
        active = {request: grown for request, grown in active.items() if grown < lengths[request]}
    return peak


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=12), st.integers(1, 6))
def test_peak_demand_is_that_of_a_step_by_step_rollout(requests, slots):
    prompts, lengths = zip(*requests, strict=True)
    assert peak_demand(prompts, lengths, slots) == by_steps(prompts, lengths, slots)


def test_what_starts_where_others_end_does_not_meet_them():
    """Two end at once: the second and the prompt that follows the first are never held together."""
    assert peak_demand([1, 9, 5, 1], [1, 1, 1, 1], 2) == by_steps([1, 9, 5, 1], [1, 1, 1, 1], 2) == 12
    assert peak_demand([1, 2, 4], [2, 2, 1], 2) == by_steps([1, 2, 4], [2, 2, 1], 2) == 7


def test_the_pool_is_the_peak_demand_over_the_pressure():
    workload = a_workload(requests=64, groups=16)
    demand = peak_demand([10] * 64, workload.lengths, 16)
    assert workload.pool(16, 1.5) == math.ceil(demand / 1.5)
    with pytest.raises(LoadError, match="does not hold one response, which takes 184 with"):
        workload.pool(16, demand / 100)


def test_rows_have_the_papers_names_and_limits():
    assert [variant.title(256) for variant in VARIANTS.values()] == [
        "AR", "Recompute-256", "Offload-128", "Offload-160", "Offload-256", "Offload-256, headroom", "AIMD",
    ]  # fmt: skip
    assert [variant.limit(8) for variant in VARIANTS.values()] == [8, 8, 4, 5, 8, 8, 8]


def test_the_papers_numbers_agree_with_each_other():
    """Gains over AR in the table follow from the relations in the text."""
    for name, (one, other) in paper.KV_RELATIONS.items():
        assert paper.KV_GAINS[one] / paper.KV_GAINS[other] == pytest.approx(paper.KV_FINDINGS[name])
    pages = paper.KV_PAGES_PER_1000_TOKENS
    assert paper.KV_FINDINGS["pages of offload / pages of aimd"] == pages["offload"] / pages["aimd"]


def test_variants_are_parsed():
    assert execute.parse_variants("all") == list(VARIANTS)
    assert execute.parse_variants("aimd, ar") == ["aimd", "ar"]
    with pytest.raises(LoadError, match="'offload-256' is none of ar, recompute"):
        execute.parse_variants("ar,offload-256")


def answers(workload):
    return [
        {
            "output_ids": [0] * length,
            "meta_info": {
                "id": planned_rid(i, length),
                "completion_tokens": length,
                "finish_reason": {"type": "length", "length": length},
            },
        }
        for i, length in enumerate(workload.lengths)
    ]


def test_right_answers_pass():
    workload = a_workload()
    run.check_answers(workload, answers(workload))


def test_lost_short_swapped_and_aborted_answers_are_found():
    workload = a_workload()
    short, swapped, aborted = answers(workload), answers(workload), answers(workload)
    short[3]["output_ids"] = [0]
    with pytest.raises(run.AnswerError, match=r"1 of 20 .* planned-\d+-3 ended with 1 tokens"):
        run.check_answers(workload, short)
    swapped[1]["meta_info"]["id"] = swapped[2]["meta_info"]["id"]
    with pytest.raises(run.AnswerError, match="do not belong to the requests one by one"):
        run.check_answers(workload, swapped)
    aborted[5]["meta_info"]["finish_reason"] = {"type": "abort", "message": "no memory"}
    with pytest.raises(run.AnswerError, match="'abort'"):
        run.check_answers(workload, aborted)


def test_sglangs_admission_is_scaled_with_the_lengths(monkeypatch):
    monkeypatch.delenv(run.CLIP_ENV, raising=False)
    for longest, clip in {16384: "4096", 40000: "4096", 4096: "1024", 2: "1"}.items():
        with run.scaled_admission(median_length(longest, None)):
            assert os.environ[run.CLIP_ENV] == clip
    assert run.CLIP_ENV not in os.environ
    monkeypatch.setenv(run.CLIP_ENV, "77")
    with run.scaled_admission(800):
        assert os.environ[run.CLIP_ENV] == "77"


def a_job(**changes):
    values = {
        "model": "qwen3-1.7b",
        "load_format": "dummy",
        "dtype": None,
        "engine_argv": (),
        "imposed_acceptance": paper.PROFILES["paper-1.7b"],
        "prompts": "random tokens",
        "requests": 512,
        "group_size": 8,
        "slots": 256,
        "prompt_length": 128,
        "longest": 16384,
        "pressure": 1.75,
        "seed": 0,
        "pool_tokens": 500_000,
        "peak_demand": 875_000,
        "tokens": 2_000_000,
        "kv_bytes_per_token": 114_688,
    }
    return KvJob(**values | changes)


def a_run(key, tokens_per_second, pages=None, error=None):
    kv = None
    if pages is not None:
        kv = KvTotals(
            pauses=10,
            repauses=2,
            pages_out=pages // 2,
            pages_in=pages - pages // 2,
            recomputed=1,
            restores=8,
            restore_seconds=0.2,
            host_pages_peak=50_000,
            host_pages_capacity=100_000,
        )
    return KvRun(
        variant=key,
        title=VARIANTS[key].title(256),
        created="2026-01-01T00:00:00+00:00",
        git_commit="0" * 12,
        seconds=2_000_000 / tokens_per_second,
        requests=512,
        tokens=2_000_000,
        retractions=3,
        accept_histogram=() if key == "ar" else (1, 0, 0, 0, 0, 0, 3),
        logprob_error=error,
        kv=kv,
        samples=()
        if kv is None
        else tuple(
            KvSample(seconds=0.2 * i, limit=256 - i, active=200, paused=i, waiting=5, utilization=0.01 * i)
            for i in range(60)
        ),
        s3r_config={"aimd_low_utilization": 0.8, "aimd_high_utilization": 0.95},
    )


def a_report(**errors):
    runs = {
        "aimd": a_run("aimd", 16_000, pages=20_000, error=errors.get("aimd")),
        "ar": a_run("ar", 8_000, error=errors.get("ar")),
        "offload": a_run("offload", 15_000, pages=400_000),
    }
    return KvReport(
        created="2026-01-01T00:00:00+00:00",
        command="s3r bench-kv",
        git_commit="0" * 12,
        machine={"device": "NVIDIA H200", "count": 1},
        versions={"sglang": "0.5.17"},
        job=a_job(),
        runs=runs,
    )


def test_derived_numbers_follow_from_the_measured():
    report = a_report()
    aimd = report.runs["aimd"]
    assert aimd.tokens_per_second == 16_000
    assert aimd.pages_per_1000_tokens == 10.0
    assert aimd.kv.restore_ms == 25.0
    assert aimd.tau == 1 + 6 * 0.75
    assert report.runs["ar"].tau is None
    assert report.runs["ar"].pages_per_1000_tokens is None
    assert report.findings.pop("offload / recompute") is None
    assert report.ratio("recompute", "ar") is None
    assert report.findings["aimd / offload"] == pytest.approx(16 / 15)
    assert report.findings["aimd / ar"] == 2.0
    assert report.findings["pages of offload / pages of aimd"] == 20.0


def test_the_json_can_be_read_back_and_holds_the_derived_numbers():
    report = a_report()
    data = json.loads(report.model_dump_json())
    assert data["runs"]["aimd"]["pages_per_1000_tokens"] == 10.0
    assert data["findings"]["aimd / ar"] == 2.0
    assert KvReport.model_validate(data) == report


def test_the_page_shows_rows_in_the_papers_order_with_its_figures():
    page = render.markdown(a_report(), None).splitlines()
    assert page[0] == "# s3r bench-kv: qwen3-1.7b on NVIDIA H200, dummy weights, IMPOSED ACCEPTANCE"
    rows = [line for line in page if line.startswith(("| AR", "| Offload", "| AIMD"))]
    assert rows[:3] == [
        "| AR | 8000 | +0.0% | +0.0% | 250.0 |  | 3 |",
        "| Offload-256 | 15000 | +87.5% | +50.8% | 133.3 | 5.50 | 3 |",
        "| AIMD | 16000 | +100.0% | +59.5% | 125.0 | 5.50 | 3 |",
    ]
    assert rows[3:] == [
        "| AR |  |  |  |  |  |  |  |  |  |",
        "| Offload-256 | 200.0 | 18.0 | 200000 | 200000 | 10 | 2 | 5.73 GB | 25.0 ms | 1 |",
        "| AIMD | 10.0 | 1.3 | 10000 | 10000 | 10 | 2 | 5.73 GB | 25.0 ms | 1 |",
    ]
    assert "| aimd / offload | 1.067 | 1.058 |" in page
    assert "| pages of offload / pages of aimd | 20.000 | 13.846 |" in page
    assert not any(line.startswith("| offload / recompute") for line in page)


COSTS = {"round": 14e-3, "request": 5e-5, "page": 3e-8, "pause": 2e-3, "prefill": 9e-3}


def samples_of(costs, job, windows=60, tail=20):
    """What a scheduler shows whose time is spent as `costs` say; the last windows are the tail.

    Returns:
        The samples, and the rounds that a full pool would have saved.
    """
    chance, state = random.Random(0), dict.fromkeys(("seconds", "rounds", "prefills", "pauses"), 0)
    here, samples, saved = (100, 0.8), [], 0.0
    for window in range(windows):
        waiting = 9 if window < windows - tail else 0
        active, held = here
        for _ in range(SAMPLES_PER_WINDOW):
            # Between the ends of a window nothing is looked at.
            samples.append(
                KvSample(limit=256, active=active, paused=0, waiting=waiting, utilization=held, **state)
            )
        here = chance.randint(1, 180), chance.uniform(0.75, 1) if waiting else chance.random()
        rounds, pauses, prefills = chance.randint(20, 50), chance.randint(0, 9), chance.randint(0, 4)
        mean_active, mean_held = (active + here[0]) / 2, (held + here[1]) / 2
        per_round = (
            costs["round"] + costs["request"] * mean_active + costs["page"] * mean_held * job.pool_tokens
        )
        state["seconds"] += rounds * per_round + pauses * costs["pause"] + prefills * costs["prefill"]
        state["rounds"] += rounds
        state["pauses"] += pauses
        state["prefills"] += prefills
        saved += rounds * (1 - mean_held) if window < windows - tail - 1 else 0
    last = samples[-1].model_copy(update={"active": here[0], "utilization": here[1], **state})
    return (*samples, last), saved


def test_costs_are_found_and_what_other_schedules_could_save():
    job = a_job()
    samples, rounds_saved = samples_of(COSTS, job)
    end = samples[-1]
    row = a_run("offload", 2_000_000 / end.seconds, pages=0).model_copy(update={"samples": samples})
    found = bound(row, job)
    assert found.costs.model_dump() == pytest.approx(COSTS, rel=1e-6)
    assert found.slack == pytest.approx(COSTS["round"] * rounds_saved)
    assert found.pauses == pytest.approx(COSTS["pause"] * end.pauses)
    assert found.prefills == pytest.approx(COSTS["prefill"] * end.prefills)
    saved = found.slack + found.pauses + found.prefills
    assert found.gain == pytest.approx(end.seconds / (end.seconds - saved))
    assert 0.75 < found.pool < 1


def test_slots_that_are_full_leave_nothing():
    samples, _ = samples_of(COSTS, a_job())
    full = tuple(sample.model_copy(update={"active": 256}) for sample in samples)
    found = bound(a_run("offload", 15_000, pages=0).model_copy(update={"samples": full}), a_job())
    assert (found.slack, found.pool) == (0.0, None)


def test_without_counts_of_rounds_there_is_no_bound():
    report = a_report()
    assert [bound(row, report.job) for row in report.rows] == [None] * 3
    assert "## What is left" not in render.markdown(report, None)
    samples, _ = samples_of(COSTS, report.job)
    kv = report.runs["aimd"].kv.model_copy(update={"rounds": 2, "prefills": 5})
    aimd = report.runs["aimd"].model_copy(update={"samples": samples, "kv": kv})
    page = render.markdown(report.model_copy(update={"runs": report.runs | {"aimd": aimd}}), None)
    lines = page[page.index("## What is left") :].splitlines()
    ar, aimd = (line for line in lines if line.startswith("| A"))
    assert ar == "| AR |  |  |  |  |  |  |  |  |"
    assert aimd.startswith("| AIMD | 2 | 2 | 14.0 ms |")


def test_logprobs_far_from_autoregressive_decodings_are_a_fault():
    assert a_report(aimd=2e-3, ar=1e-3).faults == []
    assert a_report(aimd=2e-3).faults == []
    bad = a_report(aimd=1e-2, ar=1e-3)
    assert bad.faults == ["AIMD: mean logprob error 1.0e-02, autoregressive 1.0e-03"]
    assert "FAILED: AIMD" in render.check_line(bad)


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    render.plot(a_report(), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_peak_of_host_memory_without_copies_is_the_warm_ups():
    names = (*run.TOTALS, "host_pages_peak", "host_pages_capacity")
    before = dict.fromkeys(names, 0) | {"host_pages_peak": 512, "pages_out": 40}
    assert run._totals(before, before).host_pages_peak == 0
    assert run._totals(before, before | {"pages_out": 41}).host_pages_peak == 512


def test_rates_of_a_cpu_keep_their_digits():
    assert [page.number(rate) for rate in (3.0412, 99.96, 100.2, 20606.4)] == ["3.04", "100", "100", "20606"]


def test_rows_of_the_same_job_are_taken_over_and_others_refused(tmp_path):
    assert execute._earlier_runs(tmp_path, a_job()) == {}
    report = a_report()
    page.write(report, tmp_path, render.plot, render.markdown)
    assert execute._earlier_runs(tmp_path, a_job()) == report.runs
    with pytest.raises(LoadError, match=r"another job \(seed differ\): choose another --out"):
        execute._earlier_runs(tmp_path, a_job(seed=1))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(LoadError, match="is not of s3r bench-kv"):
        execute._earlier_runs(tmp_path, a_job())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "is a shape without weights: add --load-format dummy"),
        (["--load-format", "dummy", "--variants", "fast"], "'fast' is none of ar"),
        (["--load-format", "dummy", "--max-length", "50000"], "do not fit the model's 40960 positions"),
        (["--load-format", "dummy", "--median-length", "16385"], "median of 16385 tokens exceeds"),
        (["--load-format", "dummy", "--slots", "1"], "does not hold one response"),
        (["--load-format", "dummy", "--imposed-acceptance", "0.5,0.9"], "must fall"),
        (["--load-format", "dummy", "--s3r-mode", "direct"], "s3r bench-kv compares engines"),
        # Would come last, and win over that of the row.
        (["--load-format", "dummy", "--s3r-kv-policy", "offload"], "each row sets --s3r-kv-policy"),
        (["--load-format", "dummy", "--variants", "offload", "--s3r-kv-limit", "9"], "each row sets"),
        (["--load-format", "dummy", "--s3r-budget-ratio", "2"], "budget_ratio"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_before_an_engine_starts(words, fault):
    result = CliRunner().invoke(app, ["bench-kv", "--model", "qwen3-1.7b", "--requests", "40", *words])
    assert result.exit_code == 1
    assert fault in " ".join(result.output.split())


@pytest.mark.slow
def test_the_command_rolls_out_beyond_the_pool_on_real_engines(tmp_path):
    """Autoregressive and AIMD at toy scale: lengths hidden from the scheduler, pages moved, a time series."""
    random_llama().save_pretrained(tmp_path / "tiny")
    # fmt: off
    words = [
        "--model", tmp_path / "tiny", "--variants", "ar,aimd", "--requests", "24", "--group-size", "4",
        "--slots", "8", "--prompt-length", "40", "--max-length", "200", "--pressure", "1.5",
        "--imposed-acceptance", "0.9,0.8,0.4", "--speculative-num-steps", "3", "--s3r-min-budget", "16",
        "--s3r-recent-window", "4", "--s3r-kv-headroom", "0.0", "--dtype", "float32", "--out", tmp_path / "out",
    ]
    # fmt: on
    command = [sys.executable, "-c", "from s3r_sglang.cli import main; main()", "bench-kv", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = KvReport.model_validate_json((tmp_path / "out" / "report.json").read_text())

    workload = a_workload(requests=24, groups=6, prompt_length=40, longest=200)
    assert report.job.tokens == workload.tokens
    assert report.job.pool_tokens == workload.pool(8, 1.5)
    assert set(report.runs) == {"ar", "aimd"}
    assert report.faults == []
    for row in report.rows:
        assert row.tokens == workload.tokens
        assert row.checked == 24
        assert row.logprob_error < 1e-4
    ar, aimd = report.rows
    assert ar.kv is None
    assert aimd.tau == pytest.approx(1 + 0.9 + 0.8 + 0.4, abs=0.5)
    assert aimd.kv.pauses > 0
    assert aimd.kv.pages_in > 0
    assert aimd.kv.restores == aimd.kv.pauses
    # Rounds of the warm-up do not count; slots are 8.
    assert 1 <= sum(aimd.accept_histogram) / aimd.kv.rounds <= 8
    assert aimd.kv.prefills >= 24 // 8
    assert [s.rounds for s in aimd.samples] == sorted(s.rounds for s in aimd.samples)
    assert 0 < aimd.kv.host_pages_peak <= aimd.kv.host_pages_capacity
    assert {sample.limit for sample in aimd.samples} <= set(range(5, 9))
    assert max(sample.utilization for sample in aimd.samples) > 0.5
    assert "IMPOSED ACCEPTANCE" in (tmp_path / "out" / "report.md").read_text()

    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "starting the engine" not in again.stderr
    for title in ("AR", "AIMD"):
        assert f"{title}: kept from" in again.stderr
    assert KvReport.model_validate_json((tmp_path / "out" / "report.json").read_text()) == report
