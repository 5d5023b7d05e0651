"""Plant faults in a program, and count what a check catches."""
