"""Data preparation on small files of the real schemas: what comes out, and what stops it."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import openrlhf_source
import pytest
from s3r_sglang.rl_integration.data import sources
from s3r_sglang.rl_integration.data.prepare import STYLES, prepare
from s3r_sglang.rl_integration.data.sources import SOURCES, DataError
from s3r_sglang.rl_integration.reward import grade
from typer.testing import CliRunner

from s3r_sglang import prompts
from s3r_sglang.cli import app

SAMPLES = Path(sources.__file__).parent / "samples"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(tmp_path, name="dapo-math-17k", **options):
    out = tmp_path / "out.jsonl"
    summary = prepare(name, out, **({"source": SAMPLES / f"{name}.jsonl"} | options))
    return summary, lines(out)


def test_dapo_rows_become_problems_told_apart(tmp_path):
    summary, records = run(tmp_path)
    # Of ten rows one repeats another, and two disagree about the answer of one problem.
    assert (summary.rows, summary.duplicates, summary.conflicts, summary.written) == (10, 1, 1, 7)
    assert all(set(record) == {"id", "messages", "answer", "datasource"} for record in records)
    assert len({record["id"] for record in records}) == 7
    original = [json.loads(line) for line in (SAMPLES / "dapo-math-17k.jsonl").read_text().splitlines()]
    answers = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in original}
    for record in records:
        (message,) = record["messages"]
        assert message["role"] == "user"
        assert record["answer"] == answers[message["content"]]
        assert "20} k" not in message["content"]


@pytest.mark.parametrize(("name", "answers"), [("aime26", {"99", "999", "7"}), ("arxiv-math", None)])
def test_matharena_rows(tmp_path, name, answers):
    summary, records = run(tmp_path, name)
    assert summary.written == 3
    assert summary.paper_rows == {"aime26": 30, "arxiv-math": 103}[name]
    if answers:
        assert {record["answer"] for record in records} == answers
    for record in records:
        assert record["datasource"] == name
        assert grade(f"Answer: {record['answer']}", record["answer"]).correct


def test_styles_frame_the_same_problem(tmp_path):
    _, dapo = run(tmp_path)
    _, boxed = run(tmp_path, style="boxed", force=True)
    assert [record["id"] for record in dapo] == [record["id"] for record in boxed]
    before, after = STYLES["dapo"].split("{}")
    for one, other in zip(dapo, boxed, strict=True):
        problem = one["messages"][0]["content"].removeprefix(before).removesuffix(after)
        content = other["messages"][0]["content"]
        assert (
            content == problem + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
        )


def test_the_order_and_the_split_follow_the_seed_alone(tmp_path):
    _, first = run(tmp_path, seed=1)
    rows = (SAMPLES / "dapo-math-17k.jsonl").read_text().splitlines()
    (tmp_path / "reversed.jsonl").write_text("\n".join(reversed(rows)))
    _, again = run(tmp_path, seed=1, source=tmp_path / "reversed.jsonl", force=True)
    _, other = run(tmp_path, seed=2, force=True)
    assert first == again
    assert first != other
    assert {record["id"] for record in first} == {record["id"] for record in other}
    summary, rest = run(tmp_path, seed=1, holdout=2, limit=5, force=True)
    held = lines(tmp_path / "out.holdout.jsonl")
    assert (summary.written, summary.held_out) == (3, 2)
    assert held + rest == first[:5]


def test_parquet_and_folders_give_the_same(tmp_path):
    import datasets

    _, expected = run(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = datasets.Dataset.from_list(lines(SAMPLES / "dapo-math-17k.jsonl"))
    rows.select(range(6)).to_parquet(folder / "train-0.parquet")
    rows.select(range(6, 10)).to_parquet(folder / "train-1.parquet")
    _, records = run(tmp_path, source=folder, force=True)
    assert records == expected


def broken(tmp_path, change, name="dapo-math-17k"):
    rows = lines(SAMPLES / f"{name}.jsonl")
    change(rows)
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


DRIFT = [
    (lambda rows: rows[2].pop("reward_model"), "row 3 of .* reward_model: .*its columns are"),
    (lambda rows: rows[0].update(prompt="text"), "row 1 of .* prompt"),
    (lambda rows: rows[0]["reward_model"].update(ground_truth=35), "could not be read|ground_truth"),
    (lambda rows: rows[4]["reward_model"].update(ground_truth=" "), "row 5 of .* empty problem or answer"),
    (lambda rows: rows[1]["prompt"].append(rows[1]["prompt"][0]), "row 2 of .* prompt"),
    (lambda rows: rows[0]["prompt"][0].update(content="What is 2 + 2?"), "row 1 of .* not framed"),
]


@pytest.mark.parametrize(("change", "message"), DRIFT)
def test_schema_drift_stops_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        run(tmp_path, source=broken(tmp_path, change))
    assert not (tmp_path / "out.jsonl").exists()


def test_unusable_arguments_are_refused(tmp_path):
    source = SAMPLES / "aime26.jsonl"
    with pytest.raises(DataError, match="no data set 'aime'"):
        prepare("aime", tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="there is no"):
        run(tmp_path, "aime26", source=tmp_path / "absent.parquet")
    with pytest.raises(DataError, match="has neither"):
        run(tmp_path, "aime26", source=tmp_path)
    with pytest.raises(DataError, match="would leave none of 3"):
        run(tmp_path, "aime26", holdout=3)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is not a folder"):
        prepare("aime26", tmp_path / "file" / "out.jsonl", source=source)
    assert prepare("aime26", tmp_path / "new" / "folder" / "out.jsonl", source=source).written == 3
    run(tmp_path, "aime26")
    with pytest.raises(DataError, match="--force"):
        run(tmp_path, "aime26")
    with pytest.raises(DataError, match=r"row 1 of .* columns are data_source, prompt"):
        run(tmp_path, "aime26", source=SAMPLES / "dapo-math-17k.jsonl", force=True)
    assert len(lines(tmp_path / "out.jsonl")) == 3


def test_without_a_hub_the_message_says_what_to_do(tmp_path, monkeypatch):
    """The real library, told that it is offline."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"MathArena/aime_2026 could not be read from the hub .* --source"):
        prepare("aime26", tmp_path / "out.jsonl")


