"""Bodies of the routes of files and jobs, as the OpenAI API has them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from edged.align.jobs import METHODS
from edged.api.requests import Body, Metadata
from edged.api.responses import Answer
from edged.http.errors import bad_request

_Auto = Literal["auto"]


class Hyperparameters(Body):
    """The hyperparameters of a method; "auto" leaves the choice to edged."""

    n_epochs: _Auto | Annotated[int, Field(ge=1, le=50)] = "auto"
    batch_size: _Auto | Annotated[int, Field(ge=1, le=256)] = "auto"
    learning_rate_multiplier: _Auto | Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = "auto"
    beta: _Auto | Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = "auto"


class MethodHyperparameters(Body):
    """A method's own object."""

    hyperparameters: Hyperparameters | None = None


class JobMethod(Body):
    """How a job learns: the hyperparameters are in the field of the type's name."""

    type: Annotated[str, Field(json_schema_extra={"enum": [*METHODS]})]
    supervised: MethodHyperparameters | None = None
    dpo: MethodHyperparameters | None = None
    ipo: MethodHyperparameters | None = None
    simpo: MethodHyperparameters | None = None
    orpo: MethodHyperparameters | None = None
    kto: MethodHyperparameters | None = None


class JobRequest(Body):
    """`POST /v1/fine_tuning/jobs`."""

    model: Annotated[str, Field(min_length=1, max_length=200)]
    training_file: Annotated[str, Field(min_length=1, max_length=200)]
    validation_file: str | None = None
    suffix: Annotated[str, Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    method: JobMethod | None = None
    hyperparameters: Hyperparameters | None = None
    integrations: list[Any] | None = None
    metadata: Metadata | None = None

    def learned_by(self) -> tuple[str, dict[str, Any]]:
        """Return the method and its hyperparameters, without those that it has none of. Raises ApiError."""
        method = self.method.type if self.method is not None else "supervised"
        if method not in METHODS:
            raise bad_request(f'method "{method[:40]}" is not supported: use {", ".join(METHODS)}', "method.type")
        own: MethodHyperparameters | None = getattr(self.method, method, None)
        given = (own.hyperparameters if own is not None else None) or self.hyperparameters or Hyperparameters()
        return method, given.model_dump(exclude={"beta"} if method == "supervised" else None)


class FileObject(Answer):
    """An uploaded file, or one that a job made."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["fine-tune", "fine-tune-results"]
    status: Literal["processed"]


class Deleted(Answer):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class _Page(Answer):
    object: Literal["list"]
    has_more: bool


class FileList(_Page):
    """A page of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None


class JobError(Answer):
    """The reason why a job failed."""

    code: str
    message: str
    param: str | None


class Job(Answer):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
    error: JobError | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    seed: int
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    result_files: list[str]
    integrations: list[Any]
    metadata: dict[str, str]


class JobList(_Page):
    """A page of jobs."""

    data: list[Job]


class JobReport(Answer):
    """A line of a job's report."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class EventList(_Page):
    """A page of a job's events."""

    data: list[JobReport]


class Checkpoint(Answer):
    """The version of a job after an epoch."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float]


class CheckpointList(_Page):
    """A page of a job's checkpoints."""

    data: list[Checkpoint]
