"""Plans of runs before they start: FLOPs, memory, communication."""
