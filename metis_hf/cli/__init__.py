"""The commands of `metis-hf`, a module each: options, and a call of the code that does the work.

No module here imports more than the standard library and typer before its command runs, so that
help and errors of usage come at once; torch and transformers take seconds.
"""
