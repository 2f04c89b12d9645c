// The list of runs.

import { arrange, h, natural, plural, say, sayWords, show } from "./dom.js";

const GRAVITY = { bad: 0, look: 1, good: 2, none: 3 };

const HEAD = ["Run", "State", "Round", "Nodes", "Sizes", "What it says"];

export function listView(open) {
  const runs = new Map();
  const rows = new Map();
  const count = h("span", { class: "faint" });
  const body = h("tbody");
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs by id or reason" });
  const empty = h("p", { class: "empty" }, "Looking …");
  const head = HEAD.map((name) => h("th", { scope: "col" }, name));
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, head)), body);
  const element = h(
    "section", { class: "card", "aria-labelledby": "runs-title" },
    h("div", { class: "head" }, h("h1", { id: "runs-title" }, "Runs"), count, h("span", { class: "grow" }), filter),
    h("div", { class: "scroll" }, table), empty,
  );
  let said = "";
  filter.addEventListener("input", draw);

  function row(run) {
    let found = rows.get(run.run_id);
    if (found === undefined) {
      const path = `/?run=${encodeURIComponent(run.run_id)}`;
      const link = h("a", {
        href: path,
        onclick: (event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          open(path);
        },
      });
      sayWords(link, run.run_id);
      const pill = h("span", { class: "pill" });
      const cells = [h("td", {}, link), h("td", {}, pill), ...[0, 1, 2, 3].map(() => h("td"))];
      cells.forEach((cell, index) => cell.setAttribute("data-name", HEAD[index]));
      found = { tr: h("tr", {}, cells), pill, cells, run: null };
      rows.set(run.run_id, found);
    }
    if (found.run !== run) {
      found.run = run;
      found.pill.dataset.tone = run.tone;
      say(found.pill, run.phase);
      say(found.cells[2], run.round ? String(run.round) : "–");
      say(found.cells[3], run.nodes.toLocaleString("en"));
      say(found.cells[4], run.min_nodes === run.max_nodes ? `${run.min_nodes}` : `${run.min_nodes}–${run.max_nodes}`);
      sayWords(found.cells[5], run.reason || "nothing was said yet");
    }
    return found.tr;
  }

  function draw() {
    const wanted = filter.value.trim().toLowerCase();
    const shown = [...runs.values()]
      .filter((run) => !wanted || `${run.run_id} ${run.reason} ${run.phase}`.toLowerCase().includes(wanted))
      .sort((a, b) => GRAVITY[a.tone] - GRAVITY[b.tone] || natural(a.run_id, b.run_id));
    arrange(body, shown.map(row));
    say(count, plural(runs.size, "run"));
    show(table, shown.length > 0);
    show(empty, shown.length === 0);
    say(empty, runs.size ? "No run is like that." : "There are no runs here yet. A run appears when its first node joins.");
  }

  return {
    element,
    trouble: () => said && `The runs cannot be read at present: ${said}`,
    take(message) {
      if (message.full) {
        runs.clear();
        rows.clear();
      }
      said = message.trouble || "";
      for (const run of message.runs || []) runs.set(run.run_id, run);
      for (const id of message.gone || []) {
        runs.delete(id);
        rows.delete(id);
      }
      document.title = `${plural(runs.size, "run")} · Rallypoint`;
      draw();
    },
  };
}
