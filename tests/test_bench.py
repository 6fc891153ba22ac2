"""`s3r bench`: the probe's timing and imposed acceptance, the window, the arithmetic, and the whole command."""

import asyncio
import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from s3r_sglang.kernels.reference.philox import Stream
from s3r_testing import random_llama
from typer.testing import CliRunner

from s3r_sglang.bench import execute, kernel_times, load, paper, render, traffic
from s3r_sglang.bench.load import LoadError, Setting, Trace
from s3r_sglang.bench.probe import IMPOSED_STREAM, PROBE_ENV, Probe, ProbeConfig
from s3r_sglang.bench.records import (
    Correctness,
    Report,
    SettingResult,
    StageTimes,
    Throughput,
    Traffic,
    read_stage_times,
)
from s3r_sglang.cli import app
from s3r_sglang.config import S3RConfig

PROFILE = paper.PROFILES["paper-8b"]


def outcome(num_requests, k=6, start=100):
    """What a sampler that rejects everything hands to `impose`; token 5 is the one it sampled."""
    tokens = torch.zeros(num_requests, k + 1, dtype=torch.int32)
    tokens[:, 0] = 5
    drafts = torch.arange(10, 10 + k).expand(num_requests, k)
    seeds = torch.arange(num_requests) * 7919
    rounds = torch.full((num_requests,), start)
    return tokens, torch.ones(num_requests, dtype=torch.int32), drafts, seeds, rounds


def test_imposed_acceptance_has_the_profile_and_its_tau():
    n = 200_000
    _, lens = Probe(ProbeConfig(imposed_acceptance=PROFILE)).impose(*outcome(n))
    for position, wanted in enumerate(PROFILE, start=1):
        share = (lens > position).float().mean().item()
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / n) ** 0.5
    assert abs(lens.float().mean().item() - (1 + sum(PROFILE))) < 0.03


def test_imposed_acceptance_is_fresh_each_round_and_reproducible():
    probe = Probe(ProbeConfig(imposed_acceptance=(0.5, 0.5)))
    lens = [probe.impose(*outcome(20_000, k=2, start=start))[1] for start in (100, 100, 103)]
    assert torch.equal(lens[0], lens[1])
    together = ((lens[0] == 3) & (lens[2] == 3)).float().mean().item()
    assert abs(together - 0.25) < 0.02, "rounds share their noise"


def test_imposed_tokens_are_the_drafts_and_one_more():
    tokens, lens = Probe(ProbeConfig(imposed_acceptance=(0.7, 0.4, 0.2))).impose(*outcome(200, k=3))
    assert tokens.dtype == lens.dtype == torch.int32
    assert set(lens.tolist()) == {1, 2, 3, 4}
    rows = {1: [10, 0, 0, 0], 2: [10, 11, 0, 0], 3: [10, 11, 12, 0], 4: [10, 11, 12, 5]}
    for row, length in zip(tokens.tolist(), lens.tolist(), strict=True):
        assert row == rows[length]


def test_short_requests_keep_the_samplers_outcome():
    before = outcome(64)
    rounds = torch.arange(64)
    tokens, lens = Probe(ProbeConfig(imposed_acceptance=(1.0,) * 6, imposed_from=40)).impose(
        *before[:4], rounds
    )
    assert torch.equal(tokens[:40], before[0][:40])
    assert lens[:40].tolist() == [1] * 40
    assert lens[40:].tolist() == [7] * 24


def test_without_a_profile_nothing_is_touched():
    before = outcome(4)
    tokens, lens = Probe(ProbeConfig()).impose(*before)
    assert tokens is before[0]
    assert lens is before[1]


def test_the_imposed_noise_is_not_the_samplers():
    assert IMPOSED_STREAM not in set(Stream)


@pytest.mark.parametrize("profile", [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (float("nan"), 0.5), ()])
def test_an_impossible_profile_is_refused(profile):
    with pytest.raises(ValidationError, match="must fall from at most 1 to at least 0"):
        ProbeConfig(imposed_acceptance=profile)


def test_a_profile_of_another_draft_length_is_refused():
    with pytest.raises(ValueError, match="has 2 positions, not 6"):
        Probe(ProbeConfig(imposed_acceptance=(0.9, 0.8))).impose(*outcome(1))


