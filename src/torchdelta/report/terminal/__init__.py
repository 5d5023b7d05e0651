"""Terminal reports, one module for each kind of record; `style` has the pieces that they share."""
