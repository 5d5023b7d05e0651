"""Run a program: load it, copy it so that no two sides share anything, and observe its stages."""
