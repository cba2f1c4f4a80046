"""Client of a head, for the commands; also reads the data directory of a head that does not run."""
