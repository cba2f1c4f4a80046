"""How commands speak to a head, or to the directory of one that is gone."""
