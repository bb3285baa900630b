"""A container that runs, as in the tests of all kinds of sandboxes."""

from tests.gym.environments.conftest import program, sandbox

__all__ = ["program", "sandbox"]
