"""The audit of a check: plant faults in a program, and count how many the check catches."""
