"""Life of requests whose end, or whose neighbours' end, falls inside an accepted block of tokens.

A random Llama with a word tokenizer; what it should say is the argmax chain of transformers on the same weights.
"""

import asyncio
import itertools

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

VOCAB, CONTEXT = 64, 256
ARGS = {
    "speculative_algorithm": "SELF_SPARSE",
    "s3r_min_budget": 40,
    "s3r_recent_window": 4,
    "s3r_budget_ratio": 0.8,
    "max_total_tokens": 20_000,
    "max_running_requests": 32,
}
PROMPT = torch.randint(VOCAB, (48,), generator=torch.Generator().manual_seed(5)).tolist()


def greedy_chain(model, prompt: list[int], length: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def word(token: int) -> str:
    return f"w{token:02d}"


def write_tokenizer(folder, eos: int) -> None:
    """Words w00 … w63, `eos` ending a response."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word(i): i for i in range(VOCAB)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=word(0),
        eos_token=word(eos),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_llama):
    """(folder, transformers model, greedy chain after PROMPT, the chain's token that is EOS)."""
    folder = tmp_path_factory.mktemp("words")
    llama = write_llama(folder, VOCAB)
    chain = greedy_chain(llama, PROMPT, 64)
    eos = next(token for i, token in enumerate(chain) if i >= 30 and token not in chain[:i])
    write_tokenizer(folder, eos)
    return folder, llama, chain, eos


@pytest.fixture(scope="module")
def llama(model):
    return model[1]


@pytest.fixture(scope="module")
def chain(model):
    return model[2]


@pytest.fixture
def running(current_engine, model):
    return current_engine(model[0], **ARGS)


def greedy(max_new_tokens: int, **params) -> dict:
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}


def end_of(output) -> tuple[str, object]:
    reason = output["meta_info"]["finish_reason"]
    return reason["type"], reason.get("matched", reason.get("length"))


def test_blocks_of_many_lengths_are_accepted(running, chain):
    """What the other tests rely on: the chain comes in blocks, and some are cut by a rejection."""
    output = running.generate(input_ids=PROMPT, sampling_params=greedy(60))
    assert output["output_ids"] == chain[:60]
    histogram = output["meta_info"]["spec_accept_histogram"]
    assert sum(count > 0 for count in histogram) >= 3


def first_occurrences(chain) -> list[int]:
    """Places before EOS of tokens that have not occurred earlier."""
    return [i for i, token in enumerate(chain[:30]) if token not in chain[:i]]


def test_stop_token_cuts_a_block(running, chain):
    """At each place of the chain in turn; nothing follows the stop token."""
    cuts = first_occurrences(chain)
    assert len(cuts) > 10
    outputs = running.generate(
        input_ids=[PROMPT] * len(cuts),
        sampling_params=[greedy(60, ignore_eos=False, stop_token_ids=[chain[cut]]) for cut in cuts],
        return_logprob=True,
    )
    for cut, output in zip(cuts, outputs, strict=True):
        assert output["output_ids"] == chain[: cut + 1]
        assert end_of(output) == ("stop", chain[cut])
        assert output["meta_info"]["completion_tokens"] == cut + 1
        assert len(output["meta_info"]["output_token_logprobs"]) == cut + 1
        assert output["text"].split() == list(map(word, chain[:cut]))


def test_stop_string_cuts_a_block(running, chain):
    cuts = [cut for cut in first_occurrences(chain) if cut > 0]
    stops = [f"{word(chain[cut - 1])} {word(chain[cut])}" for cut in cuts]
    outputs = running.generate(
        input_ids=[PROMPT] * len(cuts), sampling_params=[greedy(60, stop=stop) for stop in stops]
    )
    for cut, stop, output in zip(cuts, stops, outputs, strict=True):
        assert output["output_ids"] == chain[: cut + 1]
        assert end_of(output) == ("stop", stop)
        assert output["text"].split() == list(map(word, chain[: cut - 1]))


def test_stop_token_wins_over_the_limit_in_one_block(running, chain):
    """Every pair of a stop and a limit up to a block apart: what comes first ends the response."""
    pairs = [(cut, cut + 1 + more) for cut in first_occurrences(chain)[:20] for more in range(4)]
    outputs = running.generate(
        input_ids=[PROMPT] * len(pairs),
        sampling_params=[
            greedy(limit, ignore_eos=False, stop_token_ids=[chain[cut]]) for cut, limit in pairs
        ],
    )
    for (cut, limit), output in zip(pairs, outputs, strict=True):
        assert output["output_ids"] == chain[: cut + 1]
        # As without speculation, the limit is looked at first.
        assert end_of(output) == (("length", limit) if limit == cut + 1 else ("stop", chain[cut]))


def test_first_of_two_stops_in_one_block_wins(running, chain):
    """A stop string is checked before a stop token, and strings in the order of the request."""
    cuts = first_occurrences(chain)
    pairs = [(a, b) for a, b in itertools.pairwise(cuts) if b - a < 4]
    assert len(pairs) > 5
    later_string = [
        greedy(60, ignore_eos=False, stop_token_ids=[chain[a]], stop=word(chain[b])) for a, b in pairs
    ]
    two_strings = [greedy(60, stop=[word(chain[b]), word(chain[a])]) for a, b in pairs]
    for params in (later_string, two_strings):
        outputs = running.generate(input_ids=[PROMPT] * len(pairs), sampling_params=params)
        for (a, _), output in zip(pairs, outputs, strict=True):
            assert output["output_ids"] == chain[: a + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_limit_inside_a_block_is_exact(running, chain, temperature):
    limits = list(range(1, 17))
    outputs = running.generate(
        input_ids=[PROMPT] * len(limits),
        sampling_params=[greedy(limit, temperature=temperature) for limit in limits],
        return_logprob=True,
    )
    for limit, output in zip(limits, outputs, strict=True):
        assert len(output["output_ids"]) == limit == output["meta_info"]["completion_tokens"]
        assert len(output["meta_info"]["output_token_logprobs"]) == limit
        assert end_of(output) == ("length", limit)
        if temperature == 0.0:
            assert output["output_ids"] == chain[:limit]


def test_context_limit_inside_a_block(running, llama):
    """SGLang keeps two positions of the context in reserve; the drafts of the last blocks would run past it."""
    prompts = [(PROMPT * 6)[:length] for length in (200, 225, 236, 241, 245)]
    outputs = running.generate(
        input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": None, "ignore_eos": True}
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = CONTEXT - 2 - len(prompt)
        assert output["output_ids"] == greedy_chain(llama, prompt, expected)
        assert end_of(output) == ("length", expected)


def test_eos_and_ignore_eos(running, model):
    _, _, chain, eos = model
    stopped, ignored = running.generate(
        input_ids=[PROMPT] * 2, sampling_params=[greedy(60, ignore_eos=False), greedy(60)]
    )
    assert stopped["output_ids"] == chain[: chain.index(eos) + 1]
    assert end_of(stopped) == ("stop", eos)
    assert ignored["output_ids"] == chain[:60]


def test_group_shares_the_prompt_and_differs(running, flush):
    prompt = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(8)).tolist()
    flush(running)
    outputs = running.generate(
        input_ids=prompt,
        sampling_params={"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "n": 6},
    )
    assert len({tuple(output["output_ids"]) for output in outputs}) == 6
    assert all(len(output["output_ids"]) == 24 for output in outputs)
    # All but the last 32 prompt tokens, whose queries select the first index.
    assert [output["meta_info"]["cached_tokens"] for output in outputs] == [32] * 6


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
def test_prompts_shorter_than_the_budget(running, llama, length):
    prompt = PROMPT[-length:]
    output = running.generate(input_ids=prompt, sampling_params=greedy(30))
    assert output["output_ids"] == greedy_chain(llama, prompt, 30)


def test_chunks_of_a_stream_add_up(running):
    params = {"temperature": 1.0, "max_new_tokens": 50, "ignore_eos": True, "sampling_seed": 4}
    whole = running.generate(input_ids=PROMPT, sampling_params=params)
    chunks = list(running.generate(input_ids=PROMPT, sampling_params=params, stream=True))
    assert len(chunks) > 5
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    for earlier, later in itertools.pairwise(chunks):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_seed_reproduces_from_a_warm_cache(running, flush):
    """The first index comes from the same 32 prompt queries, whatever the radix cache holds of the prompt.

    A last prefill chunk of fewer tokens has fewer queries: a response then depends on where it was cut.
    """
    params = {"temperature": 1.0, "max_new_tokens": 50, "ignore_eos": True, "sampling_seed": 4}
    flush(running)
    cold, warm = (running.generate(input_ids=PROMPT, sampling_params=params) for _ in "ab")
    assert (cold["meta_info"]["cached_tokens"], warm["meta_info"]["cached_tokens"]) == (0, len(PROMPT) - 32)
    assert cold["output_ids"] == warm["output_ids"]


def test_logprobs_of_every_kind(running, llama):
    """Sampled, top and chosen tokens of each output position, and the prompt's, against transformers."""
    chosen = [3, 40]
    output = running.generate(
        input_ids=PROMPT,
        sampling_params={"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=chosen,
    )
    meta, tokens = output["meta_info"], output["output_ids"]
    with torch.no_grad():
        logits = llama(torch.tensor([PROMPT + tokens])).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1)
    sampled = expected[range(len(PROMPT) - 1, len(PROMPT) + 39), tokens]
    close = {"rtol": 0, "atol": 1e-4}
    np.testing.assert_allclose([x[0] for x in meta["output_token_logprobs"]], sampled, **close)
    prompt = expected[range(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose([x[0] for x in meta["input_token_logprobs"][1:]], prompt, **close)
    for row, top, ids in zip(
        expected[len(PROMPT) - 1 :],
        meta["output_top_logprobs"],
        meta["output_token_ids_logprobs"],
        strict=True,
    ):
        values, indices = row.topk(3)
        assert [token for _, token, *_ in top] == indices.tolist()
        np.testing.assert_allclose([value for value, *_ in top], values, **close)
        assert [token for _, token, *_ in ids] == chosen
        np.testing.assert_allclose([value for value, *_ in ids], row[chosen], **close)


def test_requests_join_and_leave(running, llama):
    """40 requests of 1 to 60 tokens, started while others run; each gives its own chain, once."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(VOCAB, size=size).tolist() for size in generator.integers(2, 60, size=40)]
    lengths = [1, 60, *generator.integers(1, 60, size=38).tolist()]

    async def request(i: int):
        await asyncio.sleep(0.02 * i)
        return await running.async_generate(input_ids=prompts[i], sampling_params=greedy(lengths[i]))

    async def all_requests():
        return await asyncio.gather(*(request(i) for i in range(40)))

    outputs = running.loop.run_until_complete(all_requests())
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output["output_ids"] == greedy_chain(llama, prompt, length)
    assert len({output["meta_info"]["id"] for output in outputs}) == 40


def test_abort_between_rounds(running, chain, flush):
    """The others are unaffected. SGLang stops a scheduler that goes idle with a leaked row or slot."""

    async def aborted(rid: str):
        stream = await running.async_generate(
            input_ids=PROMPT[:20], sampling_params=greedy(200), rid=rid, stream=True
        )
        async for chunk in stream:
            if chunk["meta_info"]["completion_tokens"] > 20:
                running.tokenizer_manager.abort_request(rid)
        return chunk

    async def mixed():
        others = [running.async_generate(input_ids=PROMPT, sampling_params=greedy(60)) for _ in range(3)]
        return await asyncio.gather(*(aborted(f"abort-{i}") for i in range(3)), *others)

    outputs = running.loop.run_until_complete(mixed())
    for output in outputs[:3]:
        assert output["meta_info"]["finish_reason"]["type"] == "abort"
        assert 20 < output["meta_info"]["completion_tokens"] < 200
    assert [output["output_ids"] for output in outputs[3:]] == [chain[:60]] * 3
    after = running.generate(input_ids=PROMPT, sampling_params=greedy(60))
    assert after["output_ids"] == chain[:60]
    flush(running)


def test_retracted_requests_continue_their_chain(current_engine, model, llama):
    """A pool for a third of the requests, admitted with almost no reserve."""
    generator = np.random.default_rng(1)
    prompts = [generator.integers(VOCAB, size=24).tolist() for _ in range(12)]
    small = {
        **ARGS,
        "s3r_kv_policy": "recompute",
        "max_total_tokens": 600,
        "schedule_conservativeness": 0.01,
    }
    outputs = current_engine(model[0], **small).generate(input_ids=prompts, sampling_params=greedy(100))
    assert sum(output["meta_info"]["num_retractions"] for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["output_ids"] == greedy_chain(llama, prompt, 100)
