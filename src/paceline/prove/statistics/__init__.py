"""The arithmetic of proof on arrays: ratios of totals, their intervals, bounds that hold for many cells at once. Knows no records."""
