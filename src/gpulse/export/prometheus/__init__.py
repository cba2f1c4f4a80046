"""Readings for Prometheus to scrape: the text format, our names, and DCGM's."""
