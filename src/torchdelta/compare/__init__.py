"""Hold two values against each other: align, check the contract, measure, judge."""
