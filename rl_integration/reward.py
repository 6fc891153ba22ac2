"""Verifiable reward for mathematics: find the final answer of a response and compare it with the label.

Extraction follows DeepScaleR (the paper's appendix C.1), and DAPO's prompt: what counts is the last `\\boxed{…}`
or the last `Answer: …`, whichever comes later, after the end of the thinking part. Without one, it is wrong.

Equivalence is decided by `math_verify` (sympy). It runs in worker processes that end when an answer such as
`9^{9^{9^9}}` takes too long: its own limits are SIGALRM handlers, which raise outside of a main thread, where
OpenRLHF calls rewards, and cannot interrupt a long multiplication. The answers of DAPO-MATH-17k and AIME are
integers; they seldom get there.
"""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

# The longest answer of MATH-500 has 159 characters; a "final answer" beyond this is not one.
MAX_ANSWER_CHARS = 1000
WORKERS = max(1, min(4, os.cpu_count() or 1))

Reason = Literal["correct", "wrong", "no_answer", "unfinished_thought", "undecided"]

_ANSWER_LINE = re.compile(r"\banswer\b[*_\s]*[:：][*_\s]*([^\n]+)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPECIAL_TOKEN = re.compile(r"<\|[^<>|]{1,40}\|>|</?s>|<(?:eos|pad|bos)>")
_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_SEPARATOR = r"(?:,|\\,|\{,\})"
_THOUSANDS = re.compile(rf"[+-]?\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?:\.\d+)?")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*[A-Za-z]{2}[^{}]*)\}")
# Full-width forms, as Chinese text has them, and the minus signs of typography.
_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {ord(c): "-" for c in "−–—﹣"}
_MARKUP = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("`", "`"))


@dataclass(frozen=True)
class Verdict:
    """Outcome for one response.

    Attributes:
        answer: what was extracted, None if nothing was.
        reason: "undecided" if the comparison had to be stopped; counts as wrong.
    """

    answer: str | None
    reason: Reason

    @property
    def correct(self) -> bool:
        """Whether the answer is equivalent to the label."""
        return self.reason == "correct"


def extract_answer(response: str) -> str | None:
    """The final answer in `response` (thinking part removed), without markup around it; None if there is none."""
    boxes, lines = list(_BOX.finditer(response)), list(_ANSWER_LINE.finditer(response))
    if boxes and (not lines or boxes[-1].start() > lines[-1].start()):
        answer = _balanced(response, boxes[-1].end())
    else:
        answer = lines[-1].group(1) if lines else None
    if answer is None or len(answer.strip()) > MAX_ANSWER_CHARS:
        return None
    return _unwrap(answer) or None


