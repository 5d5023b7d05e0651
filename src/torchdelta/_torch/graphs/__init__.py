"""FX graphs and their nodes."""
