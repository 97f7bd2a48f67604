"""How a box's agent starts the process of a job, so that its end is this box's loss alone."""

from __future__ import annotations

from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle


class QuietHandle(ProcessHandle):
    """A job's process. NVFlare fails a job for all boxes when one reports that its process failed: none reports it."""

    def poll(self) -> Any:
        """Return success, or that nothing is known."""
        code = super().poll()
        return code if code == JobReturnCode.SUCCESS else JobReturnCode.UNKNOWN


class QuietLauncher(ClientProcessJobLauncher):
    """NVFlare's launcher of processes, with handles that keep quiet."""

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Start the process of a job."""
        return QuietHandle(process_adapter=super().launch_job(job_meta, fl_ctx).adapter)
