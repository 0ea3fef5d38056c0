// The run, elements made of text nodes only, and numbers and hostile text in words.

const RUN = JSON.parse(document.getElementById("run").textContent);
const { config: CONFIG, curves: CURVES, x: X, evaluations: EVALS, trajectories: ALL } = RUN;
const $ = (selector) => document.querySelector(selector);

function node(made, attributes, kids) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== false) made.setAttribute(name, value);
  made.append(...kids.flat().filter((kid) => kid !== null && kid !== undefined && kid !== ""));
  return made;
}
const el = (tag, attributes = {}, ...kids) => node(document.createElement(tag), attributes, kids);
const svg = (tag, attributes = {}, ...kids) =>
  node(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, kids);
const known = (value) => typeof value === "number";
const percent = (value, digits = 1) => (known(value) ? (100 * value).toFixed(digits) + " %" : "—");
const signed = (value, text) => (value < 0 ? "−" : "+") + text(Math.abs(value));
const natural = (a, b) => String(a).localeCompare(String(b), "en", { numeric: true });
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const at = (object, path) =>
  path.split(".").reduce((inner, key) => (inner && Object.hasOwn(inner, key) ? inner[key] : null), object);

function number(value) {
  if (!known(value)) return "—";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e").replace("-", "−");
  return String(+value.toPrecision(3)).replace("-", "−");
}

function duration(seconds) {
  if (!(seconds >= 0)) return "—";
  if (seconds < 1) return +(1000 * seconds).toPrecision(2) + " ms";
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 60
    ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// Controls, marks that turn or hide text, and halves of characters are shown by name.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\ufeff\\ufff9-\\ufffb]|\\udb40[\\udc00-\\udc7f]|" +
    "[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);
const visible = (text) =>
  String(text).replace(HIDDEN, (found) => {
    const code = found.codePointAt(0);
    return code < 32
      ? String.fromCharCode(0x2400 + code)
      : code === 127
        ? "␡"
        : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
