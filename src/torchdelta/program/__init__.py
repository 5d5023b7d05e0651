"""Programs, independent copies of them (sides), their inputs, stages and observations."""
