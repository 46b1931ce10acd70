"""Write SUPPORTED.md: what became of each model of the zoo under each technique on 2 ranks, and what is refused.

PYTHONPATH=tests/zoo python -m zoo_supported
"""

import warnings
from pathlib import Path

from zoo_kinds import KINDS, OUTSIDE
from zoo_techniques import OURS, UPDATES, one_process, outcomes

from distlab.comm import run

FILE = Path(__file__).resolve().parents[2] / "SUPPORTED.md"
INTRO = f"""# What is supported

A model of the list below, or a relative of it, is trained by a technique as by one process, or refused in words on
every rank before it goes wrong. Each was trained for {UPDATES} updates of AdamW in float64 on 2 ranks, and \
compared with one
process on the whole batch: *equal* is within 1e-9. A dash: there is nothing to try (no layers that can be cut, or no
stages that equal one process). `make zoo` writes this page; the tests compare it with what the techniques do.

"""
BELOW = """## Outside of the list

FullyShard wants each parameter that trains in exactly one unit: real numbers, plain, on one device, used in its unit's
own forward and in its thread. What is not so is refused. So are a parameter of a class of its own, a block that
torch.jit compiled, runs in a thread of its own or is called by functional_call with other values, weights that forward
changes, and parameters that a loss reads. And these small models:

"""
END = """
Not supported, without a try:

- FullyShard: methods other than forward that read parameters (`generate` of an encoder and decoder): call them inside
  `with model.summon() as module:`, on all ranks.
- FullyShard: a forward that reads a parameter of a different unit, or returns one. Make one unit of both, or leave the
  parameter to the root: `units=[...]`. A list or dict of modules is no unit: it is never called, so its items are.
- FullyShard: an optimizer's step with a closure; groups of parameters by name or shape (`ShardedOptimizer` makes them);
  an optimizer's `zero_grad()` before `synchronize()`: the model's own `zero_grad()` forgets what is on its way.
- Pipeline: a stage that `copy.deepcopy` cannot copy, or that keeps tensors in its class or in a global variable. A copy
  of it runs once for the shapes; a hook of it that is a closure hears of that call, too.
- Optimizers: each class is tried on a few numbers. One that does not work by element (LAMB, Adafactor, Muon) wants
  `ShardedOptimizer(split="tensors")`; one that looks at all parameters at once (LBFGS, SAM) is refused.
- FullyShard: one optimizer for two models that name a tensor alike (build one for each); a state saved or
  loaded inside of `summon()` or of forward.
- torch.compile of the step of a `ShardedOptimizer`, or of an optimizer of FullyShard's shards; others' steps compile.
- Offload of the optimizer alone: `FullyShard(offload=True)` keeps shards, gradients and state in the host's memory.
- FullyShard of a module on the meta device: its shards are zeros. Give each of `model.units` its values with `fill`,
  one unit after the other on every rank, or load a state; buffers are set before.
- Torch's tools on shards (`clip_grad_norm_`, `GradScaler`, sums and norms by hand) are refused: use `clip_gradients_`
  and `distlab.precision.LossScaler`. Hooks of an optimizer see this rank's part.
- Not refused, and of this rank's part alone: `numel`, `len` and `shape` of a shard. Whole parameters are there
  `with model.summon() as module:`.
- Tensor parallel: ranks whose dropout is seeded differently are told only when whole weights drift apart.
- A cut model's `state_dict()`, and with it `save_pretrained` and `save_model`, is refused: `full_state_dict` is the
  whole. `torch.save(model)` writes one rank's part: do not use it. A plain optimizer's state is of the parts, too.
- `parallelize_module`: a plan of your own without `example=`; a model that `copy.deepcopy` cannot copy; heads that are
  counted by an attribute with a name of its own (call it `num_heads`); one layer that makes query, key and value side
  by side for each head (GPT-NeoX, BLOOM), or with fewer keys; a gate that is half of a layer's output (`chunk(2)`);
  `example=` under autocast; sequence parallelism between its layers, which the package's GPT has
  (`parallelize(..., sequence_parallel=True)`). Leave such layers out of the plan: they stay whole.
"""


def cell(said: str) -> str:
    """Return the word of an outcome for the table."""
    return "-" if said.startswith("not tried") else "equal" if said == "equal" else "refused"


def row(name: str, said: list[str]) -> str:
    return f"| {name} | {' | '.join(map(cell, said))} |"


def head() -> str:
    return f"| model | {' | '.join(OURS)} |\n|{'---|' * (len(OURS) + 1)}\n"


def main() -> None:
    warnings.simplefilter("ignore")
    kinds = KINDS | OUTSIDE
    expected = {name: one_process(kind) for name, kind in kinds.items()}
    found = {}
    for technique in OURS:
        said = run(outcomes, 2, args=(technique, kinds, expected), timeout_s=170)[0]
        found |= {(technique, name): text for name, text in said.items()}
    tables = ["".join(f"{row(n, [found[t, n] for t in OURS])}\n" for n in kinds) for kinds in (KINDS, OUTSIDE)]
    words = {n: dict.fromkeys(found[t, n] for t in OURS if cell(found[t, n]) == "refused") for n in OUTSIDE}
    said = "".join(f"- **{name}**: {'; '.join(texts)}\n" for name, texts in words.items())
    FILE.write_text(INTRO + head() + tables[0] + "\n" + BELOW + head() + tables[1] + "\n" + said + END)


if __name__ == "__main__":
    main()
