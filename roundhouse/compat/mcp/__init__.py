"""Tools of MCP servers in an environment, and an environment's tools over MCP."""
