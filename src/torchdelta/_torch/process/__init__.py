"""The process that torch runs in: global state, forking, exceptions, versions."""
