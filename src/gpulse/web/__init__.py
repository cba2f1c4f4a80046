"""HTTP interface of a head: the API, its OpenAPI document, the live stream, the dashboard, and access control."""
