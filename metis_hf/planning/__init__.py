"""What a run will take, before it starts: FLOPs, memory, communication."""
