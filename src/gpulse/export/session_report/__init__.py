"""Report on a session file: statistics, gaps, findings and charts."""
