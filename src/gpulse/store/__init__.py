"""What a cluster keeps on disk: the log that every received batch goes through before it is acknowledged."""
