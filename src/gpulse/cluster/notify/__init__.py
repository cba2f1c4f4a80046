"""Notifications of a head: what is sent to whom, and its delivery by mail, chat and webhooks."""