def test_the_environment_decides_whether_there_is_a_probe(tmp_path):
    assert Probe.from_environment({}) is None
    environ = {PROBE_ENV: json.dumps({"stage_times": str(tmp_path / "t"), "imposed_acceptance": [0.5]})}
    assert Probe.from_environment(environ, tp_rank=1).config.stage_times is None
    assert Probe.from_environment(environ, tp_rank=1).config.imposed_acceptance == (0.5,)
    assert not (tmp_path / "t").exists(), "one rank alone writes the file"
    assert Probe.from_environment(environ).config.stage_times == tmp_path / "t"
    with pytest.raises(ValidationError):
        Probe.from_environment({PROBE_ENV: '{"stage_tmes": "x"}'})


def test_the_command_line_starts_without_the_bench():
    code = "import sys, s3r_sglang.cli; print(*sorted(m for m in sys.modules if m.startswith('s3r_sglang.bench')))"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["s3r_sglang.bench", "s3r_sglang.bench.command", "False"]


def spend(probe, rounds, batch_size, start, stages=("draft", "verify", "sample")):
    for i in range(rounds):
        with probe.round(torch.full((batch_size,), start + 5 * i)):
            for name in stages:
                with probe.stage(name):
                    torch.randn(200, 200).square().sum()


def test_every_finished_round_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "rounds.jsonl"
    probe = Probe(ProbeConfig(stage_times=path))
    spend(probe, 3, batch_size=4, start=50)
    rows = read_stage_times(path)
    assert [row["context"] for row in rows] == [50, 55, 60]
    assert rows[0]["gap_ms"] is None
    for row in rows:
        parts = row["draft_ms"] + row["verify_ms"] + row["sample_ms"]
        assert 0 < parts <= row["round_ms"]
        assert min(row["draft_ms"], row["verify_ms"], row["sample_ms"]) > 0
    assert all(row["gap_ms"] >= 0 for row in rows[1:])
    with path.open("a") as file:
        file.write('{"batch_size": 4, "con')
    assert read_stage_times(path) == rows


def test_a_stage_outside_a_round_is_an_error(tmp_path):
    probe = Probe(ProbeConfig(stage_times=tmp_path / "t"))
    with pytest.raises(RuntimeError, match="outside a round"), probe.stage("draft"):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_probe_does_not_wait_for_the_device(tmp_path):
    probe = Probe(ProbeConfig(stage_times=tmp_path / "t", imposed_acceptance=PROFILE))
    arguments = [tensor.cuda() for tensor in outcome(64)]
    probe.impose(*arguments)  # compiles, and moves the profile to the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with probe.round(arguments[4]), probe.stage("draft"):
                torch.cuda._sleep(10_000_000)
                probe.impose(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with probe.round(arguments[4]):
        pass
    rows = read_stage_times(tmp_path / "t")
    assert len(rows) >= 3
    assert all(1 < row["draft_ms"] <= row["round_ms"] for row in rows[:3])
    assert rows[0]["context"] == 100
    want = Probe(ProbeConfig(imposed_acceptance=PROFILE)).impose(*outcome(64))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(probe.impose(*arguments), want, strict=True))


def rows_of(batch_size, contexts, gap, **times):
    base = {"draft_ms": 4.0, "verify_ms": 3.0, "sample_ms": 1.0, "round_ms": 9.0, **times}
    return [{"batch_size": batch_size, "context": context, "gap_ms": gap, **base} for context in contexts]


def test_stage_times_leave_out_other_settings_and_prefills():
    rows = [
        *rows_of(64, [8192, 8198, 8204], 1.0),
        *rows_of(63, [8210], 1.0, draft_ms=100.0),
        *rows_of(64, [8192], 5000.0),  # the next repeat, after a prefill
        *rows_of(64, [8199, 8205], 3.0, draft_ms=6.0),
        *rows_of(64, [16384, 16390], 500.0, draft_ms=50.0),
    ]
    times = StageTimes.of(rows, 64, 8192, 8448)
    assert times.rounds == 4
    assert times.draft_ms == 5.0
    assert times.gap_ms == 2.0
    assert times.gap_share == 2 / 11
    with pytest.raises(LoadError, match="timed no rounds of 32 requests"):
        StageTimes.of(rows, 32, 8192, 8448)


