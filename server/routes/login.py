"""The page where a browser turns a token into a session."""

from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from fp8_safeguard.server.auth import (
    CHALLENGE,
    SESSION_COOKIE,
    asks_for_tokens,
    find_caller,
    refuse_other_sites,
    session_value,
)
from fp8_safeguard.server.context import InContext
from fp8_safeguard.server.payload import read_limited
from fp8_safeguard.server.routes.pages import render

MOST_FORM_BYTES = 8192
SESSION_SECONDS = 12 * 3600
"""A working day; a token that is revoked or expires ends its sessions at once."""

router = APIRouter(include_in_schema=False)


@router.get("/login")
def login_page(context: InContext, next: str = "/") -> Response:
    """The form; straight on where no token is asked for."""
    if not asks_for_tokens(context):
        return RedirectResponse(local_path(next), status_code=303)
    return render("login.html", next=local_path(next), failed="")


@router.post("/login", dependencies=[Depends(refuse_other_sites)])
async def login(request: Request, context: InContext) -> Response:
    """Check the token and begin a session."""
    body = await read_limited(request.stream(), MOST_FORM_BYTES)
    form = parse_qs(body.decode("utf-8", errors="replace"), keep_blank_values=True, max_num_fields=10)
    secret, place = (form.get(name, [""])[-1] for name in ("token", "next"))
    found = await run_in_threadpool(find_caller, context, secret.strip())
    if found is None:
        said = "This token is unknown, revoked or expired."
        refused = render("login.html", status=401, next=local_path(place), failed=said)
        refused.headers["WWW-Authenticate"] = CHALLENGE
        return refused
    scopes = found[0].scopes
    if not scopes & {"read", "admin"}:
        only = " and ".join(sorted(scopes)) or "no scope"
        said = f"This token has only {only}; a browser needs read."
        return render("login.html", status=403, next=local_path(place), failed=said)
    answer = RedirectResponse(local_path(place), status_code=303)
    answer.set_cookie(
        SESSION_COOKIE,
        session_value(secret.strip()),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout", dependencies=[Depends(refuse_other_sites)])
def logout(request: Request) -> Response:
    """End the session."""
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(
        SESSION_COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return answer


def local_path(place: str) -> str:
    """A place on this server; anything else, where a link from elsewhere may want to lead, is the list of runs."""
    # Browsers read a backslash as a slash, and leave out control characters.
    inside = place.startswith("/") and place.isprintable() and not place.startswith(("//", "/\\"))
    return place if inside else "/"
