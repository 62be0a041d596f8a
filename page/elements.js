// ---- small helpers ----

const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);

// Create an HTML element. `children` are elements or strings. Strings become text nodes, so that
// text written by a model is never parsed as HTML.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Create an SVG element.
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const name in attributes) element.setAttribute(name, attributes[name]);
  element.append(...children);
  return element;
}

// A number as text with about three digits.
function short(x) {
  if (x === null || x === undefined) return "not finite";
  if (Number.isInteger(x)) return String(x);
  if (Math.abs(x) < 1e-9) return "0";  // an error of rounding
  if (Math.abs(x) >= 1000) return Math.round(x).toLocaleString("en");
  if (Math.abs(x) < 0.001) return x.toExponential(1);
  return x.toPrecision(3);
}

// A number with its sign.
const signed = x => (x > 0 ? "+" : "") + short(x);

// The mean of some numbers; null of none.
const mean = values =>
  values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

// Those of some trajectories whose environment did not fail. Only they count in a mean.
const played = held => held.filter(row => row.status !== "env_error");

// Whether a click is one with Shift. A touch has no Shift: a box stands for it, for one touch.
function hasShift(event) {
  const box = $("shift");
  const isWith = event.shiftKey || box.checked;
  box.checked = false;
  return isWith;
}

// A menu. options: [[value, text], ...].
function menu(label, options, onchange) {
  const choices = options.map(([value, text]) => make("option", {value, textContent: text}));
  return make("select", {ariaLabel: label, onchange: event => onchange(event.target.value)},
    ...choices);
}
