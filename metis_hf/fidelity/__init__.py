"""What a scheme does to a given model, nothing trained: loss, gradients, operands, layers, cost."""
