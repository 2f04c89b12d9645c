// The table of nodes, by rank. Only visible rows are in the DOM, so a thousand nodes cost as much as thirty.

import { arrange, commonDomain, duration, h, plural, say, sayWords, show } from "./dom.js";
import { shownAs } from "./states.js";

const ROW = 36;
const ALL_UP_TO = 60;
const BEYOND = 8;
const FEW_PLACES = 3;

export class NodeTable {
  constructor(store, mayAct, drain) {
    this.store = store;
    this.mayAct = mayAct;
    this.drain = drain;
    this.standing = null;
    this.rows = new Map();
    this.filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter nodes by name, address, label or id", oninput: () => this.draw() });
    this.count = h("span", { class: "faint" });
    this.above = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: "7" }));
    this.below = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: "7" }));
    this.body = h("tbody");
    const head = ["Rank", "Node", "Standing", "Joined", "Address", "Labels"].map((name) => h("th", { scope: "col" }, name));
    head.push(h("th", { scope: "col" }, h("span", { class: "unseen" }, "Act")));
    this.table = h("table", { class: "nodes" }, h("thead", {}, h("tr", {}, head)), this.body);
    this.scroll = h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Nodes", onscroll: () => this.draw() }, this.table);
    this.empty = h("p", { class: "empty" }, "No node is here.");
    this.logs = h("p", { class: "faint logs" });
    this.element = h(
      "section", { class: "card", "aria-labelledby": "nodes-title" },
      h("div", { class: "head" }, h("h2", { id: "nodes-title" }, "Nodes"), this.count, h("span", { class: "grow" }), this.filter),
      this.logs, this.scroll, this.empty,
    );
  }

  /** Show only nodes with these standings; null: all. */
  only(standings) {
    this.standing = standings;
    this.draw();
  }

  draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const all = this.store.sorted();
    this.domain = commonDomain(all.map((node) => node.name));
    const nodes = all.filter((node) => (this.standing === null || this.standing.includes(node.standing)) && (!wanted || words(node).includes(wanted)));
    say(this.count, nodes.length === all.length ? plural(all.length, "node") : `${nodes.length} of ${plural(all.length, "node")}`);
    this.empty.hidden = nodes.length > 0;
    this.scroll.hidden = nodes.length === 0;
    say(this.empty, all.length ? "No node is like that." : "No node is here.");
    this.drawLogs(all);
    const [first, last] = this.seen(nodes.length);
    const shown = nodes.slice(first, last);
    const kept = new Map();
    const elements = shown.map((node, index) => {
      const row = this.rows.get(node.id) || this.make();
      kept.set(node.id, row);
      this.fill(row, node);
      row.tr.setAttribute("aria-rowindex", String(first + index + 2));
      return row.tr;
    });
    this.rows = kept;
    this.table.setAttribute("aria-rowcount", String(nodes.length + 1));
    this.above.firstChild.style.height = `${first * ROW}px`;
    this.below.firstChild.style.height = `${(nodes.length - last) * ROW}px`;
    arrange(this.body, [...(first ? [this.above] : []), ...elements, ...(last < nodes.length ? [this.below] : [])]);
  }

  /** Where the log files are, if the launchers say so in the label `logs`. */
  drawLogs(nodes) {
    const places = [...new Set(nodes.map((node) => node.labels.logs).filter(Boolean))];
    show(this.logs, places.length > 0);
    const more = places.length > FEW_PLACES ? `, and ${places.length - FEW_PLACES} more` : "";
    sayWords(this.logs, `Logs, on each node: ${places.slice(0, FEW_PLACES).join(", ")}${more}`);
  }

  seen(count) {
    if (count <= ALL_UP_TO) return [0, count];
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - BEYOND);
    const fits = Math.ceil((this.scroll.clientHeight || 480) / ROW) + 2 * BEYOND;
    const start = Math.min(first, Math.max(0, count - fits));
    return [start, Math.min(count, start + fits)];
  }

  make() {
    const row = { node: null };
    row.badge = h("span", { class: "badge" });
    row.note = h("span", { class: "faint note" });
    row.cells = Array.from({ length: 7 }, () => h("td"));
    row.cells[2].append(row.badge, row.note);
    row.button = h("button", { type: "button", class: "plain small", onclick: () => this.drain(row.node) }, "Drain");
    if (this.mayAct) row.cells[6].append(row.button);
    row.tr = h("tr", {}, row.cells);
    return row;
  }

  fill(row, node) {
    const age = node.joined_at === null ? "" : `${duration(Math.max(0, this.store.now() - node.joined_at))} ago`;
    say(row.cells[3], age);
    if (row.node === node && row.domain === this.domain) return;
    row.node = node;
    row.domain = this.domain;
    say(row.cells[0], node.rank === null ? "–" : String(node.rank));
    const end = node.name.length - this.domain;
    row.cells[1].replaceChildren(node.name.slice(0, end), ...(this.domain ? [h("span", { class: "domain" }, node.name.slice(end))] : []));
    row.cells[1].title = `${node.name}\nid ${node.id}${node.pid ? `, pid ${node.pid}` : ""}`;
    const shown = shownAs(node.standing, this.store.trackOf.get(node.id));
    row.badge.dataset.state = shown;
    say(row.badge, node.standing === "gone" ? shown : node.standing);
    say(row.note, node.drain === null || node.standing === "drained" ? "" : " asked to go");
    say(row.cells[4], node.addr);
    row.cells[4].title = node.addr;
    const labels = Object.entries(node.labels).map(([name, value]) => `${name}=${value}`);
    row.cells[5].replaceChildren(...labels.map((label) => h("span", { class: "label" }, label)));
    row.cells[5].title = labels.join("\n");
    row.button.hidden = node.standing === "gone" || node.standing === "left" || node.drain !== null;
    row.button.setAttribute("aria-label", `Drain ${node.name}`);
  }
}

function words(node) {
  return `${node.name} ${node.addr} ${node.id} ${node.standing} ${Object.entries(node.labels).flat().join("=")}`.toLowerCase();
}
