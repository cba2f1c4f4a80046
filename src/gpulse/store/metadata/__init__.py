"""The book: nodes, runs, sessions and events, in SQLite."""
