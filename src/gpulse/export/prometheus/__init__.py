"""Metrics for Prometheus to scrape: the text format, gpulse's names, and DCGM's names."""
