"""The commands, one module each; the only package that reads argv and the environment."""
