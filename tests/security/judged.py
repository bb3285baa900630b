"""An environment that needs a secret, like one with a judge behind an API."""

from __future__ import annotations

import os

from roundhouse.environments.calculator import Calculator


class Judged(Calculator):
    """The calculator, which refuses to start without its key."""

    def __init__(self, api_key: str) -> None:
        super().__init__()
        assert api_key == os.environ["CANARY_JUDGE"], "the secret arrives whole"
        self.api_key = api_key
