// Elements, numbers and words: what every part of the page is made of.

/** An element with properties (`class`, `on…`, attributes) and children; null and false children are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== false && child !== undefined));
  return element;
}

/** One of the icons in the page. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text, touching the document only when it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

let announced = 0;

/** Have a screen reader say something when it has nothing else to say. */
export function announce(text) {
  // The same words twice are two messages.
  byId("announcer").textContent = text + (announced++ % 2 ? "\u00a0" : "");
}

/** A number with so many digits after the point; – where there is none. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  // Rounded first: nothing is not minus nothing.
  const rounded = Math.round(value * 10 ** digits) / 10 ** digits + 0;
  return rounded.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** So many of something. */
export const plural = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** With a sign. */
export const signed = (value, digits = 1) => (value > 0 && number(value, digits) !== number(0, digits) ? "+" : "") + number(value, digits);

/** A share as a percentage; – where there is none. */
export const percent = (share) => (share === null || share === undefined ? "–" : `${number(share * 100)} %`);

/** Milliseconds with as many digits as they are worth. */
export const milliseconds = (value) => `${number(value, value < 10 ? 1 : 0)} ms`;

/** A size in MiB or GiB. */
export function bytes(size) {
  const mib = size / 2 ** 20;
  return mib < 1000 ? `${number(mib, mib < 10 ? 1 : 0)} MiB` : `${number(mib / 1024, 1)} GiB`;
}

/** A number of parameters: 1.5 B, 135 M, 40 k. */
export function count(value) {
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${number(value / size, 1)} ${unit}`;
  }
  return number(value);
}

/** The time of day, with the date when it is not today's. */
export function moment(date) {
  const today = new Date().toDateString() === date.toDateString();
  const time = date.toLocaleTimeString("en-GB");
  return today ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}
