"""Commands under the names of the tools that gpulse replaces."""
