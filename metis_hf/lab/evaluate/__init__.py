"""Evaluation with lm-eval: of a model in memory, of checkpoints, and from lm-eval's command line.

`evaluate_model` evaluates a model in memory, `metis-hf eval` (module `command`) evaluates
checkpoints, and `harness` is the model for lm-eval's own command line. Importing this package
imports neither lm_eval nor datasets.
"""

from metis_hf.lab.evaluate.held_out import held_out_loss
from metis_hf.lab.evaluate.in_memory import evaluate_model
from metis_hf.lab.evaluate.results import HEADLINE_METRICS, EvalResult
from metis_hf.lab.evaluate.tasks import TaskSpec

__all__ = ["HEADLINE_METRICS", "EvalResult", "TaskSpec", "evaluate_model", "held_out_loss"]