def test_settings_are_parsed():
    assert load.parse_settings("64x8192, 32x16k") == [Setting(64, 8192), Setting(32, 16384)]
    for wrong in ("64", "0x5", "64x", "64*8", ""):
        with pytest.raises(LoadError, match="is not BATCHxCONTEXT"):
            load.parse_settings(wrong)
    with pytest.raises(LoadError, match="64x8192 occurs twice"):
        load.parse_settings("64x8K,32x8K,64x8192")


def test_the_window_counts_a_full_batch_only():
    """Request 0 emits 10 tokens per second from second 1, request 1 emits 5 from second 2."""
    fast = Trace([1.0 + i for i in range(11)], [10 * i for i in range(11)])
    slow = Trace([2.0 + i for i in range(21)], [5 * i for i in range(21)])
    window = load.steady_window([fast, slow], settle_tokens=10)
    assert window.seconds == 7.0  # from second 4, when the slow one has 10, to second 11
    assert window.tokens == 70 + 35
    assert window.tokens_per_second == 15.0


def test_a_window_edge_between_two_reports_is_interpolated():
    trace = Trace([0.0, 1.0, 3.0], [1, 5, 9])
    assert [trace.count_at(moment) for moment in (-1, 0, 0.5, 1, 2, 3, 9)] == [0, 1, 3, 5, 7, 9, 9]


def test_a_batch_that_never_was_full_has_no_window():
    early = Trace([0.0, 1.0], [1, 20])
    late = Trace([5.0, 6.0], [1, 20])
    with pytest.raises(LoadError, match="raise --new-tokens"):
        load.steady_window([early, late], settle_tokens=10)


def test_histograms_of_requests_add_up():
    metas = [{"spec_accept_histogram": [1, 2]}, {"spec_accept_histogram": [0, 1, 4]}]
    assert load.accept_histogram([Trace(meta=meta) for meta in metas]) == [1, 3, 4]
    assert load.accept_histogram([Trace(meta={})]) == []


def test_random_prompts_differ_and_shorter_ones_are_heads():
    prompts = load.random_prompts(1000, 5, 40)
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 5
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert [prompt[:7] for prompt in prompts[:3]] == load.random_prompts(1000, 3, 7)


def test_paper_profiles_have_the_papers_ends_and_mean():
    for name, (first, last, mean) in {
        "paper-8b": (0.958, 0.679, 0.804),
        "paper-1.7b": (0.950, 0.629, 0.795),
    }.items():
        profile = paper.PROFILES[name]
        assert len(profile) == 6
        assert (profile[0], profile[-1]) == pytest.approx((first, last))
        assert sum(profile) / 6 == pytest.approx(mean)
        assert list(profile) == sorted(profile, reverse=True)
    with pytest.raises(ValueError, match="is not between"):
        paper.profile(0.9, 0.5, 0.95)


