"""Nodes, runs, sessions, events and processes: SQLite for one head, PostgreSQL where several share them."""
