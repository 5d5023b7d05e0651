"""Watch a compiler's passes in the user's run, and check a user's own list of passes."""
