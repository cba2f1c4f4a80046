"""The metadata: nodes, runs, sessions and events, in SQLite."""
