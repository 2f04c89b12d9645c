// The time line of nodes, drawn the same way for 2 nodes and for thousands: rows share the height. Where rows are thinner
// than a pixel the graver state is drawn, so a single loss among a thousand is visible. Above them: how many nodes are in
// each state.

import { arrange, commonDomain, h, moment, plural, say, show } from "./dom.js";
import { GRAVE, MEANING, STATES, palette } from "./states.js";

const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const OVERVIEW = 46;
const AXIS = 20;
const TALLEST = 24;
const MOST_HEIGHT = 520;
const TEXT_ROWS = 40;
const MOST_MARKS = 60;
const MARK = 14;

export class Timeline {
  constructor(store) {
    this.store = store;
    this.window = 60;
    this.chosen = false;
    this.cursor = null;
    this.colours = palette();
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.readout = h("p", { class: "readout", "aria-live": "polite" });
    this.stage = h(
      "div", { class: "stage", tabindex: "0", role: "group", "aria-label": "Time line of nodes. Arrow keys move along time and nodes; what is there is said below.", "aria-describedby": "timeline-summary" },
      this.canvas,
    );
    this.marks = h("div", { class: "marks", "aria-hidden": "true" });
    this.stage.append(this.marks);
    this.summary = h("p", { class: "faint", id: "timeline-summary" });
    this.buttons = WINDOWS.map(([seconds, name]) =>
      h("button", { type: "button", class: "chip", "aria-pressed": String(seconds === this.window), onclick: () => this.choose(seconds) }, name));
    this.text = h("ul", { class: "spans" });
    this.details = h("details", { ontoggle: () => this.write() }, h("summary", {}, "The time line as text"), this.text);
    const legend = h("ul", { class: "legend", "aria-label": "Colours" }, Object.keys(MEANING).map((state) =>
      h("li", { title: MEANING[state], class: `key key-${state.replace(" ", "-")}` }, h("span", { class: "swatch", "aria-hidden": "true" }), state)));
    this.element = h(
      "section", { class: "card", "aria-labelledby": "timeline-title" },
      h("div", { class: "head" }, h("h2", { id: "timeline-title" }, "Time line"), this.summary, h("span", { class: "grow" }),
        h("div", { role: "group", "aria-label": "How far back", class: "chips" }, this.buttons)),
      this.stage, this.readout, legend, this.details,
    );
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("pointerleave", () => this.unpoint());
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("blur", () => this.unpoint());
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.stage);
  }

  choose(seconds) {
    this.chosen = true;
    this.look(seconds);
    this.draw();
    this.write();
  }

  look(seconds) {
    this.window = seconds;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(WINDOWS[index][0] === seconds)));
  }

  /** Show all known time, until the user chooses a window. */
  fit() {
    if (this.chosen) return;
    let first = Infinity;
    for (const track of this.store.tracks.values()) if (track.spans.length) first = Math.min(first, track.spans[0][0]);
    const known = this.store.now() - first;
    const fits = WINDOWS.find(([seconds]) => known < seconds) || WINDOWS[WINDOWS.length - 1];
    if (fits[0] !== this.window) this.look(fits[0]);
  }

  repaint() {
    this.colours = palette();
    this.draw();
  }

  close() {
    this.resized.disconnect();
  }

  // --- layout ---

  /** The tracks with a state within the window, and the positions of everything. */
  layout() {
    const width = this.stage.clientWidth;
    const until = this.store.now();
    const from = until - this.window;
    const rows = this.store.sortedTracks().filter((track) => {
      const last = track.spans[track.spans.length - 1];
      return last !== undefined && (last[1] !== "out" || last[0] > from);
    });
    const gutter = Math.min(150, Math.max(92, width * 0.16));
    const rowHeight = Math.min(TALLEST, MOST_HEIGHT / Math.max(1, rows.length));
    const height = Math.max(TALLEST, rowHeight * rows.length);
    return { width, from, until, rows, gutter, rowHeight, height, top: OVERVIEW + 8, plot: width - gutter - 8 };
  }

  x(at, l) {
    return l.gutter + Math.min(1, Math.max(0, (at - l.from) / (l.until - l.from))) * l.plot;
  }

  // --- drawing ---

  draw() {
    this.fit();
    const l = this.layout();
    if (l.width === 0) return;
    this.shown = l;
    const ratio = window.devicePixelRatio || 1;
    const full = l.top + l.height + AXIS;
    const canvas = this.canvas;
    const [w, hgt] = [Math.round(l.width * ratio), Math.round(full * ratio)];
    if (canvas.width !== w || canvas.height !== hgt) {
      canvas.width = w;
      canvas.height = hgt;
      canvas.style.width = `${l.width}px`;
      canvas.style.height = `${full}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, l.width, full);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis(pen, l);
    const bins = this.drawRows(pen, l, ratio);
    this.drawOverview(pen, l, bins);
    this.drawRounds(pen, l);
    this.drawNames(pen, l);
    if (this.cursor) this.drawCursor(pen, l);
    this.placeMarks(l);
    this.summarise(l);
  }

  drawAxis(pen, l) {
    const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900];
    const step = steps.find((s) => (l.plot * s) / this.window >= 84) || 900;
    const zone = new Date(l.until * 1000).getTimezoneOffset() * 60;
    pen.fillStyle = this.colours.faint;
    pen.textAlign = "center";
    for (let at = Math.ceil((l.from - zone) / step) * step + zone; at <= l.until; at += step) {
      const x = Math.round(this.x(at, l)) + 0.5;
      pen.fillStyle = this.colours.line;
      pen.fillRect(x - 0.5, 0, 1, l.top + l.height);
      if (x > l.gutter + 24 && x < l.width - 34) {
        pen.fillStyle = this.colours.faint;
        pen.fillText(moment(at, l.until), x, l.top + l.height + AXIS / 2 + 1);
      }
    }
  }

  /** Draws every span, the graver ones last; returns how many nodes were in each state, by column of pixels. */
  drawRows(pen, l, ratio) {
    const columns = Math.max(1, Math.ceil(l.plot));
    const bins = Object.fromEntries(STATES.map((state) => [state, new Int32Array(columns + 1)]));
    const layers = Object.fromEntries(STATES.map((state) => [state, []]));
    const gap = l.rowHeight >= 10 ? 2 : l.rowHeight >= 4 ? 1 : 0;
    l.rows.forEach((track, index) => {
      const y0 = Math.round((l.top + index * l.rowHeight) * ratio) / ratio;
      const y1 = Math.max(y0 + 1 / ratio, Math.round((l.top + (index + 1) * l.rowHeight - gap) * ratio) / ratio);
      const spans = track.spans;
      for (let i = 0; i < spans.length; i++) {
        const [at, state, round] = spans[i];
        const end = i + 1 < spans.length ? spans[i + 1][0] : l.until;
        if (end < l.from || state === "out") continue;
        const x0 = this.x(at, l);
        const x1 = this.x(end, l);
        const c0 = Math.min(columns, Math.floor(x0 - l.gutter));
        const c1 = Math.min(columns, Math.max(c0 + (GRAVE.has(state) ? 1 : 0), Math.floor(x1 - l.gutter)));
        bins[state][c0] += 1;
        bins[state][c1] -= 1;
        if (x1 - x0 < 0.4 && !GRAVE.has(state)) continue;
        layers[state].push(x0, y0, Math.max(GRAVE.has(state) ? 4 : 0.6, x1 - x0), y1 - y0, round);
      }
    });
    for (const state of STATES) {
      const rects = layers[state];
      pen.fillStyle = this.colours[state];
      for (let i = 0; i < rects.length; i += 5) {
        if (state === "member" || state === "forming") pen.fillStyle = state === "member" && rects[i + 4] % 2 ? this.colours.member : state === "member" ? this.colours.member2 : this.colours.forming;
        const height = GRAVE.has(state) ? Math.max(2, rects[i + 3]) : rects[i + 3];
        pen.fillRect(rects[i], rects[i + 1], rects[i + 2], height);
      }
    }
    return bins;
  }

  drawOverview(pen, l, bins) {
    const columns = bins.member.length - 1;
    const order = ["member", "forming", "joining", "waiting", "spare", "drained", "left", "held back", "gone", "lost"];
    const running = Object.fromEntries(order.map((state) => [state, 0]));
    const most = Math.max(1, l.rows.length);
    for (let c = 0; c < columns; c++) {
      let y = OVERVIEW;
      for (const state of order) {
        running[state] += bins[state][c];
        if (running[state] <= 0) continue;
        const tall = Math.max(GRAVE.has(state) ? 2 : 0.5, (running[state] / most) * (OVERVIEW - 6));
        pen.fillStyle = this.colours[state];
        pen.globalAlpha = state === "member" ? 0.55 : 0.9;
        pen.fillRect(l.gutter + c, y - tall, 1, tall);
        y -= tall;
      }
    }
    pen.globalAlpha = 1;
    pen.fillStyle = this.colours.faint;
    pen.textAlign = "right";
    pen.fillText("nodes", l.gutter - 8, OVERVIEW - 7);
    pen.fillText(String(l.rows.length), l.gutter - 8, 9);
    pen.fillStyle = this.colours.line;
    pen.fillRect(l.gutter, OVERVIEW + 0.5, l.plot, 1);
  }

  drawRounds(pen, l) {
    pen.textAlign = "left";
    let free = -Infinity;
    for (const round of this.store.rounds) {
      if (round.active_at < l.from || round.active_at > l.until) continue;
      const x = Math.round(this.x(round.active_at, l));
      pen.fillStyle = this.colours.text;
      pen.globalAlpha = 0.45;
      pen.fillRect(x, 0, 1, l.top + l.height);
      pen.globalAlpha = 1;
      const label = `round ${round.number}`;
      const wide = pen.measureText(label).width;
      const left = x + wide + 10 < l.width ? x + 5 : x - wide - 5;
      if (left <= free) continue;
      pen.fillStyle = this.colours.card;
      pen.globalAlpha = 0.85;
      pen.fillRect(left - 3, 1, wide + 6, 15);
      pen.globalAlpha = 1;
      pen.fillStyle = this.colours.text;
      pen.fillText(label, left, 9);
      free = left + wide + 4;
    }
  }

  drawNames(pen, l) {
    pen.textAlign = "right";
    const every = Math.max(1, Math.ceil(15 / l.rowHeight));
    const room = l.gutter - 14;
    const domain = commonDomain(l.rows.map((track) => track.name));
    l.rows.forEach((track, index) => {
      if (index % every || (every > 1 && (l.rows.length - index) * l.rowHeight < 8)) return;
      const y = l.top + (index + 0.5) * l.rowHeight + (every > 1 ? 5 : -1);
      pen.fillStyle = GRAVE.has(track.spans[track.spans.length - 1][1]) ? this.colours.lost : this.colours.text;
      pen.fillText(shorten(pen, track.name.slice(0, track.name.length - domain), room), l.gutter - 8, y);
    });
  }

  /** A mark for each loss, and one for several at the same place: what and when is in its title. */
  placeMarks(l) {
    const found = new Map();
    l.rows.forEach((track, index) => {
      for (const [at, state] of track.spans) {
        if (!GRAVE.has(state) || at < l.from) continue;
        const x = this.x(at, l);
        const y = l.top + (index + 0.5) * l.rowHeight - 1;
        const key = `${Math.round(x / MARK)} ${Math.round(y / MARK)}`;
        const mark = found.get(key) || { x, y, state, told: [] };
        mark.told.push(`${moment(at, l.until)} ${track.name}: ${state}`);
        found.set(key, mark);
      }
    });
    const marks = [...found.values()].slice(-MOST_MARKS);
    const old = [...this.marks.children];
    arrange(this.marks, marks.map((mark, index) => {
      const element = old[index] || h("span");
      element.className = `mark key-${mark.state.replace(" ", "-")}`;
      element.title = mark.told.slice(0, 8).join("\n") + (mark.told.length > 8 ? `\nand ${mark.told.length - 8} more` : "");
      element.style.left = `${mark.x}px`;
      element.style.top = `${mark.y}px`;
      return element;
    }));
  }

  drawCursor(pen, l) {
    const { row, at } = this.cursor;
    pen.fillStyle = this.colours.accent;
    pen.globalAlpha = 0.8;
    pen.fillRect(Math.round(this.x(at, l)), 0, 1, l.top + l.height);
    if (l.rows.length) {
      pen.globalAlpha = 0.22;
      pen.fillRect(l.gutter, l.top + Math.min(row, l.rows.length - 1) * l.rowHeight, l.plot, Math.max(2, l.rowHeight));
    }
    pen.globalAlpha = 1;
  }

  summarise(l) {
    const shown = plural(l.rows.length, "node");
    say(this.summary, `${shown}, the last ${WINDOWS.find(([seconds]) => seconds === this.window)[1]}`);
  }

  // --- pointing ---

  point(event) {
    const l = this.shown;
    if (!l) return;
    const box = this.stage.getBoundingClientRect();
    const at = l.from + ((event.clientX - box.left - l.gutter) / l.plot) * (l.until - l.from);
    const row = Math.floor((event.clientY - box.top - l.top) / l.rowHeight);
    if (at < l.from || at > l.until || row < 0 || row >= l.rows.length) this.unpoint();
    else this.put(row, at);
  }

  unpoint() {
    if (this.cursor === null) return;
    this.cursor = null;
    say(this.readout, "");
    this.draw();
  }

  key(event) {
    const l = this.layout();
    const step = l.rowHeight >= 8 ? 1 : Math.ceil(8 / l.rowHeight);
    const moves = { ArrowUp: [-step, 0], ArrowDown: [step, 0], ArrowLeft: [0, -this.window / 60], ArrowRight: [0, this.window / 60], Home: [0, -this.window], End: [0, this.window] };
    if (event.key === "Escape") this.unpoint();
    if (!(event.key in moves) || !l.rows.length) return;
    event.preventDefault();
    const { row, at } = this.cursor || { row: 0, at: l.until };
    const [rows, seconds] = moves[event.key];
    this.put(Math.min(l.rows.length - 1, Math.max(0, row + rows)), Math.min(l.until, Math.max(l.from, at + seconds)));
  }

  put(row, at) {
    this.cursor = { row, at };
    this.draw();
    const l = this.shown;
    const track = l.rows[row];
    if (track === undefined) return;
    const beside = Math.max(1, Math.round(3 / l.rowHeight));
    const near = l.rows.slice(Math.max(0, row - beside + 1), row + beside);
    const grave = beside > 1 ? near.find((one) => GRAVE.has(stateAt(one, at)[1])) : undefined;
    const chosen = grave || track;
    const [since, state, round] = stateAt(chosen, at);
    const what = state === "out" ? "not there" : `${state}${round ? ` (round ${round})` : ""}`;
    const from = since > 0 ? ` since ${moment(since, l.until)}` : "";
    const rank = chosen.rank === null ? "" : `, rank ${chosen.rank}`;
    say(this.readout, `${moment(at, l.until)}: ${chosen.name}${rank}: ${what}${from}`);
  }

  // --- as text ---

  write() {
    if (!this.details.open) return;
    const l = this.layout();
    const wanted = l.rows.length <= TEXT_ROWS ? l.rows : l.rows.filter((track) => track.spans.some(([at, state]) => at >= l.from && GRAVE.has(state)));
    const items = wanted.slice(0, TEXT_ROWS).map((track) => {
      const told = track.spans
        .filter(([, state], i) => state !== "out" && (i + 1 === track.spans.length || track.spans[i + 1][0] > l.from))
        .map(([at, state, round]) => `${moment(at, l.until)} ${state}${round ? ` of round ${round}` : ""}`);
      return h("li", {}, h("strong", {}, track.name), ` ${told.join(", ")}`);
    });
    if (wanted.length < l.rows.length) {
      items.unshift(h("li", {}, `${plural(l.rows.length, "node")}; only those that were lost or held back are listed: ${wanted.length}.`));
    }
    this.text.replaceChildren(...items);
  }

  update() {
    this.draw();
    this.write();
    show(this.element, this.store.tracks.size > 0);
  }
}

function stateAt(track, at) {
  let found = [0, "out", 0];
  for (const span of track.spans) {
    if (span[0] > at) break;
    found = span;
  }
  return found;
}

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let keep = text.length;
  while (keep > 1 && pen.measureText(`…${text.slice(text.length - keep)}`).width > room) keep -= 1;
  return `…${text.slice(text.length - keep)}`;
}

