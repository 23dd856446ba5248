"""Steps as a run tells them."""

from llamatrain.report.records import StepLine


def line_of(
    step: int, loss: float, lr: float, grad_norm: float | None, tokens: int, seconds: float, speed: float
) -> StepLine:
    return StepLine(
        step=step,
        loss=loss,
        lr=lr,
        grad_norm=grad_norm,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=speed,
    )
