"""Train Hugging Face language models in four bits, emulated exactly on any device."""
