"""What to start and what to stop: a pure function from events to instructions."""
