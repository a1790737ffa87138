"""`lintx` with two more engines, which show on a CPU what sums in bfloat16 cost: `rounded_sums.py eval CHECKPOINT ..`.

`rounded` stores the sums of `linear` as `cuda-fused:state=bf16` does: rounded whenever they absorb `FOLD` positions.
Other mechanisms, and `linear` with `rounded-each`, round them in every step. The rest is the model's own float32 step.
"""

from torch import Tensor

from linformer_cli.__main__ import main
from linformer_cli.attention.linear import LinearState
from linformer_cli.attention.parts.folded_sums import FOLD
from linformer_cli.sampling.engines import ENGINES, ReferenceEngine


class RoundedEngine(ReferenceEngine):
    name = "rounded"
    fold = FOLD

    def step(self, tokens_t: Tensor) -> Tensor:
        place = int(self._state.embedding.position) if self._state is not None else 0
        found = super().step(tokens_t)
        for layer in self._state.layers:
            if not isinstance(layer, LinearState) or (place + 1) % self.fold == 0:
                layer.s.copy_(layer.s.bfloat16())
        return found


class OftenRoundedEngine(RoundedEngine):
    name, fold = "rounded-each", 1


if __name__ == "__main__":
    ENGINES.update({engine.name: engine for engine in (RoundedEngine, OftenRoundedEngine)})
    main()
