"""What several heads share in one directory: facts, and tables of processes. Each head writes its own folder alone."""