def test_table_7_gives_its_own_break_even_acceptance():
    """The α_BE column of the paper, from the stage columns that we copied."""
    printed = {(16, 16): 0.762, (32, 8): 0.758, (32, 16): 0.467, (64, 4): 0.770, (64, 8): 0.455}
    for row in paper.TABLES_6_AND_7:
        acceptance = (row.break_even_tau - 1) / 6
        wanted = printed.get((row.batch_size, row.context // 1024))
        assert acceptance > 1 if wanted is None else acceptance == pytest.approx(wanted, abs=5e-4)


def test_profiles_are_parsed():
    assert execute.parse_profile(None, 6) is None
    assert execute.parse_profile("paper-8b", 6) == PROFILE
    assert execute.parse_profile("0.9,0.5", 2) == (0.9, 0.5)
    with pytest.raises(LoadError, match="must fall"):
        execute.parse_profile("0.5,0.9", 2)
    with pytest.raises(LoadError, match="neither paper-8b or paper"):
        execute.parse_profile("paper", 6)
    with pytest.raises(
        LoadError, match=r"has 6 positions, but a round drafts 4 .* --speculative-num-steps 6"
    ):
        execute.parse_profile("paper-8b", 4)


def test_traffic_follows_from_the_shape(tmp_path):
    """Qwen3-8B: 8.19e9 parameters, of which the untied input embedding is not read; 144 KiB of KV a token."""
    paper.write_model("qwen3-8b", tmp_path / "m")
    shape = traffic.ModelShape.read(tmp_path / "m")
    assert shape.name == "qwen3-8b"
    assert shape.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert shape.weight_bytes == pytest.approx(2 * (8.1907e9 - 151936 * 4096), rel=1e-3)
    full = traffic.dense_step(shape, 64, 8192)
    assert full.kv == 64 * 8192 * 147456
    sparse = traffic.draft_step(shape, S3RConfig(), 64, 8192)
    assert sparse.kv == 64 * (410 + 3) * 147456
    assert traffic.draft_step(shape, S3RConfig(), 1, 100).kv == 100 * 147456
    assert traffic.ModelShape.read(tmp_path / "m", "float32").weight_bytes == 2 * shape.weight_bytes
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        traffic.ModelShape.read(tmp_path)


def kernel(name, ts, dur, cat="kernel"):
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


class _Engine:
    """Stands in for an engine with a GPU: its requests emit `steps` tokens at a time, by turns."""

    def __init__(self, steps):
        self.loop = asyncio.new_event_loop()
        self.server_args = SimpleNamespace(speculative_num_steps=3)
        self.tokenizer_manager = self
        self.steps, self.profiled = steps, []

    async def async_generate(self, input_ids, sampling_params, stream):
        async def chunks():
            for tokens in range(0, sampling_params["max_new_tokens"] + 1, self.steps[input_ids[0]]):
                await asyncio.sleep(0)
                yield {"meta_info": {"completion_tokens": tokens}}

        return chunks()

    async def start_profile(self, request):
        self.profiled.append(request)
        with gzip.open(Path(request.output_dir) / "1-TP-0.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": ["event"]}, file)


def test_a_trace_shows_a_full_batch_or_nothing():
    params = {"max_new_tokens": 40}
    alike, apart = _Engine([2, 2]), _Engine([10, 1])
    assert kernel_times.trace(alike, [[0], [1]], params, num_steps=6, settle_tokens=8) == ["event"]
    # 8 tokens of the slow request are 40 of the fast one, which has none left to be traced.
    with pytest.raises(LoadError, match="would finish before 6 steps"):
        kernel_times.trace(apart, [[0], [1]], params, num_steps=6, settle_tokens=8)
    assert (len(alike.profiled), len(apart.profiled)) == (1, 0)


def test_a_trace_is_summed_by_kind_and_idle_time_is_what_nothing_covers():
    """Two steps of two layers: attention runs four times. Two streams overlap; 6 of 130 us are idle."""
    events = [
        *(kernel("flash::FlashAttnFwdSm90", ts, 20.0) for ts in (0.0, 30.0, 60.0, 90.0)),
        *(kernel("nvjet_tst_128x64", ts, 10.0) for ts in (20.0, 50.0, 80.0)),
        kernel("_select_kernel", 25.0, 3.0),
        kernel("Memcpy DtoH", 105.0, 15.0, cat="gpu_memcpy"),
        kernel("silu", 130.0, 0.0),
        kernel("Memcpy DtoH (Device -> Pageable)", 121.0, 2.0, cat="gpu_memcpy"),
        kernel("Memcpy DtoH (Device -> Pinned)", 124.0, 2.0, cat="gpu_memcpy"),
        kernel("python code", 0.0, 500.0, cat="cpu_op"),
        *(kernel("cudaEventSynchronize", ts, 9.0, cat="cuda_runtime") for ts in (1.0, 51.0)),
        kernel("cudaMemcpyAsync", 60.0, 1.0, cat="cuda_runtime"),
        {"name": "process_name", "ph": "M"},
    ]
    found = kernel_times.summarize(events, launches_per_step=2)
    assert found.steps == 2
    assert found.kind_ms == pytest.approx(
        {"attention": 0.04, "projections": 0.015, "index refresh": 0.0015, "other": 0.0}
    )
    assert found.attention_ms == found.kind_ms["attention"]
    assert found.idle_share == pytest.approx((10 - 4) / 130)
    assert found.host_waits == {"cudaEventSynchronize": 1.0, "Memcpy DtoH (Device -> Pageable)": 0.5}
    with pytest.raises(ValueError, match="no attention kernel"):
        kernel_times.summarize(events[4:], launches_per_step=2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...", "attention"),
        ("_verify_kernel", "attention"),
        ("_verify_race_kernel", "sampling"),
        ("_sparse_decode_kernel", "attention"),
        ("_scores_kernel", "index refresh"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "projections"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "projections"),
        ("act_and_mul_kernel", "other"),
    ],
)
def test_kernels_have_a_kind(name, kind):
    assert kernel_times.kind_of(name) == kind


