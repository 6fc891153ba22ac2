"""What a model does not take is refused, and what is partly new is known: the hooks around SGLang's worker."""

from types import SimpleNamespace

import pytest
import torch
from s3r_sglang.patches import weight_loading


class Model(torch.nn.Module):
    """Loads as SGLang's models do: one pair after the other, unknown names skipped."""

    def __init__(self, tied=False):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.config = SimpleNamespace(tie_word_embeddings=tied)

    def load_weights(self, weights):
        known = dict(self.named_parameters())
        for name, tensor in weights:
            if name in known:
                known[name].data.copy_(tensor)


class Collecting(Model):
    """Takes all pairs before it writes the first."""

    def load_weights(self, weights):
        super().load_weights(list(weights))


class Rank:
    """What of SGLang's worker the hook sees. `others` are the outcomes of the other tensor-parallel ranks."""

    def __init__(self, model, *others):
        self.tp_group = SimpleNamespace(
            world_size=1 + len(others), all_gather_object=lambda one: [one, *others]
        )
        self.model_runner = SimpleNamespace(model=model, server_args=None, tp_group=self.tp_group)


def load(model, weights, monkeypatch, worker=None, hook=weight_loading.load_all_or_refuse):
    monkeypatch.setattr(weight_loading, "serves_rollouts", lambda server_args: True)

    def original(worker, recv_req):
        worker.model_runner.model.load_weights(recv_req)
        return True, "Success"

    return hook(original, worker or Rank(model), weights)


def whole(value):
    return [
        (f"{layer}.{kind}", torch.full(shape, value))
        for layer in ("first", "second")
        for kind, shape in (("weight", (2, 2)), ("bias", (2,)))
    ]


@pytest.mark.parametrize("kind", [Model, Collecting])
def test_known_names_are_loaded_and_the_loader_is_as_before(monkeypatch, kind):
    model = kind()
    assert load(model, whole(3.0), monkeypatch) == (True, "Success")
    assert {parameter.unique().item() for parameter in model.parameters()} == {3.0}
    assert "load_weights" not in vars(model)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_unknown_name_is_refused_wherever_it_stands(monkeypatch, place):
    weights = whole(3.0)
    weights.insert(place, ("module.first.weight", torch.zeros(2, 2)))
    success, message = load(Model(), weights, monkeypatch)
    assert not success
    assert message.startswith(
        "The model has no parameter 'module.first.weight': send weights under the names"
    )


@pytest.mark.parametrize("kind", [Model, Collecting])
def test_none_but_unknown_names_are_counted(monkeypatch, kind):
    weights = [(f"module.{name}", tensor) for name, tensor in whole(3.0)]
    success, message = load(kind(), weights, monkeypatch)
    assert not success
    assert "'module.first.weight' and 3 more:" in message


@pytest.mark.parametrize(
    ("name", "tied", "taken"),
    [
        ("lm_head.weight", True, True),
        ("lm_head.weight", False, False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False, True),
        ("model.layers.0.mlp.experts.7.up_proj.weight", False, True),
    ],
)
def test_what_a_whole_state_dict_has_besides_is_skipped(monkeypatch, name, tied, taken):
    weights = [*whole(3.0), (name, torch.zeros(2))]
    assert load(Model(tied), weights, monkeypatch)[0] is taken


def test_a_wrong_shape_is_an_answer_and_no_exception(monkeypatch):
    model = Model()
    success, message = load(model, [("first.weight", torch.zeros(3, 3))], monkeypatch)
    assert not success
    assert message.startswith("RuntimeError: ")
    assert message.endswith("Nothing has been changed.")
    assert "load_weights" not in vars(model)


def test_a_loader_that_was_wrapped_before_is_as_before(monkeypatch):
    """SGLang's loader for quantised RL puts one of its own on the model."""
    model = Model()
    model.load_weights = own = model.load_weights
    assert load(model, whole(3.0), monkeypatch) == (True, "Success")
    assert model.load_weights is own


def mixed_after(monkeypatch, *updates):
    """Whether the weights are a mixture after each of several updates of one worker."""
    worker, states = Rank(Model()), []
    for weights in updates:
        load(worker.model_runner.model, weights, monkeypatch, worker)
        states.append(weight_loading.ledger_of(worker).mixed)
    return states


WRONG = [("second.bias", torch.zeros(3))]


@pytest.mark.parametrize(
    ("updates", "mixed"),
    [
        ([whole(1.0), WRONG], [False, False]),
        ([whole(1.0) + WRONG], [True]),
        ([whole(1.0)[:2], WRONG], [False, True]),
        ([whole(1.0)[:2] + WRONG, whole(1.0)[:3], whole(1.0)[3:]], [True, True, False]),
        ([whole(1.0)[:2] + WRONG, whole(1.0)[2:], whole(1.0)[:2]], [True, True, False]),
        ([whole(1.0)[:2], whole(1.0)[2:] + WRONG, whole(1.0)[2:]], [False, True, True]),
        ([whole(1.0)[:2], whole(1.0)[2:], WRONG], [False, False, False]),
    ],
    ids=[
        "failed before it wrote",
        "failed in its last tensor",
        "second bucket failed",
        "repeated in two buckets",
        "repeated in another order",
        "only what failed repeated",
        "failed after a whole one",
    ],
)
def test_a_mixture_lasts_from_a_failure_half_way_to_a_complete_update(monkeypatch, updates, mixed):
    assert mixed_after(monkeypatch, *updates) == mixed


@pytest.mark.parametrize("wrote", [False, True])
def test_a_failure_of_another_rank_is_one_of_all(monkeypatch, wrote):
    """SGLang answers with the outcome of the first rank, and the others' weights would be old."""
    worker = Rank(Model(), (False, "RuntimeError: rank 1", wrote, False))
    assert load(worker.model_runner.model, [], monkeypatch, worker) == (
        False,
        "RuntimeError: rank 1 "
        + (
            "The weights may be partly new: send all of them again." if wrote else "Nothing has been changed."
        ),
    )
    assert weight_loading.ledger_of(worker).mixed is wrote


def test_a_folder_without_some_of_the_parameters_is_refused(monkeypatch):
    worker = Rank(Model())
    model, hook = worker.model_runner.model, weight_loading.load_whole_or_refuse
    extra = [("model.mtp.weight", torch.zeros(1))]
    assert load(model, whole(1.0) + extra, monkeypatch, worker, hook) == (True, "Success")
    success, message = load(model, whole(2.0)[:2], monkeypatch, worker, hook)
    assert not success
    assert message.startswith("The folder has no weights for 'second.weight' and 1 more.")
    assert weight_loading.ledger_of(worker).mixed
    assert load(model, whole(2.0), monkeypatch, worker, hook)[0]
    assert not weight_loading.ledger_of(worker).mixed


def test_formats_that_bypass_the_loader_are_watched_too(monkeypatch):
    worker = Rank(Model())
    request = SimpleNamespace(serialized_named_tensors=[], load_format="direct")

    def original(worker, recv_req):
        worker.model_runner.model.first.weight.data.copy_(torch.ones(2, 2))
        raise KeyError("second.wight")

    monkeypatch.setattr(weight_loading, "serves_rollouts", lambda server_args: True)
    assert not weight_loading.load_all_or_refuse(original, worker, request)[0]
    assert weight_loading.ledger_of(worker).mixed
