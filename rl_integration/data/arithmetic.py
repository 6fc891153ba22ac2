"""Problems that need no download: arithmetic with small numbers, made from a seed."""

import random

from s3r_sglang.rl_integration.data.sources import Problem


def problems(count: int, seed: int) -> list[Problem]:
    """`count` distinct problems of one or two operations; small models solve some of them, and learn more.

    Raises:
        ValueError: there are not so many.
    """
    if count > 100_000:
        raise ValueError(
            f"there are not {count} different problems of arithmetic here, ask for 100000 at most"
        )
    generator = random.Random(seed)
    made: dict[str, Problem] = {}
    while len(made) < count:
        a, b, c = (generator.randint(2, 99) for _ in range(3))
        text, value = generator.choice(
            [
                (f"{a} + {b}", a + b),
                (f"{a} - {b}", a - b),
                (f"{a} + {b} - {c}", a + b - c),
                (f"{a} \\cdot {b % 9 + 2}", a * (b % 9 + 2)),
                (f"{a} + {b % 9 + 2} \\cdot {c % 9 + 2}", a + (b % 9 + 2) * (c % 9 + 2)),
            ]
        )
        made.setdefault(text, Problem(f"What is ${text}$?", str(value)))
    return list(made.values())
