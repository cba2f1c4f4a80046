"""The head over HTTP: the API, its description, the live stream, and who may use them."""