def _balanced(text: str, start: int) -> str | None:
    """`text` from `start`, just inside a brace, to the brace that closes it; None if it is never closed."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[start:index]
        index += 1
    return None


def _unwrap(answer: str) -> str:
    """Strip white space, the full stop of a sentence, and math or Markdown delimiters around all of `answer`."""
    previous = None
    while answer != previous:
        previous = answer
        answer = answer.strip().removesuffix(".").removesuffix("**").removeprefix("**").strip()
        for left, right in _MARKUP:
            inner = answer[len(left) : len(answer) - len(right)]
            if answer.startswith(left) and answer.endswith(right) and inner and left not in inner:
                answer = inner
    return answer


def grade(response: str, label: str, *, open_thought: bool = False) -> Verdict:
    """Grade one response, see `grade_all`."""
    return grade_all([response], [label], open_thought=[open_thought])[0]


def grade_all(
    responses: Sequence[str], labels: Sequence[str], *, open_thought: Sequence[bool] | None = None
) -> list[Verdict]:
    """Grade responses against their labels; hard comparisons run in parallel. Thread-safe.

    Args:
        responses: generated text, without the prompt; special tokens may be in it.
        labels: ground truth: a number, or LaTeX with or without delimiters.
        open_thought: whether the prompt has opened the thinking part already (`<think>` at its end), so that a
            response without `</think>` has never left it.

    Raises:
        ValueError: a label is missing or empty, so that nothing could be right.
    """
    opened = open_thought or [False] * len(responses)
    for label in labels:
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"a mathematics reward needs a label for every prompt, got {label!r}")
    jobs = list(zip(responses, labels, opened, strict=True))
    if len(jobs) == 1:
        return [_grade(*jobs[0])]
    with ThreadPoolExecutor(WORKERS) as threads:
        return list(threads.map(_grade, *zip(*jobs, strict=True)))


def _grade(response: str, label: str, open_thought: bool) -> Verdict:
    _, closed, final = response.rpartition("</think>")
    if not closed and (open_thought or "<think>" in response):
        return Verdict(None, "unfinished_thought")
    answer = extract_answer(_SPECIAL_TOKEN.sub(" ", final))
    if answer is None:
        return Verdict(None, "no_answer")
    equal = equal_as_text(answer, label)
    if equal is None:
        equal = _workers.compare(_canonical(label), _canonical(answer))
    if equal is None:
        # Never a reason to lose a training step.
        logger.warning("the comparison of %.80r with %.80r was stopped", answer, label)
        return Verdict(answer, "undecided")
    return Verdict(answer, "correct" if equal else "wrong")


def equal_as_text(answer: str, label: str) -> bool | None:
    """Whether two answers are equal, if that can be told without algebra: equal text, two integers, two words."""
    left, right = _canonical(answer), _canonical(label)
    if left == right:
        return True
    integers = [_INTEGER.fullmatch(side) for side in (left, right)]
    if integers[0] and integers[1]:
        # As text: Python refuses to parse integers of more than 4,300 digits.
        signs = [match.group(1) == "-" and match.group(2) != "0" for match in integers if match]
        return signs[0] == signs[1] and integers[0].group(2) == integers[1].group(2)
    words = [_WORDS.fullmatch(side) for side in (left, right)]
    if words[0] or words[1]:
        # Algebra would take words for products of letters, and anagrams for equal.
        plain = [_WORDS.sub(r"\1", side).casefold() for side in (left, right)]
        if all(re.fullmatch(r"[a-z ]+", side) for side in plain):
            return plain[0].split() == plain[1].split()
    return None


def _canonical(answer: str) -> str:
    text = " ".join(_unwrap(answer).translate(_ASCII).split())
    # Only where it is the whole answer: (1,234) is a pair.
    return re.sub(_SEPARATOR, "", text) if _THOUSANDS.fullmatch(text) else text


class _Workers:
    """Processes of `reward_worker.py`, started when needed, at most WORKERS; they end with this process.

    Plain subprocesses: those of multiprocessing would import the main module, which in a training script means
    torch, in each of them.
    """

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[str]] = []
        self._slots = threading.Semaphore(WORKERS)

    def compare(self, label: str, answer: str) -> bool | None:
        """Whether the two are equivalent; None if the worker gave up."""
        with self._slots:
            try:
                worker = self._idle.pop()
            except IndexError:
                worker = self._start()
            assert worker.stdin is not None
            assert worker.stdout is not None
            try:
                worker.stdin.write(json.dumps({"label": label, "answer": answer}) + "\n")
                worker.stdin.flush()
                reply = worker.stdout.readline()
            except OSError:
                reply = ""
            if reply not in ("0\n", "1\n"):
                worker.kill()
                worker.communicate()
                return None
            self._idle.append(worker)
            return reply == "1\n"

    @staticmethod
    def _start() -> "subprocess.Popen[str]":
        require_math_verify()
        return subprocess.Popen(
            [sys.executable, "-m", "s3r_sglang.rl_integration.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )


def require_math_verify() -> None:
    """Raise ModuleNotFoundError, with what to do, if the comparisons could not run here."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            f"grading mathematics needs math-verify, which {sys.executable} does not have: pip install math-verify"
        )


_workers = _Workers()


def _forget_workers() -> None:
    global _workers
    _workers = _Workers()


# A forked child must not read the answers that its parent waits for.
os.register_at_fork(after_in_child=_forget_workers)


def split_query(query: str, prompt: str) -> str | None:
    """The response within `query`, the decoded prompt and response; None if the prompt is not found in it.

    Tokenizers may add a start token, and OpenRLHF cuts the beginning off prompts that are too long; then the
    prompt's end is looked for.
    """
    for part in (prompt, prompt[-64:]):
        start = query.find(part)
        if part and start >= 0:
            return query[start + len(part) :]
    return None


def openrlhf_reward(correct: float, incorrect: float) -> Callable[..., dict[str, Any]]:
    """A `reward_func` for OpenRLHF's `--reward.remote_url file.py` with these two values.

    Its result holds, per query, `rewards`, `scores` (1 if correct, else 0; OpenRLHF filters groups by it) and
    logs: shares of responses without an answer, of comparisons that were stopped, and of queries whose prompt
    was not found.

    Raises:
        ModuleNotFoundError: math-verify is missing. OpenRLHF loads the file when it starts its engines, while an
            error in a reward ends nothing there.
    """
    require_math_verify()

    def reward_func(
        queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
    ) -> dict[str, Any]:
        import torch

        parts = [split_query(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
        for query, part in zip(queries, parts, strict=True):
            if part is None:
                logger.warning("prompt not found in the decoded query, graded as wrong: %.200r", query)
        opened = [prompt.rstrip().endswith("<think>") for prompt in prompts]
        try:
            verdicts = grade_all([part or "" for part in parts], labels, open_thought=opened)
        except ValueError as error:
            # OpenRLHF would mention the exception at level INFO only.
            logger.error("%s: set --data.label_key", error)
            raise
        right = torch.tensor([float(verdict.correct) for verdict in verdicts])
        return {
            "rewards": torch.where(right > 0, correct, incorrect),
            "scores": right,
            "extra_logs": {
                "no_answer": torch.tensor([float(verdict.answer is None) for verdict in verdicts]),
                "undecided": torch.tensor([float(verdict.reason == "undecided") for verdict in verdicts]),
                "prompt_not_found": torch.tensor([float(part is None) for part in parts]),
            },
        }

    return reward_func
