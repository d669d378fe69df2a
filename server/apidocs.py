"""A small API page made from /openapi.json, served whole from here."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fp8-safeguard API</title>
<link rel="stylesheet" href="/docs/docs.css">
<h1>fp8-safeguard API</h1>
<p>Made from <a href="/openapi.json">/openapi.json</a>. Errors are problem+json (RFC 9457); where a token is configured, send it
as <code>Authorization: Bearer &lt;token&gt;</code>.</p>
<main id="operations">Loading</main>
<script src="/docs/docs.js"></script>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin: 2rem 0 .2rem; font-size: 1.2rem }
h3 { margin: 1rem 0 .2rem; font-size: 1rem }
h2 + p { margin: 0 0 .6rem; opacity: .8 }
details { border: 1px solid #8886; border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer }
summary code { margin-right: .8rem }
code, pre { font-family: ui-monospace, monospace; font-size: .9rem; overflow-wrap: anywhere }
pre { overflow: auto; max-height: 24rem; padding: .6rem; background: #8882; border-radius: 6px }
.method { display: inline-block; min-width: 5rem; font-weight: 700 }
table { border-collapse: collapse; margin: .4rem 0; display: block; overflow-x: auto }
td, th { border: 1px solid #8886; padding: .2rem .6rem; text-align: left }
"""

_SCRIPT = """
const element = (name, text, kind) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const nameOf = (schema) => schema.$ref && schema.$ref.split("/").pop();
const typeOf = (schema = {}) => {
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return choices.map(typeOf).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "anything"}`;
  const bounds = [schema.minimum, schema.maximum].map((bound) =>
    bound > Number.MAX_SAFE_INTEGER ? "2^63 - 1" : bound ?? "");
  const range = schema.type === "integer" && bounds.some((bound) => bound !== "") ? ` ${bounds.join(" to ")}` : "";
  return `${[schema.type || ""].flat().join(" | ")}${range}`;
};
const table = (titles, rows) => {
  const node = element("table");
  const head = node.createTHead().insertRow();
  for (const title of titles) head.append(element("th", title));
  const body = node.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const cell of cells) row.append(element("td", cell));
  }
  return node;
};
const parameters = (listed) => table(
  ["parameter", "in", "type", "default"],
  listed.map(({ name, in: place, required, schema = {} }) =>
    [name, place, typeOf(schema), required ? "required" : "default" in schema ? String(schema.default) : ""]));
const contents = (content = {}) =>
  Object.entries(content).map(([kind, { schema }]) => `${kind}: ${typeOf(schema)}`).join("; ");
const answers = (responses) => table(
  ["status", "meaning", "content"],
  Object.entries(responses).map(([status, { description, content }]) => [status, description, contents(content)]));
const operation = (path, method, spec) => {
  const details = element("details");
  const line = element("summary");
  line.append(element("span", method.toUpperCase(), "method"), element("code", path), spec.summary || "");
  details.append(line);
  for (const part of (spec.description || "").split("\\n\\n")) details.append(element("p", part));
  if (spec.parameters) details.append(parameters(spec.parameters));
  if (spec.requestBody) {
    const needed = spec.requestBody.required ? "" : " (optional)";
    details.append(element("p", `Body${needed}: ${contents(spec.requestBody.content)}`));
  }
  details.append(answers(spec.responses));
  return details;
};
const schemas = (held) => {
  const nodes = [element("h2", "Schemas")];
  for (const [name, schema] of Object.entries(held)) {
    const details = element("details");
    const line = element("summary");
    line.append(element("code", name), schema.description || "");
    details.append(line, element("pre", JSON.stringify(schema, null, 2)));
    nodes.push(details);
  }
  return nodes;
};
const show = async () => {
  const api = await (await fetch("/openapi.json")).json();
  const main = document.getElementById("operations");
  main.replaceChildren();
  const all = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, spec]) => ({ path, method, spec })));
  for (const { name, description } of api.tags) {
    main.append(element("h2", name), element("p", description));
    for (const { path, method, spec } of all)
      if ((spec.tags || [])[0] === name) main.append(operation(path, method, spec));
  }
  main.append(...schemas(api.components.schemas));
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
