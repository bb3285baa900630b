"""The trajectory viewer: a page over the store that shows the policy's rollouts, token by token.

scope ──> index (narrow columns, in memory) ──> page, facets, compare
  └────> detail (one rollout's text and tokens, read from its own part) ──> server · export
"""
