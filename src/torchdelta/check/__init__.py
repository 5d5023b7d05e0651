"""One check: the baseline, the candidate, the questions asked of both, and the report."""
