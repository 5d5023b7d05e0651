"""Frozen data without torch: what is asked, what was seen, what follows, and its JSON."""
