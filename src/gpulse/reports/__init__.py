"""Figures of jobs, users and nodes over time, from a store's answers."""
