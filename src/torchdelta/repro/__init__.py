"""One file that shows what was found: it imports torch alone, and exits 1 while the bug is there."""
