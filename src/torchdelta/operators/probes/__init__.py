"""Probes: one question each about an operator."""
