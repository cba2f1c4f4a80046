"""Programs for the maintainers of gpulse; none of them is installed."""
