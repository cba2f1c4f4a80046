"""Agents on other machines, put there over SSH."""