def a_report(imposed=PROFILE, s3r_error=1e-3) -> Report:
    result = SettingResult(
        batch_size=64,
        context=8192,
        new_tokens=256,
        draft_length=6,
        autoregressive=Throughput(tokens_per_second=(2800.0, 2560.0, 2500.0), window_seconds=(5.0,) * 3),
        s3r=Throughput(tokens_per_second=(5120.0, 5000.0, 5200.0), window_seconds=(2.5,) * 3),
        accept_histogram=(10, 0, 0, 0, 0, 0, 30),
        stages=StageTimes(rounds=9, draft_ms=42, verify_ms=30, sample_ms=1, round_ms=74, gap_ms=1),
        traffic={
            name: Traffic(weight_bytes=10**10, kv_bytes=4 * 10**10, milliseconds=25.0)
            for name in ("autoregressive", "draft", "verify")
        },
    )
    return Report(
        created="2026-01-01T00:00:00+00:00",
        command="s3r bench",
        git_commit="0" * 12,
        machine={"device": "NVIDIA H200", "count": 1},
        versions={"sglang": "0.5.17"},
        model={"name": "qwen3-8b", "weight_bytes": 1, "kv_bytes_per_token": 1},
        load_format="dummy",
        prompts="random tokens",
        sampling={"temperature": 1.0},
        server_args={},
        s3r_config=S3RConfig().model_dump(),
        imposed_acceptance=imposed,
        correctness=Correctness(
            responses=8,
            tokens=512,
            equal_tokens=0.99,
            s3r_logprob_error=s3r_error,
            ar_logprob_error=1e-3,
            informative=False,
        ),
        settings=(result,),
    )


def test_derived_numbers_follow_from_the_measured():
    row = a_report().settings[0]
    assert row.speedup == 2.0
    assert row.speedup_range == (5000 / 2800, 5200 / 2500)
    assert row.tau == 1 + 6 * 0.75
    assert row.acceptance == [0.75] * 6
    assert row.t_p_ms == 25.0
    assert row.t_q_ms == 7.0
    assert row.break_even_tau == 72 / 25
    assert row.break_even_acceptance == (72 / 25 - 1) / 6
    assert row.rounds_tokens_per_second == pytest.approx(64 * 5.5 / 0.075)
    assert row.traffic["draft"].terabytes_per_second == 2.0


def test_the_json_holds_measured_and_derived_numbers_and_can_be_read_back():
    report = a_report()
    data = json.loads(report.model_dump_json())
    assert data["schema_version"] == 1
    assert data["settings"][0]["speedup"] == 2.0
    assert data["settings"][0]["autoregressive"]["median"] == 2560.0
    assert data["settings"][0]["stages"]["gap_share"] == 1 / 75
    assert Report.model_validate(data) == report


def test_logprobs_far_from_the_dense_policys_fail_the_check():
    assert a_report(s3r_error=2e-3).correctness.passed
    assert not a_report(s3r_error=1e-2).correctness.passed


def test_imposed_acceptance_is_in_every_title():
    page = render.markdown(a_report(), "report.png")
    titles = [line for line in page.splitlines() if line.startswith("# ")]
    assert titles == ["# s3r bench: qwen3-8b on NVIDIA H200, dummy weights, IMPOSED ACCEPTANCE"]
    assert "**Imposed acceptance**" in page
    assert all("IMPOSED ACCEPTANCE" in table.title for table in render.tables(a_report()))
    measured = a_report(imposed=None)
    assert "mposed" not in render.markdown(measured, None)
    assert not any("IMPOSED" in table.title for table in render.tables(measured))


