"""A small API page made from /openapi.json, served whole from here."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fp8-safeguard API</title>
<link rel="stylesheet" href="/docs/docs.css">
<h1>fp8-safeguard API</h1>
<p>Generated from <a href="/openapi.json">/openapi.json</a>. Errors are problem+json (RFC 9457).</p>
<main id="operations">Loading</main>
<script src="/docs/docs.js"></script>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8884; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer }
code { font-family: ui-monospace, monospace }
.method { display: inline-block; min-width: 4.5rem; font-weight: 700 }
table { border-collapse: collapse; margin: .6rem 0 }
td, th { border: 1px solid #8884; padding: .2rem .6rem; text-align: left }
"""

_SCRIPT = """
const element = (name, text, kind) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const typeOf = (schema = {}) =>
  schema.enum ? schema.enum.join(" | ") : schema.anyOf ? schema.anyOf.map(typeOf).join(" | ") : schema.type || "";
const parameters = (listed) => {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const title of ["name", "in", "type", "default"]) head.append(element("th", title));
  const body = table.createTBody();
  for (const { name, in: place, required, schema = {} } of listed) {
    const row = body.insertRow();
    const value = required ? "required" : JSON.stringify(schema.default ?? null);
    for (const text of [name, place, typeOf(schema), value]) row.append(element("td", text));
  }
  return table;
};
const operation = (path, method, { summary, description, parameters: listed }) => {
  const details = element("details");
  const line = element("summary");
  line.append(element("span", method.toUpperCase(), "method"), element("code", path), " " + (summary || ""));
  details.append(line, element("p", description || ""));
  if (listed) details.append(parameters(listed));
  return details;
};
const show = async () => {
  const api = await (await fetch("/openapi.json")).json();
  const main = document.getElementById("operations");
  main.replaceChildren();
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, spec] of Object.entries(methods)) main.append(operation(path, method, spec));
};
show().catch((error) => { document.getElementById("operations").textContent = String(error); });
"""


def page() -> str:
    """The HTML document."""
    return _PAGE


def style() -> str:
    """Its style sheet."""
    return _STYLE


def script() -> str:
    """Its script."""
    return _SCRIPT
