"""Pages that are generated from the sources, and what generates them."""
