"""Renderings of a Report: each takes the record and nothing else."""
