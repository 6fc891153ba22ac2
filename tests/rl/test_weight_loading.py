"""Weights that a model does not take are refused: the hook around SGLang's worker, with loaders of each kind."""

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


def load(model, weights, monkeypatch):
    monkeypatch.setattr(weight_loading, "serves_rollouts", lambda server_args: True)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, server_args=None))

    def original(worker, recv_req):
        worker.model_runner.model.load_weights(recv_req)
        return True, "Success"

    return weight_loading.load_all_or_refuse(original, worker, weights)


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
    assert message.endswith("send all of them again.")
    assert "load_weights" not in vars(model)
