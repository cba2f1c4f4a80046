"""Integrations of gpulse into other tools."""
