"""Effects of a scheme on a model without training: loss, gradients, operands, layers, cost."""