def test_the_page_shows_the_paper_beside():
    page = render.markdown(a_report(), None)
    throughput = next(line for line in page.splitlines() if line.startswith("| 64 x 8192 | 2560"))
    assert "2.00x (1.79-2.08) | 1.37x | 5.50" in throughput
    stages = next(line for line in page.splitlines() if line.startswith("| 64 x 8192 | 25.00"))
    assert stages.endswith("| 1.00 (1.3%) | 4693 | 2.88 | 3.73 |")


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    render.plot(a_report(), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--model", "qwen3-8b"], "is a shape without weights: add --load-format dummy"),
        (["--model", "nowhere"], "is not a model folder"),
        (["--model", "qwen3-8b", "--load-format", "dummy", "--sweep", "64"], "is not BATCHxCONTEXT"),
        (
            ["--model", "qwen3-8b", "--load-format", "dummy", "--new-tokens", "32"],
            "nothing would be left to time",
        ),
        (
            ["--model", "qwen3-8b", "--load-format", "dummy", "--s3r-mode=direct"],
            "s3r bench compares engines",
        ),
        (
            ["--model", "qwen3-8b", "--load-format", "dummy", "--sweep", "2x8K,1x40800"],
            "prompts of 40800 and 256 new tokens do not fit the model's 40960 positions",
        ),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_before_an_engine_starts(words, fault):
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 1
    assert fault in " ".join(result.output.split())


@pytest.mark.slow
def test_the_command_measures_two_real_engines(tmp_path):
    """Float32 and real (if random) weights, so greedy responses are equal; long requests get the profile."""
    random_llama().save_pretrained(tmp_path / "tiny")
    # fmt: off
    words = [
        "--model", tmp_path / "tiny", "--sweep", "4x96,3x64", "--new-tokens", "64", "--settle-tokens", "8",
        "--repeats", "2", "--imposed-acceptance", "0.9,0.8,0.4", "--speculative-num-steps", "3",
        "--s3r-min-budget", "16", "--s3r-recent-window", "4", "--dtype", "float32",
        "--max-total-tokens", "20000", "--out", tmp_path / "out",
    ]
    # fmt: on
    command = [sys.executable, "-c", "from s3r_sglang.cli import main; main()", "bench", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())

    assert report.correctness.passed
    assert report.correctness.equal_tokens == 1.0
    assert report.correctness.s3r_logprob_error < 1e-4
    assert report.s3r_config["min_budget"] == 16
    assert report.server_args["autoregressive"]["speculative_algorithm"] is None
    assert [(row.batch_size, row.context) for row in report.settings] == [(4, 96), (3, 64)]
    for row in report.settings:
        assert row.draft_length == 3
        # 2 repeats of 3 to 4 requests and about 20 rounds: a standard error of about 0.09.
        assert row.tau == pytest.approx(1 + 0.9 + 0.8 + 0.4, abs=0.5)
        assert len(row.autoregressive.tokens_per_second) == len(row.s3r.tokens_per_second) == 2
        # The client's clock and the worker's own count the same tokens; CPU rounds are far apart.
        assert row.rounds_tokens_per_second == pytest.approx(row.s3r.median, rel=0.5)
        parts = row.stages.draft_ms + row.stages.verify_ms + row.stages.sample_ms
        assert 0 < parts < 1.2 * row.stages.round_ms
    assert "IMPOSED ACCEPTANCE" in (tmp_path / "out" / "report.md").read_text()
    assert "IMPOSED ACCEPTANCE" in done.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--paper-table", "--sweep", "1x8K"], "--sweep"),
        (["--paper-table", "--context", "8192"], "--context"),
        (["--sweep", "1x8K", "--batch-size", "4"], "--batch-size"),
    ],
)
def test_options_that_would_override_each_other_are_refused(words, option):
    result = CliRunner().invoke(app, ["bench", "--model", "qwen3-8b", "--load-format", "dummy", *words])
    assert result.exit_code == 2
    assert f"leave out {option}" in " ".join(result.output.replace("│", " ").split())
