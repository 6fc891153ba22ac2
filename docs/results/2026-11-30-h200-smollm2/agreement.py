"""Greedy agreement and acceptance of S3R on a GPU: the engine with and without it, real weights, real text.

python docs/results/2026-11-30-h200-smollm2/agreement.py MODEL_FOLDER
"""

import json
import pydoc_data.topics
import random
import sys
import time

import sglang as sgl
from transformers import AutoTokenizer

LENGTHS = [
    32,
    40,
    64,
    90,
    128,
    160,
    192,
    200,
    230,
    256,
    300,
    400,
    512,
    700,
    1000,
    1400,
    1800,
    2200,
    2600,
    3000,
]
LONG = (2048, 2500, 3000, 3500, 4000, 4096)
QUESTION = "What is the capital of France? Answer in one sentence."
CHAT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def run(model: str, prompts: list[list[int]], long: list[list[int]], **speculation) -> dict:
    engine = sgl.Engine(
        model_path=model,
        attention_backend="fa3",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.5,
        log_level="warning",
        random_seed=1,
        disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=[1, 4, 8, 24, 64],
        max_running_requests=64,
        **speculation,
    )
    greedy = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}
    found = {
        "greedy": engine.generate(
            input_ids=prompts, sampling_params=greedy, return_logprob=True, top_logprobs_num=2
        )
    }
    for _ in range(2):  # the first run warms up and fills the prefix cache
        start = time.time()
        sampled = {"temperature": 1.0, "max_new_tokens": 512, "ignore_eos": True}
        found["sampled"] = engine.generate(input_ids=long, sampling_params=sampled)
        found["tokens_per_second"] = len(long) * 512 / (time.time() - start)
    found["chat"] = engine.generate([CHAT], {"temperature": 0.0, "max_new_tokens": 40})[0]["text"]
    engine.shutdown()
    return found


def compare(dense: dict, s3r: dict) -> dict:
    equal_tokens, gaps = 0, []
    for a, b in zip(dense["greedy"], s3r["greedy"], strict=True):
        pairs = zip(a["output_ids"], b["output_ids"], strict=True)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a["output_ids"]))
        equal_tokens += same
        if same < len(a["output_ids"]):
            first, second = a["meta_info"]["output_top_logprobs"][same][:2]
            gaps.append(round(first[0] - second[0], 4))
    metas = [output["meta_info"] for output in s3r["sampled"]]
    by_position = zip(*(meta["s3r_acceptance_by_position"] for meta in metas), strict=True)
    return {
        "greedy_prompts_equal": len(LENGTHS) - len(gaps),
        "greedy_prompts": len(LENGTHS),
        "tokens_before_divergence": equal_tokens,
        "dense_top2_logprob_gap_at_divergence": gaps,
        "accept_length_greedy": [round(o["meta_info"]["s3r_accept_length"], 2) for o in s3r["greedy"]],
        "accept_length_temperature_1": sum(meta["s3r_accept_length"] for meta in metas) / len(metas),
        "acceptance_by_position": [round(sum(column) / len(metas), 3) for column in by_position],
        "tokens_per_second": {"autoregressive": dense["tokens_per_second"], "s3r": s3r["tokens_per_second"]},
        "chat": {"autoregressive": dense["chat"], "s3r": s3r["chat"]},
        "text_temperature_1": s3r["sampled"][0]["text"][:300],
    }


if __name__ == "__main__":
    folder = sys.argv[1]
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = AutoTokenizer.from_pretrained(folder)(text[:200_000], verbose=False).input_ids
    places = random.Random(0)
    short = [ids[s : s + n] for n in LENGTHS for s in [places.randrange(0, len(ids) - 4000)]]
    long = [ids[s : s + n] for n in LONG for s in [places.randrange(0, len(ids) - 5000)]]
    autoregressive = run(folder, short, long)
    print(
        json.dumps(
            compare(autoregressive, run(folder, short, long, speculative_algorithm="SELF_SPARSE")), indent=1
        )
    )
