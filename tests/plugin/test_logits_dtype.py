"""Draft and verification keep the logits' type; every other forward gets SGLang's float32 logits."""

import pytest
import torch

VOCAB = 10


@pytest.fixture
def copy_logits(plugin, make_args, monkeypatch):
    """`_copy_logits_to_buffer` of a LogitsProcessor under some algorithm, as the hooks leave it."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.runtime_context import get_context

    def copy(algorithm, mode, logits, buffer=None, softcap=None):
        processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(processor)
        processor.vocab_size, processor.final_logit_softcapping = VOCAB, softcap
        monkeypatch.setattr(get_context(), "_server_args", make_args(speculative_algorithm=algorithm))
        metadata = LogitsMetadata(mode, next_token_logits_buffer=buffer)
        return processor._copy_logits_to_buffer(logits, metadata)

    return copy


@pytest.fixture
def logits():
    """Of a vocabulary padded for tensor parallelism."""
    return torch.randn(3, VOCAB + 6, dtype=torch.bfloat16)


def test_a_draft_step_copies_nothing(copy_logits, logits):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    kept = copy_logits("SELF_SPARSE", ForwardMode.DECODE, logits)
    assert kept.data_ptr() == logits.data_ptr()
    assert kept.shape == (3, VOCAB)


def test_verification_fills_the_shared_buffer(copy_logits, logits):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    buffer = torch.full((5, VOCAB), torch.nan)
    kept = copy_logits("SELF_SPARSE", ForwardMode.TARGET_VERIFY, logits, buffer[:3])
    assert kept.data_ptr() == buffer.data_ptr()
    assert kept.is_contiguous()
    assert torch.equal(kept, logits[:, :VOCAB])
    assert buffer[3:].isnan().all()


@pytest.mark.parametrize(
    ("algorithm", "mode", "softcap"),
    [("SELF_SPARSE", "EXTEND", None), ("SELF_SPARSE", "DECODE", 30.0), (None, "DECODE", None)],
)
def test_others_get_float32(copy_logits, logits, algorithm, mode, softcap):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    got = copy_logits(algorithm, ForwardMode[mode], logits, softcap=softcap)
    assert got.dtype == torch.float32
    assert torch.equal(got, logits[:, :VOCAB].float())
