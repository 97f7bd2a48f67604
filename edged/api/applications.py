"""`GET /v1/applications`, `GET` and `DELETE /v1/applications/{type}`: runs of applications, their costs and times."""

from aiohttp import web

from edged.api.responses import ApplicationList, ApplicationsForgotten, RunList
from edged.api.services import services_of
from edged.http.access import caller_of
from edged.http.errors import ApiError


async def list_applications(request: web.Request) -> ApplicationList:
    """Types of applications by user.

    Runs that are open and that ended, with medians of their calls, cost and time. Admins see those of all.
    """
    return ApplicationList(applications=services_of(request).runs.types(caller_of(request).sees))


async def get_application(request: web.Request) -> RunList:
    """The latest runs of a type.

    Calls, predicted and real cost, seconds, and how much later than under fair sharing each ended.
    """
    name = request.match_info["type"]
    runs = services_of(request).runs.runs(name, caller_of(request).sees)
    if not runs:
        raise _unknown(name)
    return RunList(application=name, runs=runs)


async def forget(request: web.Request) -> ApplicationsForgotten:
    """Forget a type's ended runs.

    What was learned of its demand goes with them, once nobody's are left.
    """
    name = request.match_info["type"]
    count = await services_of(request).runs.forget(name, caller_of(request).sees)
    if not count:
        raise _unknown(name)
    return ApplicationsForgotten(application=name, runs=count)


def _unknown(name: str) -> ApiError:
    return ApiError(404, f'no run of "{name}" is known: see GET /v1/applications', "type", "unknown_application")
