"""Which operation goes wrong first: rungs of a compiler, causes by setting, and the walk over nodes."""
