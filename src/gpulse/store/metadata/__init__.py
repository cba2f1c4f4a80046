"""Metadata: nodes, runs, sessions, events and processes, in SQLite for one head and in PostgreSQL for several."""
