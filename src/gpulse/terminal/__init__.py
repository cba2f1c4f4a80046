"""Terminal output: one-shot tables, reports, and the full-screen live view."""
