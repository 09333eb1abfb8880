"""lm-eval's model `metis`: HFLM that loads Metis checkpoints and counts NaN and truncation.

`lm_eval --model metis --model_args pretrained=DIR,precision=dense` if lm-eval loads plug-ins;
`python -m metis_hf.lab.evaluate --model metis ...` if it does not (0.4.13). Importing this module
imports lm_eval, so other modules import it only when they need it.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

import metis_hf.conversion.hub  # noqa: F401  registers the checkpoint format with transformers
from metis_hf.conversion.convert import metis_layers, to_dense
from metis_hf.deploy.packed_layouts import COMPRESSED
from metis_hf.lab.model_source import open_checkpoint
from metis_hf.schemes import import_schemes

PRECISIONS = ("scheme", "dense")


@register_model("metis")
class MetisLM(HFLM):
    """HFLM with a choice of precision.

    Args:
        pretrained: a checkpoint or run directory, the name of a model on a hub, or a model.
        precision: "scheme" evaluates in the scheme that the model was trained in, "dense" with the
            dense weights that it represents.
        tokenizer: as for HFLM; by default the checkpoint's.
        softmax_dtype: as for HFLM, for log-probabilities.
        kwargs: HFLM's other arguments, and `import`: a Python file or module that registers
            schemes, or a list of some, as `import_schemes` takes them.

    Attributes:
        truncated: requests longer than the context, truncated on the left.
        truncated_tokens: tokens that these requests lost.
        nonfinite: per task, requests whose log-likelihood is NaN.
    """

    def __init__(
        self,
        pretrained: Any,
        precision: str = "scheme",
        tokenizer: Any = None,
        softmax_dtype: Any = "float32",
        **kwargs: Any,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}; expected one of {', '.join(PRECISIONS)}")
        sources = kwargs.pop("import", None) or []  # no parameter can have this name
        for source in [sources] if isinstance(sources, str) else sources:
            import_schemes(source)
        if isinstance(pretrained, str) and Path(pretrained).is_dir():
            checkpoint = open_checkpoint(Path(pretrained))
            checkpoint.check(precision)
            own = checkpoint.tokenizer(tokenizer if isinstance(tokenizer, str) else None)
            pretrained = str(checkpoint.path)
            if checkpoint.adapter is not None or checkpoint.scheme == COMPRESSED:
                tokenizer = own
                found = torch.accelerator.current_accelerator(check_available=True)
                device = torch.device(kwargs.get("device") or found or "cpu")
                dtype = str(kwargs.pop("dtype", "auto")).removeprefix("torch.")
                pretrained = checkpoint.load(precision, dtype, device)
        self.precision = precision
        self.truncated = 0
        self.truncated_tokens = 0
        self.nonfinite: Counter[str] = Counter()
        self._rolling = False
        super().__init__(pretrained, tokenizer=tokenizer, softmax_dtype=softmax_dtype, **kwargs)

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            # HFLM passes on the quantization_config that it read from the checkpoint.
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            super()._create_model(*args, **kwargs)
        if self.precision == "dense" and any(metis_layers(self._model)):
            to_dense(self._model)

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        results = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._count_nan(requests, [value for value, _ in results])
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        bar = tqdm(desc="Rolling likelihood", unit=" windows", disable=disable_tqdm)
        self._rolling = True
        try:
            with bar as self._windows:
                results = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self._rolling = False
        self._count_nan(requests, results)
        return results

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        ids = super().tok_encode(string, *args, **kwargs)
        # HFLM prepends the prefix token to each text of a rolling likelihood, even if the text
        # already begins with it: the second one would be scored.
        return ids[1:] if self._rolling and ids[:1] == [self.prefix_token_id] else ids

    def _count_nan(self, requests, values: list[float]) -> None:
        for request, value in zip(requests, values, strict=True):
            if math.isnan(value):
                self.nonfinite[request.task_name] += 1

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs=None):
        for _, context, continuation in requests:
            cut = len(context) + len(continuation) - (self.max_length + 1)
            self.truncated += cut > 0
            self.truncated_tokens += max(cut, 0)
        # A rolling likelihood arrives batch by batch; HFLM would show a bar for each batch.
        rolling = override_bs is not None
        hide = disable_tqdm or rolling
        found = super()._loglikelihood_tokens(requests, disable_tqdm=hide, override_bs=override_bs)
        if rolling:
            self._windows.update(len(requests))
        return found
