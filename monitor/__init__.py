"""What healthy means: formats, statistics, thresholds, wire types and policy."""
