"""HTTP routes: they parse a request, call one service, and answer."""
