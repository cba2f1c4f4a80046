"""Charts: one model, one HTML renderer, one matplotlib renderer."""
