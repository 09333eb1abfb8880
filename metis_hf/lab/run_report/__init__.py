"""`metis-hf report`: an HTML page of a training run from what the run left in its directory."""
