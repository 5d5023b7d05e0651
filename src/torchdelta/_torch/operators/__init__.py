"""Registered operators: their names, schemas, fake kernels and torch's database of samples."""
