"""Planted bugs fail the gate of `test_exactness.py`: it can see each of them.

The bugs are planted in, and removed from, the scheduler process of a running engine (`probes/s3r_probes.py`).
One is a control: a bad index lowers the acceptance and leaves the law of the responses alone.

Noise keyed by position instead of by round biases this gate too little to be seen (p = 0.46); the constructed
case of `tests/stages/test_sampling.py` shows it.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the bugs are planted in the PyTorch references"),
]


@pytest.fixture
def mutant(probed_environment, current_engine, tiny_llama, gate):
    return current_engine(tiny_llama[0], **gate.STARVED)


def run_gate(gate, engine, model, bug: str | None, share: int = 1) -> tuple[float, float]:
    """p-value of the responses' joint law and acceptance, with `bug` planted; of a `share`-th of the samples."""
    engine.collective_rpc("plant", bug=bug)
    try:
        sampling, count = {"temperature": 1.0}, gate.SAMPLES // share
        law = gate.enumerated_law(model, gate.PROMPT, **sampling)
        responses, acceptance = gate.sample(engine, [gate.PROMPT] * count, [sampling] * count)
    finally:
        engine.collective_rpc("plant", bug=None)
    return gate.p_value(responses, law), acceptance


@pytest.mark.parametrize(
    ("bug", "share"),
    [
        ("provisional_kv_kept", 1),
        ("residual_is_p", 4),
        ("verified_at_another_temperature", 2),
        ("q_recomputed", 2),
        ("one_noise_for_all", 1),
    ],
)
def test_gate_sees_the_bug(gate, mutant, tiny_llama, bug, share):
    """With a quarter of the samples p was 3e-2, 1e-27, 1e-9, 5e-11 and 5e-6."""
    p_value, _ = run_gate(gate, mutant, tiny_llama[1], bug, share)
    assert p_value < 1e-6


def test_gate_passes_with_a_bad_index(gate, mutant, tiny_llama):
    sound_p, acceptance = run_gate(gate, mutant, tiny_llama[1], None, share=3)
    p_value, lower = run_gate(gate, mutant, tiny_llama[1], "worst_positions_indexed", share=3)
    assert min(p_value, sound_p) > 1e-4
    assert lower < acceptance - 0.01


@pytest.mark.parametrize("bug", ["kv_row_lost_at_restore", "another_bonus_at_restore"])
def test_gate_across_pause_sees_the_bug(gate, probed_environment, current_engine, tiny_llama, bug):
    """Not `round_redrawn_after_pause`: that biases nobody while whom to pause does not depend on the tokens."""
    engine = current_engine(tiny_llama[0], **gate.PAUSING)
    p_value, _ = run_gate(gate, engine, tiny_llama[1], f"paused_at_random {bug}", share=6)
    assert p_value < 1e-6
