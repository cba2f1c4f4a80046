"""Pictures of records: what they show, and how it is drawn."""
