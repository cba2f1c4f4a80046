"""Exports: JSON, CSV, SQLite, Prometheus metrics, session files, reports and charts."""
