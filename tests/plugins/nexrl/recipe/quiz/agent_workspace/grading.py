"""Helper module of the evaluator, imported by name."""


def same(answer: str, truth: str) -> bool:
    return answer.strip().lower() == truth.lower()
