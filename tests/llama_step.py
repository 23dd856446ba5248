"""Whole training steps of the hand-built llama, as a run does them: for tests and for the benchmark."""

from llamatrain.engine.program import Program
from llamatrain.optim.adamw import schedule_input
from llamatrain.optim.step import AdamW, differentiate, stream
from tests.llama_graph import Size, llama

OPTIMIZER = AdamW()


class LlamaStep:
    """Forward, backward and AdamW as one program over random weights and one batch of random tokens."""

    def __init__(self, size: Size, *, precision: str = "f32", kernels: str = "cpu", threads: int = 1,
                 remat: str = "none", seed: int = 0) -> None:  # fmt: skip
        m = self.model = llama(size)
        made = differentiate(m.loss, m.trained, precision=precision, borders=m.borders, remat=remat)
        self.inputs, outputs = stream(made, OPTIMIZER)
        self.loss, self.memory, self.steps = outputs[0], self.model.random(seed), 0
        self.program = Program.of(outputs, self.memory, kernels=kernels, threads=threads)
        self.batch = {leaf: self.memory[leaf].copy() for leaf in (self.model.tokens, self.model.targets, self.model.weights)}

    def __call__(self, rate: float = 1e-3) -> float:
        """The loss before the update."""
        self.steps += 1
        for leaf, array in self.batch.items():
            self.program[leaf][...] = array
        self.program[self.inputs.schedule][...] = schedule_input(self.steps, rate, OPTIMIZER.beta1, OPTIMIZER.beta2)
        self.program()
        return float(self.program[self.loss])
