// DOM helpers. Text is never parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** h("p", {class: "x", onclick: f}, "text", child): an element. Values that are null or false are left out. */
export function h(name, props = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Set the text of an element, if it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set the text of an element so that no name is broken at its hyphens and dots, unless it is longer than a line. */
export function sayWords(element, text) {
  if (element.dataset.said === text) return;
  element.dataset.said = text;
  element.replaceChildren(...text.split(/(\s+)/).map((part) => (/\S[-./:]\S/.test(part) ? h("span", { class: "word" }, part) : part)));
}

/** The length of the domain that all names share, or of a single one: it is left out where there is little room. */
export function commonDomain(names) {
  const first = names[0] ?? "";
  if (names.length < 2) return first.includes(".") && !/^[\d.]+$/.test(first) ? first.length - first.indexOf(".") : 0;
  for (let dot = first.indexOf(".", 1); dot > 0; dot = first.indexOf(".", dot + 1)) {
    const end = first.slice(dot);
    if (names.every((name) => name.endsWith(end) && name.length > end.length)) return end.length;
  }
  return 0;
}

export function show(element, is) {
  if (element.hidden === is) element.hidden = !is;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** The time of day, or the date and time if that was more than 20 hours ago. */
export function moment(at, now) {
  if (at === null || at === undefined) return "";
  return (now - at < 72000 ? clock : day).format(at * 1000);
}

/** A duration in a fitting unit. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5970) return `${Math.round(seconds / 60)} min`;
  if (seconds < 169200) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

/** host9 before host10. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

/** Make these the children of an element, in this order. A child that keeps its place is not moved, so it keeps the focus. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.childNodes]) if (!wanted.has(child)) child.remove();
  let at = parent.firstChild;
  for (const child of children) {
    if (child === at) at = at.nextSibling;
    else parent.insertBefore(child, at);
  }
}
