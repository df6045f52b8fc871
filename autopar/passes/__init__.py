"""The passes of the search, one a file: each takes the front and what was asked, and yields candidates."""
