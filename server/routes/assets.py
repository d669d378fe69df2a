"""The pages' static files, and Plotly from its own package."""

import gzip
import hashlib
import mimetypes
from functools import lru_cache
from importlib import metadata, resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

from fp8_safeguard.server.problems import Problem

PLOTLY = "plotly.min.js"
COMPRESS_BYTES = 4096

router = APIRouter(include_in_schema=False)


@router.get("/static/{file}")
def static(request: Request, file: str) -> Response:
    """A file of the dashboards package, or Plotly from its own package."""
    if file not in _static_names():
        raise Problem(404, "not-found", f"nothing is served at {request.url.path}; see /openapi.json")
    body, etag = _static_body(file)
    lasting = file == PLOTLY or "v" in request.query_params
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable" if lasting else "no-cache",
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    kind = "text/javascript" if file.endswith(".js") else mimetypes.guess_type(file)[0]
    if accepts_gzip(request) and len(body) > COMPRESS_BYTES:
        body, headers["Content-Encoding"] = _static_gzip(file), "gzip"
    return Response(body, media_type=kind, headers=headers)


def accepts_gzip(request: Request) -> bool:
    """Whether the client unpacks gzip."""
    return "gzip" in request.headers.get("accept-encoding", "")


def plotly_url() -> str:
    """Address of the chart library, new with each of its versions."""
    return f"/static/{PLOTLY}?v={metadata.version('plotly')}"


@lru_cache(maxsize=1)
def asset_version() -> str:
    """One token for all our static files: any change gives pages new addresses for them."""
    tags = (_static_body(name)[1] for name in sorted(_static_names() - {PLOTLY}))
    return hashlib.sha256("".join(tags).encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def _static_names() -> frozenset[str]:
    folder = resources.files("fp8_safeguard.dashboards") / "static"
    return frozenset({PLOTLY, *(entry.name for entry in folder.iterdir() if entry.is_file())})


@lru_cache(maxsize=64)
def _static_body(file: str) -> tuple[bytes, str]:
    """Bytes and ETag, read once a process."""
    if file == PLOTLY:
        body = (resources.files("plotly") / "package_data" / PLOTLY).read_bytes()
    else:
        body = (resources.files("fp8_safeguard.dashboards") / "static" / file).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:20]}"'


@lru_cache(maxsize=64)
def _static_gzip(file: str) -> bytes:
    return gzip.compress(_static_body(file)[0], 6, mtime=0)
