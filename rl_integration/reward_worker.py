"""Worker process that compares two answers with `math_verify`; `reward.py` starts it and talks to it by lines.

    {"label": "\\frac12", "answer": "0.5"}  ->  1

It has limits of memory and time, and exits by itself when a comparison exceeds them.
"""

import faulthandler
import json
import os
import resource
import sys

# math_verify gives up after STEP_SECONDS in each of its steps. It cannot where Python itself is busy, as in
# multiplying integers of a billion digits; then the process exits after COMPARE_SECONDS. Ordinary answers take
# below 0.4 s, ten times that on a machine that is busy training: then a right answer must not count as wrong.
STEP_SECONDS = 5
COMPARE_SECONDS = 30.0
MEMORY_BYTES = 4 << 30


def equivalent(label: str, answer: str) -> bool:
    """Whether `answer`, LaTeX or text with formulas between dollar signs, equals `label` mathematically."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    sides = [
        parse(
            side if "$" in side else f"${side}$",
            config,
            extraction_mode="first_match",
            parsing_timeout=STEP_SECONDS,
        )
        for side in (label, answer)
    ]
    return bool(verify(*sides, timeout_seconds=STEP_SECONDS))


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    # What libraries print must not be taken for an answer.
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    equivalent("1", "2")
    for line in sys.stdin:
        faulthandler.dump_traceback_later(COMPARE_SECONDS, exit=True)
        request = json.loads(line)
        print(int(equivalent(request["label"], request["answer"])), file=replies, flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
