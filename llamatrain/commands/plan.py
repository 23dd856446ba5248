"""The plan of a run as a record, with the numbers of `llamatrain plan`."""

from dataclasses import asdict, dataclass

from llamatrain.compiler.cache import code_cache
from llamatrain.run.request import RunRequest


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Memory and time of a run."""

    total: int  # bytes
    needs: dict[str, int]  # bytes, by what they are for
    excess: str | None  # why it does not fit the memory, if so
    parameters: int
    adapter: dict[str, int]  # parameters of the trained adapter, by group of weights
    base_read: int  # bytes of quantized weights that a step reads from the base's file
    batch: int
    splits: int  # micro-batches per batch
    remat: str
    precision: str
    threads: int
    # this and the following: None if not known, for the reason in `unknown`
    tokens_per_second: float | None
    seconds_of_step: float | None
    seconds: float | None  # of all remaining steps
    speed_measured: float | None  # when this machine's speed was measured: seconds since 1970
    speed_disturbed: float | None  # share of the time that threads waited for other programs meanwhile
    unknown: str = ""

    @property
    def fits(self) -> bool:
        """True if the run fits the memory."""
        return self.excess is None


def plan_request(request: RunRequest, measure: bool = False) -> RunPlan:
    """Plan a run; nothing is read of its data, trained, written or compiled."""
    from llamatrain.planner.cost import base_bytes_read
    from llamatrain.planner.time import forecast_time
    from llamatrain.run.prepare import plan_run
    from llamatrain.run.time_budget import fit_time

    with code_cache.without_compiling():
        planned = plan_run(fit_time(request), graphs=False)
        plan = planned.fitted.plan
        time = forecast_time(planned.fitted.plan, planned.batches, planned.steps, measure)
    forecast = None if isinstance(time, str) else time
    return RunPlan(
        total=plan.total,
        needs={name: size for name, size in asdict(plan.breakdown).items() if size},
        excess=planned.fitted.error,
        parameters=plan.spec.h.parameter_count,
        adapter=planned.fitted.weights.adapter_sizes(plan.spec.h),
        base_read=base_bytes_read(plan, planned.batches),
        batch=plan.spec.batch,
        splits=plan.splits,
        remat=str(plan.policy),
        precision=plan.spec.precision,
        threads=plan.spec.threads,
        tokens_per_second=forecast.tokens_per_second if forecast else None,
        seconds_of_step=forecast.step_seconds if forecast else None,
        seconds=forecast.run_seconds if forecast else None,
        speed_measured=forecast.speeds.measured_at if forecast else None,
        speed_disturbed=forecast.speeds.disturbed if forecast else None,
        unknown=time if isinstance(time, str) else "",
    )
