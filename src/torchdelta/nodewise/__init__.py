"""Two programs compared node by node: matching, lockstep, taps, modules and local judgement."""
