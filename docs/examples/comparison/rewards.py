def correct(completions, answer, **kwargs):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
