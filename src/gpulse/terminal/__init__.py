"""What people see in a terminal: the one-shot tables, the live view, and the words and units of both."""
