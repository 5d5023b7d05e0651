"""Modes around a program's operations: lifted, noisy, with casts elided, with decisions recorded or replayed."""
