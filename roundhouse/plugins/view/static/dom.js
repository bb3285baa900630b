// Building blocks of the page. Invariant: text becomes a text node and never markup, so nothing that a rollout says can run.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a.name", {href, onclick, title}, child, …)`; children are nodes, text, or nothing. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElement(name || "div"), classes, attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElementNS(SVG, name), classes, attributes, children);
}

function filled(element, classes, attributes, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "vars") for (const [name, number] of Object.entries(value)) element.style.setProperty(`--${name}`, number);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Put new children in place of the old ones. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

/**
 * Make `element` like `wanted`, in place: a node that is still wanted stays the same one. So a press of the mouse in the midst of a
 * redraw is not lost, for which the browser needs the node it began on. Listeners stay too: they may not hold what changes.
 */
export function refresh(element, wanted) {
  const [are, become] = [[...element.childNodes], [...wanted.childNodes]];
  if (are.length !== become.length || are.some((node, k) => node.nodeName !== become[k].nodeName)) return element.replaceChildren(...become);
  are.forEach((node, k) => {
    if (node.nodeType === Node.TEXT_NODE) { if (node.data !== become[k].data) node.data = become[k].data; return; }
    for (const { name } of [...node.attributes]) if (!become[k].hasAttribute(name)) node.removeAttribute(name);
    for (const { name, value } of become[k].attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    refresh(node, become[k]);
    if (node.tagName === "SELECT") node.value = become[k].value;
  });
  return undefined;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${number(value, 1)} s` : `${number(value / 60, 1)} min`;
}

export function moment(epoch) {
  return epoch ? new Date(epoch * 1000).toISOString().replace("T", " ").slice(0, 19) : "–";
}

/** Wait until nobody has called for a while. */
export function calm(action, milliseconds = 180) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

/** A small pie of one colour, or a dot. */
export function dot(kind, title = kind) {
  return h(`i.dot.is-${kind.replace(/[^a-z]/g, "")}`, { title });
}

export function empty(title, ...lines) {
  return h(".empty", {}, h("strong", {}, title), lines.map((line) => h("p", {}, line)));
}
