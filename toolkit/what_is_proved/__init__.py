"""Writes the page of what is proved, and by which tests, from a table that names them."""
