"""Whole training steps of a model as a run takes them, for benchmarks and tests."""

from typing import Any

from bench.random_models import Size, llama
from llamatrain.engine.program import Program
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, hold_gradients, streamed_update, update_step

OPTIMIZER = AdamW()
CLIP = 1.0


class LlamaStep:
    """A training step with AdamW over random weights and one batch of random tokens.

    It is one program that streams its gradients, or with `two_programs` one that leaves the gradients in the
    arena and one that clips and applies them. With `int8`, products with frozen weights are in 8-bit integers.
    """

    def __init__(
        self,
        size: Size,
        *,
        precision: str = "f32",
        kernels: str = "cpu",
        threads: int = 1,
        remat: str = "none",
        seed: int = 0,
        two_programs: bool = False,
        int8: bool = False,
    ) -> None:
        model = self.model = llama(size)
        self.memory = model.random(seed)
        self.steps = 0
        backward = differentiate(
            model.loss,
            model.trained,
            precision=precision,
            borders=model.block_inputs,
            remat=remat,
            int8_weights={weight: (weight, weight) for weight in model.frozen} if int8 else None,
        )
        options: dict[str, Any] = {"kernels": kernels, "threads": threads}
        if two_programs:
            gradients = hold_gradients(backward, dense=False)
            self.inputs, _, outputs = update_step(gradients, OPTIMIZER, CLIP)
            self.program = Program.build([backward.loss, *gradients.first], self.memory, **options)
            views = {
                block: self.program.get_view(gradient)
                for block, gradient in zip(gradients.memory, gradients.first, strict=True)
            }
            self.programs = [self.program, Program.build(outputs, self.memory | views, **options)]
        else:
            self.inputs, outputs = streamed_update(backward, OPTIMIZER)
            self.program = Program.build(outputs, self.memory, **options)
            self.programs = [self.program]
        self.loss = backward.loss
        self.arena = self.program.plan.arena
        self.batch = {
            leaf: self.memory[leaf].copy()
            for leaf in (self.model.tokens, self.model.targets, self.model.weights)
        }

    def __call__(self, rate: float = 1e-3) -> float:
        """Take a step and return the loss before the update."""
        self.steps += 1
        for leaf, array in self.batch.items():
            self.program.write(leaf, array)
        self.programs[-1].write(self.inputs.schedule, OPTIMIZER.schedule(self.steps, rate))
        self.program()
        loss = float(self.program.read(self.loss))
        for program in self.programs[1:]:
            program()
        return loss
