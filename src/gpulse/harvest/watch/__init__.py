"""Watch the users of the GPUs and the people at the machine."""
