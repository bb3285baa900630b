"""The trajectory viewer: a page over the store that shows the policy's rollouts, token by token.

scope ──> index (narrow columns, in memory) ──> page, facets, compare
  └────> detail (one rollout's text and tokens, read from its own part) ──> server · export
"""

from __future__ import annotations

from roundhouse.plugins import Plugin

PLUGINS = {
    "command.view": Plugin(
        f"{__name__}.command:view",
        traits="Inspect the policy's work: rollouts, groups, conversations, tokens, quarantine. Read-only, on this machine "
        "only.",
    )
}
