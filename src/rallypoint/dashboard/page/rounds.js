// The last rounds: how long each took to form, the last nodes to arrive, how long it lasted and why it ended.

import { arrange, duration, h, moment, say, sayWords, show } from "./dom.js";

const HEAD = ["Round", "Active since", "Size", "Formed in", "Last to arrive", "Lasted", "Why it ended"];
const GRAVE_ENDS = new Set(["worker failed", "stalled", "member lost", "session lost"]);
const PARTS = [["gather_s", "gathering"], ["last_call_s", "last call"], ["confirm_s", "confirming"]];

export class RoundTable {
  constructor(store) {
    this.store = store;
    this.rows = new Map();
    this.body = h("tbody");
    this.count = h("span", { class: "faint" });
    const head = HEAD.map((name) => h("th", { scope: "col" }, name));
    this.table = h("table", { class: "rounds" }, h("thead", {}, h("tr", {}, head)), this.body);
    this.empty = h("p", { class: "empty" }, "There was no round yet.");
    const key = h("p", { class: "faint parts-key" }, PARTS.map(([, name], index) => h("span", {}, h("span", { class: `swatch part${index}`, "aria-hidden": "true" }), name)));
    this.element = h(
      "section", { class: "card", "aria-labelledby": "rounds-title" },
      h("div", { class: "head" }, h("h2", { id: "rounds-title" }, "Rounds"), this.count, h("span", { class: "grow" }), key),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rounds" }, this.table), this.empty,
    );
  }

  draw() {
    const rounds = [...this.store.rounds].reverse();
    const longest = Math.max(0.001, ...rounds.map(total));
    show(this.table, rounds.length > 0);
    show(this.empty, rounds.length === 0);
    say(this.count, rounds.length ? `the last ${rounds.length}` : "");
    const kept = new Map();
    const elements = rounds.map((round) => {
      const mark = JSON.stringify([round, longest]);
      let row = this.rows.get(round.number);
      if (row === undefined || row.mark !== mark) row = { mark, tr: this.row(round, longest) };
      kept.set(round.number, row);
      return row.tr;
    });
    this.rows = kept;
    arrange(this.body, elements);
  }

  row(round, longest) {
    const now = this.store.now();
    const parts = PARTS.map(([field], index) => {
      const part = h("span", { class: `part part${index}` });
      part.style.width = `${Math.max(round[field] > 0 ? 1 : 0, (round[field] / longest) * 100)}%`;
      return part;
    });
    const words = PARTS.map(([field, name]) => `${name} ${duration(round[field])}`).join(", ");
    const came = h("td", { title: words }, h("span", { class: "took" }, duration(total(round))), h("span", { class: "parts", role: "img", "aria-label": words }, parts));
    const late = round.last_arrivals.filter(([, after]) => after > 0).slice(-3).reverse().map(([name, after]) => `${name} +${duration(after)}`);
    const all = round.last_arrivals.map(([name, after]) => `${name} +${duration(after)}`).join("\n");
    const cells = [
      h("td", {}, String(round.number)),
      h("td", {}, moment(round.active_at, now)),
      h("td", {}, round.size.toLocaleString("en")),
      came,
      textCell("wrap", late.join(", ") || "all at once", all),
      h("td", {}, round.ended ? duration(round.lasted_s) || "–" : h("span", { class: "badge", "data-state": "member" }, "goes on")),
      ended(round),
    ];
    cells.forEach((cell, index) => cell.setAttribute("data-name", HEAD[index]));
    return h("tr", {}, cells);
  }
}

function textCell(name, text, title) {
  const cell = h("td", { class: name, title });
  sayWords(cell, text);
  return cell;
}

/** The kind of the end, and the sentence with its cause. */
function ended(round) {
  const cell = h("td", { class: "wrap" });
  if (!round.ended) return cell;
  const why = h("span");
  sayWords(why, round.ended);
  cell.append(...(round.ended_kind ? [h("span", { class: "kind", "data-grave": GRAVE_ENDS.has(round.ended_kind) }, round.ended_kind), " "] : []), why);
  return cell;
}

const total = (round) => round.gather_s + round.last_call_s + round.confirm_s;

