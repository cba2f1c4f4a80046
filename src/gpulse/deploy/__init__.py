"""Install and manage agents on other machines over ssh."""
