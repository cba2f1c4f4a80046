"""The commands: one file a verb. The only room that reads argv and the environment."""
