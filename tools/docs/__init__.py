"""Generators of the documentation: reference pages and man pages, pictures, screenshots, and hooks of the site."""