def test_the_command(tmp_path):
    out = tmp_path / "aime.jsonl"
    arguments = ["data", "prepare", "aime26", "--out", str(out), "--source", str(SAMPLES / "aime26.jsonl")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "3 problems, 0 held out, of 3 rows" in done.output
    assert "the paper used 30" in done.output
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 1
    assert "--force" in again.output
    wrong = CliRunner().invoke(app, [*arguments, "--force", "--style", "plain"])
    assert wrong.exit_code == 1
    assert "dapo, boxed" in wrong.output


def test_the_prompt_reader_of_rollouts_takes_the_lines(tmp_path):
    run(tmp_path)
    rows = prompts.load(tmp_path / "out.jsonl")
    assert len(rows) == 7
    assert rows[0].prompt.messages[0].role == "user"


def test_openrlhfs_own_data_set_reads_the_lines(tmp_path, model):
    import datasets
    from transformers import AutoTokenizer

    path = openrlhf_source.find() / "openrlhf" / "datasets" / "prompts_dataset.py"
    spec = importlib.util.spec_from_file_location("prompts_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _, records = run(tmp_path)
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "out.jsonl"), cache_dir=str(tmp_path))[
        "train"
    ]
    keys = {
        "input_key": "messages",
        "label_key": "answer",
        "apply_chat_template": True,
        "image_key": "images",
    }
    strategy = SimpleNamespace(args=SimpleNamespace(data=SimpleNamespace(**keys)), is_rank_0=lambda: True)
    found = module.PromptDataset(rows, AutoTokenizer.from_pretrained(model[0]), strategy)
    for index, record in enumerate(records):
        content = record["messages"][0]["content"]
        assert found[index] == ("dapo-math-17k", f"t2 {content} t3", record["answer"], None)


def test_every_source_has_a_sample():
    assert {path.stem for path in SAMPLES.glob("*.jsonl")} == set(SOURCES)


def test_arithmetic_needs_no_source(tmp_path):
    out = tmp_path / "out.jsonl"
    summary = prepare("arithmetic", out, limit=300, style="boxed", seed=3)
    assert (summary.written, summary.duplicates, summary.conflicts, summary.paper_rows) == (300, 0, 0, None)
    records = lines(out)
    for record in records:
        expression = record["messages"][0]["content"].split("$")[1].replace("\\cdot", "*")
        assert record["answer"] == str(eval(expression, {"__builtins__": {}}))
    prepare("arithmetic", out, limit=300, style="boxed", seed=4, force=True)
    assert lines(out) != records
    with pytest.raises(DataError, match="takes no --source"):
        prepare("arithmetic", out, source=SAMPLES, force=True)
    with pytest.raises(DataError, match="100000 at most"):
        prepare("arithmetic", out, limit=200_000, force=True)


def test_answers_that_became_floats_are_drift(tmp_path):
    def change(rows):
        for row in rows:
            row["answer"] = float(row["answer"])

    with pytest.raises(DataError, match=r"row 1 of .* answer"):
        run(tmp_path, "aime26", source=broken(tmp_path, change, "aime26"))


def test_the_command_prints_file_names_as_they_are(tmp_path):
    path = tmp_path / "[red] absent.parquet"
    arguments = ["data", "prepare", "aime26", "--out", str(tmp_path / "a.jsonl"), "--source", str(path)]
    assert "[red] absent.parquet" in CliRunner().invoke(app, arguments).output


def responses(path, rows):
    """An output file of `s3r rollout`, its fields that are read here."""
    names = ("prompt_id", "text", "finish_reason")
    path.write_text(
        "\n".join(
            json.dumps(
                dict(zip(names, row[:3], strict=True))
                | {"metadata": {"answer": row[3], "datasource": row[4]}}
            )
            for row in rows
        )
    )
    return path


def test_scores_average_over_problems_and_take_truncated_responses_for_wrong(tmp_path):
    path = responses(
        tmp_path / "rollouts.jsonl",
        [
            ("a", r"\boxed{1}", "stop", "1", "aime26"),
            ("a", r"\boxed{2}", "stop", "1", "aime26"),
            ("b", r"\boxed{0.5}", "stop", r"\frac12", "aime26"),
            ("c", "Answer: 3", "length", "3", "aime26"),
            ("d", "none", "stop", "4", "arxiv-math"),
        ],
    )
    done = CliRunner().invoke(app, ["data", "score", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        # 50, 100 and 0 percent.
        "aime26: pass@1 50.00% ± 28.87 (3 problems, 4 responses, 25.0% truncated)",
        "arxiv-math: pass@1 0.00% (1 problems, 1 responses, 0.0% truncated)",
    ]


@pytest.mark.parametrize(
    "text", ["", "{", '{"prompt_id": 1, "text": "x", "finish_reason": "stop", "metadata": null}']
)
def test_what_cannot_be_scored_is_refused(tmp_path, text):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(text)
    done = CliRunner().invoke(app, ["data", "score", str(path)])
    assert done.exit_code == 1
    assert "rollouts.jsonl" in done.output
