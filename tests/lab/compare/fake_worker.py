"""A worker that trains nothing: `python fake_worker.py CONFIGS -m MODULE RUN_DIR --with-parent`.

It stands where `metis-hf compare --launcher` starts a worker, and writes a result whose loss
follows from the variant and the seed. CONFIGS has a MetisConfig for each variant.
"""

import json
import sys
from pathlib import Path

configs, run = Path(sys.argv[1]), Path(sys.argv[4])
spec = json.loads((run / "run.json").read_text())
name, seed = spec["variant"]["name"], spec["experiment"]["seed"]
if name == "broken":
    sys.exit("it cannot be trained")
loss = 3.0 + 0.1 * seed + 0.01 * len(name)
for step in (1, 2):
    print(json.dumps({"step": step, "loss": loss + 1 / step}), flush=True)
result = {
    "scheme": name,
    "config": json.loads(configs.read_text())[name] | {"seed": seed},
    "summary": "",
    "loss": loss,
    "tasks": {},
    "seconds_per_step": 0.1,
    "history": [{"step": step, "loss": loss + 1 / step} for step in (1, 2)],
    "seed": seed,
    "parameters": 1000,
    "precision_schedule": spec["variant"]["precision_schedule"],
    "code": {"sha256": "+".join(spec["code"]), "commit": None},
    "store": {"format": 1, "name": "result", "key": spec["key"], "made": {}},
}
(run / "result.json").write_text(json.dumps(result))
