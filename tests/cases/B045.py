"""B045: both splits are the same four problems."""

from roundhouse.environments.calculator import Calculator


class World(Calculator):
    def tasks(self, split):
        return list(super().tasks("train"))[:4]
