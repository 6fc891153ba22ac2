"""Entry point that SGLang loads."""


def register() -> None:
    pass
