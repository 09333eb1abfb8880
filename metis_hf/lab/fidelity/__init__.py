"""Effects of a scheme on a given model, untrained: loss, gradients, operands, layers, cost."""
