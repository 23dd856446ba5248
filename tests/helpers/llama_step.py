"""Whole training steps of the model, as a run does them: for tests and for the benchmark."""

from llamatrain.engine.program import Program
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, hold_gradients, streamed_update, update_step
from tests.helpers.random_models import Size, llama

OPTIMIZER = AdamW()
CLIP = 1.0


class LlamaStep:
    """Forward, backward and AdamW over random weights and one batch of random tokens.

    As one program that streams its gradients; or `kept`, as two: gradients, which stay in the arena, and the clipped step.
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
        kept: bool = False,
    ) -> None:
        m = self.model = llama(size)
        self.memory, self.steps = self.model.random(seed), 0
        made = differentiate(m.loss, m.trained, precision=precision, borders=m.block_inputs, remat=remat)
        how = {"kernels": kernels, "threads": threads}
        if kept:
            held = hold_gradients(made, dense=False)
            self.inputs, _, outputs = update_step(held, OPTIMIZER, CLIP)
            self.program = Program.build([made.loss, *held.first], self.memory, **how)
            grads = {
                block: self.program.get_view(grad)
                for block, grad in zip(held.memory, held.first, strict=True)
            }
            self.programs = [self.program, Program.build(outputs, self.memory | grads, **how)]
        else:
            self.inputs, outputs = streamed_update(made, OPTIMIZER)
            self.program = Program.build(outputs, self.memory, **how)
            self.programs = [self.program]
        self.loss, self.arena = made.loss, self.program.plan.arena
        self.batch = {
            leaf: self.memory[leaf].copy()
            for leaf in (self.model.tokens, self.model.targets, self.model.weights)
        }

    def __call__(self, rate: float = 1e-3) -> float:
        """The loss before the update."""
        self.steps += 1
        for leaf, array in self.batch.items():
            self.program.write(leaf, array)
        self.programs[-1].write(self.inputs.schedule, OPTIMIZER.schedule(self.steps, rate))
        self.program()
        loss = float(self.program.read(self.loss))
        for further in self.programs[1:]:
            further()
        return loss
