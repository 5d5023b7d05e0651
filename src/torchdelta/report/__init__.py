"""Renderers of records: records in, text out, no torch."""
