"""gpulse inside the tools people already run."""
