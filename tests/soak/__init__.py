"""Soak test: a whole cluster that runs for a long time, is disturbed now and then, and must stay correct."""
